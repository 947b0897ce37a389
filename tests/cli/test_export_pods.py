"""Manifests for Kubernetes, read by the models of their published schemas (the extra `dev` has them)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kubeflow_trainer_api.models as models
import pytest
import yaml

from autoparallel.errors import UserError
from autoparallel.exports import Plan, Pods, export
from autoparallel.planner.strategy.types import Batch, Mesh, Strategy
from autoparallel.profiles import load_cluster

PLAN = Plan(
    path="p.toml", strategy=Strategy(batch=Batch(global_=32, micro=1), mesh=Mesh(dp_shard=16)),
    cluster=load_cluster("h100-sxm:2x8"), seq_len=4096,
)  # fmt: skip


ELASTIC = replace(PLAN, pods=Pods(min_nodes=1, near=("example.com/rack", "topology.kubernetes.io/zone")))
ANNOTATION = "alpha.jobset.sigs.k8s.io/exclusive-topology"


def _documents(target: str, plan: Plan = PLAN) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(export(plan, target).text))


def _pods(target: str, plan: Plan = PLAN) -> dict[str, Any]:
    """The pods' part of a JobSet; what a TrainJob patches of its runtime's."""
    spec = _documents(target, plan)[-1]["spec"]
    if target == "trainjob":
        (patch,) = spec["runtimePatches"]
        spec = patch["trainingRuntimeSpec"]["template"]["spec"]
    (job,) = spec["replicatedJobs"]
    assert job["name"] == "node"
    return dict(job["template"]["spec"]["template"]["spec"])


def _command(target: str, plan: Plan = PLAN) -> list[str]:
    has_it = (
        _pods(target, plan)["containers"][0]
        if target == "jobset"
        else _documents(target, plan)[-1]["spec"]["trainer"]
    )
    return list(has_it["command"])


@pytest.mark.parametrize("plan", [PLAN, ELASTIC], ids=["all nodes", "elastic"])
@pytest.mark.parametrize(
    ("target", "model"),
    [("jobset", models.JobsetV1alpha2JobSet), ("trainjob", models.TrainerV1alpha1TrainJob)],
)
def test_a_manifest_has_nothing_that_its_schema_does_not_know(target: str, model: Any, plan: Plan) -> None:
    *_, document = _documents(target, plan)
    assert model.from_dict(document).to_dict() == document


@pytest.mark.parametrize("target", ["jobset", "trainjob"])
def test_pods_share_a_volume_for_the_run_and_are_reached_by_each_other_alone(target: str) -> None:
    claim, policy, job = _documents(target)
    assert (claim["kind"], policy["kind"]) == ("PersistentVolumeClaim", "NetworkPolicy")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    pods = _pods(target)
    (volume,) = (v for v in pods["volumes"] if v["name"] == "run")
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    mounts = {m["name"]: m["mountPath"] for m in pods["containers"][0]["volumeMounts"]}
    assert mounts == {"shared-memory": "/dev/shm", "run": "/run/autoparallel"}
    # Pods are named by their JobSet, and a TrainJob's JobSet by the TrainJob.
    ours = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": job["metadata"]["name"]}}
    assert policy["spec"]["podSelector"] == ours
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": ours}]}]
    assert pods["terminationGracePeriodSeconds"] > 90


@pytest.mark.parametrize("target", ["jobset", "trainjob"])
def test_pods_run_our_agent(target: str) -> None:
    command = _command(target)
    assert command[:2] == ["autoparallel", "run"]
    assert "--grace=90" in command


def test_a_jobset_has_a_pod_and_its_devices_for_each_node() -> None:
    (job,) = _documents("jobset")[-1]["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["completions"] == job["template"]["spec"]["parallelism"] == 2
    assert _pods("jobset")["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8, "rdma/hca": 1}
    assert {"--nnodes=2", "--nproc-per-node=8"} < set(_command("jobset"))


def test_a_trainjob_takes_nodes_processes_and_the_meeting_from_what_trainer_sets() -> None:
    trainer = _documents("trainjob")[-1]["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 8, "rdma/hca": 1}
    assert {
        "--nnodes=$(PET_NNODES)",
        "--nproc-per-node=$(PET_NPROC_PER_NODE)",
        "--rdzv-endpoint=$(PET_MASTER_ADDR):$(PET_MASTER_PORT)",
    } < set(trainer["command"])
    assert "has bounds MIN:MAX" in export(PLAN, "trainjob").text


def test_with_fewest_nodes_the_others_go_on_while_a_pod_is_replaced() -> None:
    def failures(plan: Plan) -> dict[str, Any]:
        spec = _documents("jobset", plan)[-1]["spec"]["replicatedJobs"][0]["template"]["spec"]
        return {key: spec.get(key) for key in ("backoffLimit", "successPolicy")}

    assert failures(PLAN) == {"backoffLimit": 0, "successPolicy": None}
    assert failures(ELASTIC) == {
        "backoffLimit": 100,
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
    }
    assert "--nnodes=1:2" in _command("jobset", ELASTIC)
    assert "--nnodes=1:$(PET_NNODES)" in _command("trainjob", ELASTIC)


@pytest.mark.parametrize("target", ["jobset", "trainjob"])
def test_pods_prefer_nodes_near_each_other_by_the_labels_that_the_cluster_has(target: str) -> None:
    def near(plan: Plan) -> list[tuple[int, str]]:
        terms = _pods(target, plan)["affinity"]["podAffinity"][
            "preferredDuringSchedulingIgnoredDuringExecution"
        ]
        return [(term["weight"], term["podAffinityTerm"]["topologyKey"]) for term in terms]

    assert near(PLAN) == [(100, "topology.kubernetes.io/zone")]
    assert near(ELASTIC) == [(100, "example.com/rack"), (50, "topology.kubernetes.io/zone")]
    assert f"#   {ANNOTATION}: LABEL" in export(PLAN, target).text


@pytest.mark.parametrize(
    ("target", "pods", "words"),
    [
        ("jobset", Pods(min_nodes=3), "--min-nodes 3: the plan is for 2; write 1 to 2"),
        ("trainjob", Pods(near=("rack: a",)), "--near rack: a: not the name of a label; `kubectl get nodes"),
        ("slurm", Pods(min_nodes=1), "--to slurm: --min-nodes and --near are about pods, for --to jobset and trainjob"),
    ],
)  # fmt: skip
def test_what_pods_cannot_be_told_is_refused(target: str, pods: Pods, words: str) -> None:
    with pytest.raises(UserError) as refused:
        export(replace(PLAN, pods=pods), target)
    assert words in str(refused.value)
