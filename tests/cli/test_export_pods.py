"""Manifests for Kubernetes, read by the models of their published schemas (the extra `dev` has them)."""

from __future__ import annotations

from typing import Any

import kubeflow_trainer_api.models as models
import yaml

from autoparallel.exports import EXPORTS
from autoparallel.exports.plan import Plan
from autoparallel.planner.strategy.types import Batch, Mesh, Strategy
from autoparallel.profiles import load_cluster

PLAN = Plan(
    path="p.toml", strategy=Strategy(batch=Batch(global_=32, micro=1), mesh=Mesh(dp_shard=16)),
    cluster=load_cluster("h100-sxm:2x8"), seq_len=4096,
)  # fmt: skip


def _documents(target: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(EXPORTS[target](PLAN).text))


def test_jobset_and_trainjob_are_what_their_schemas_say() -> None:
    (train,) = _documents("trainjob")
    read = models.TrainerV1alpha1TrainJob.from_dict(train)
    assert read.to_dict() == train, "nothing that the schema does not know"
    claim, policy, jobset = _documents("jobset")
    assert (claim["kind"], policy["kind"]) == ("PersistentVolumeClaim", "NetworkPolicy")
    read = models.JobsetV1alpha2JobSet.from_dict(jobset)
    assert read.to_dict() == jobset
    pods = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert pods["completions"] == pods["parallelism"] == 2
    (container,) = pods["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "rdma/hca": 1}
    assert "--nproc-per-node=8" in container["command"]
