"""Files that start a run which survives: bash, the published schemas, and a queue that is played."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from autoparallel.exports import EXPORTS
from autoparallel.exports.plan import Plan
from autoparallel.planner.strategy.types import Batch, Mesh, Strategy
from autoparallel.profiles import load_cluster

PLAN = Plan(
    path="p.toml", strategy=Strategy(batch=Batch(global_=32, micro=1), mesh=Mesh(dp_shard=16)),
    cluster=load_cluster("h100-sxm:2x8"), seq_len=4096,
)  # fmt: skip


def _played(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def test_slurm_is_told_to_requeue_after_the_step_has_saved(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(EXPORTS["slurm-elastic"](PLAN).text)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    log = tmp_path / "log"
    _played(tmp_path, "scontrol", f'[ "$1" = show ] && echo node-a || echo "scontrol $*" >> {log}')
    _played(
        tmp_path,
        "srun",
        f"trap 'echo saved >> {log}; exit 143' TERM; echo \"srun $*\" >> {log}; while :; do sleep 0.05; done",
    )
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "n",
    }
    job = subprocess.Popen(["bash", script, "train.py", "--lr", "1"], env=environment)
    end = time.monotonic() + 120
    while not log.exists() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.2)
    job.send_signal(10)  # SIGUSR1
    assert job.wait(timeout=120) == 0
    started, *then = log.read_text().splitlines()
    assert (
        "autoparallel run --nnodes 2 --nproc-per-node 8 --rdzv-endpoint node-a:29500 --rdzv-id 17-0"
        in started
    )
    assert started.endswith("train.py --lr 1")
    assert then == ["saved", "scontrol requeue 17"]


def test_a_job_that_fails_ends_with_its_status(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(EXPORTS["slurm-elastic"](PLAN).text)
    _played(tmp_path, "scontrol", "echo node-a")
    _played(tmp_path, "srun", "exit 7")
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "n",
    }
    assert subprocess.run(["bash", script], env=environment, check=False, timeout=120).returncode == 7


def _documents(target: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all(EXPORTS[target](PLAN).text))


def test_jobset_and_trainjob_are_what_their_schemas_say() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
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
