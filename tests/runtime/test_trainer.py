"""Runs that are interrupted consume the samples, and have the losses, of one that is not."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autoparallel.errors import UserError
from autoparallel.measured import read_measured
from autoparallel.planner.strategy.file import read_strategy_file
from autoparallel.planner.strategy.types import Batch, Mesh, Strategy
from autoparallel.planner.strategy.write import write_text
from autoparallel.profiles import load_device
from autoparallel.replan import LOOK_S, NEXT
from autoparallel.runtime.monitor.record import read_record
from autoparallel.trainer import Step, Trainer
from tests.runtime.models import Mlp
from tests.runtime.train_elastic import Numbers, main

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "tests/runtime/train_elastic.py")
STEPS = 14
WAIT_S = 400.0  # as long as a busy machine takes: alone it is some 20 s
TENSORS = "[mesh]\npp = 1\ntp = 2\n"
PIPELINE = "[mesh]\npp = 2\ntp = 1\n"


class Machines:
    """Agents of one run, on this machine, and what its ranks wrote down."""

    def __init__(self, folder: Path, steps: int = STEPS) -> None:
        self.folder, self.steps = folder, steps
        folder.mkdir(parents=True, exist_ok=True)
        self.agents: list[subprocess.Popen[str]] = []

    def start(self, *options: str, timeout_s: float | None = None) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        limit = [str(timeout_s)] if timeout_s is not None else []
        agent = subprocess.Popen(
            [sys.executable, "-m", "autoparallel", "run", *options, SCRIPT, str(self.folder), str(self.steps), *limit],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.agents.append(agent)
        return agent

    def steps_done(self) -> list[dict[str, Any]]:
        found = []
        for log in self.folder.glob("log-*.jsonl"):
            for line in log.read_text().splitlines():
                if line.endswith("}"):
                    found.append(json.loads(line))
        return found

    def wait(self, ready: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """What was done once `ready` says so."""
        end = time.monotonic() + WAIT_S
        while not ready(found := self.steps_done()):
            ended = [a for a in self.agents if a.poll() not in (None, 0, -signal.SIGKILL)]
            if time.monotonic() > end or ended:
                self.stop()
                raise AssertionError("\n".join([*(a.communicate()[0] for a in self.agents), str(found)]))
            time.sleep(0.05)
        return found

    def stop(self) -> None:
        for agent in self.agents:
            agent.kill()

    def until(self, ready: Callable[[], bool]) -> None:
        self.wait(lambda _: ready())

    def alive(self, step: int = 1) -> set[int]:
        """Workers that have done `step`, or one after it, and are still there."""
        return {e["pid"] for e in self.steps_done() if e["step"] >= step and not _gone(e["pid"])}


def _gone(pid: int) -> bool:
    """No such process any more, or only its status."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def _consumed(entries: list[dict[str, Any]], steps: int) -> list[tuple[int, ...]]:
    """The samples of every step: however often it was done, each time the same ones, each once."""
    found = []
    for step in range(1, steps + 1):
        attempts: dict[Any, dict[int, tuple[int, ...]]] = {}
        for entry in (e for e in entries if e["step"] == step):
            attempts.setdefault(entry["world"], {})[entry["share"]] = tuple(entry["ids"])
        ids = {
            sum((shares[n] for n in sorted(shares)), ())
            for shares in attempts.values()
            if len(shares) == max(shares) + 1
        }
        whole = {i for i in ids if len(i) == 8}
        assert len(whole) == 1, (step, attempts)
        found.append(whole.pop())
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The run that nothing interrupts, in one process: this one."""
    folder, threads = tmp_path_factory.mktemp("straight"), torch.get_num_threads()
    try:
        main(folder, STEPS).close()
    finally:
        torch.set_num_threads(threads)
    return Machines(folder).steps_done()


def _equal(entries: list[dict[str, Any]], straight: list[dict[str, Any]]) -> None:
    assert _consumed(entries, STEPS) == _consumed(straight, STEPS)
    losses = {entry["step"]: entry["loss"] for entry in straight}
    for entry in entries:
        assert entry["loss"] == pytest.approx(losses[entry["step"]], rel=1e-9), entry


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


@pytest.mark.distributed
def test_a_run_goes_on_under_the_strategy_that_it_is_given(
    tmp_path: Path, straight: list[dict[str, Any]]
) -> None:
    run = Machines(tmp_path)
    (tmp_path / "strategy-2.toml").write_text(TENSORS)
    (tmp_path / "hold-2").write_text("4")
    agent = run.start("--nproc-per-node", "2")
    run.wait(lambda done: sum(e["step"] == 4 for e in done) == 2)
    time.sleep(LOOK_S)
    write_text(tmp_path / "run" / NEXT, PIPELINE)
    (tmp_path / "hold-2").unlink()
    said, _ = agent.communicate(timeout=WAIT_S)
    assert agent.returncode == 0, said
    assert "told to go on under next.toml: saved after step 4" in said
    before, after = read_record(tmp_path / "run")
    assert ([s["step"] for s in before.steps][-1], after.steps[0]["step"]) == (4, 5), "nothing is done again"
    ran = [
        read_strategy_file(tmp_path / "run" / str(r.start["strategy"])).constraints for r in (before, after)
    ]
    assert [(of["mesh.pp"], of["mesh.tp"]) for of in ran] == [(1, 2), (2, 1)], "each start says what it ran"
    _equal(run.steps_done(), straight)


@pytest.mark.distributed
@pytest.mark.long
def test_machines_come_and_go_and_ranks_are_killed(tmp_path: Path, straight: list[dict[str, Any]]) -> None:
    run = Machines(tmp_path)
    (tmp_path / "strategy-2.toml").write_text(TENSORS)
    meet = (
        "--nnodes",
        "1:2",
        "--nproc-per-node",
        "1",
        "--rdzv-endpoint",
        f"localhost:{_free_port()}",
        "--join",
        "1",
    )
    for world, step in ((1, 2), (2, 4)):
        (tmp_path / f"hold-{world}").write_text(str(step))
    run.start(*meet)
    run.wait(lambda done: any(e["step"] == 2 for e in done))
    second = run.start(*meet)
    done = run.wait(lambda done: sum(e["world"] == 2 and e["step"] == 4 for e in done) == 2)
    assert min(e["step"] for e in done if e["world"] == 2) == 3, (
        "those who were here saved before they joined"
    )
    (tmp_path / "hold-1").write_text("6")
    second.kill()  # the machine is gone, and its process with it: before the other goes on, which is held until then
    second.wait()
    run.until(lambda: len(run.alive()) == 1)
    (tmp_path / "hold-2").unlink()
    run.wait(lambda done: any(e["world"] == 1 and e["step"] >= 6 for e in done))
    run.stop()  # all at once
    said = run.agents[0].communicate()[0]
    assert "rank 1 (process " in said
    assert "has ended or is frozen, last seen in step" in said, said
    run.until(lambda: not run.alive())  # no process is left behind

    run.agents.clear()
    (tmp_path / "strategy-2.toml").write_text(PIPELINE)
    (tmp_path / "hold-2").write_text("9")
    last = run.start("--nproc-per-node", "2", "--grace", "1", timeout_s=10.0)
    run.wait(lambda _: len(run.alive(9)) == 2)
    frozen = max(run.alive(9))
    os.kill(frozen, signal.SIGSTOP)
    (tmp_path / "hold-2").unlink()
    said, _ = last.communicate(timeout=WAIT_S)
    assert last.returncode == 0, said
    assert f"(process {frozen} on " in said, said
    assert "error: no step in 10 s: rank " in said
    # Checkpoints are written beside training: where the one of step 6 was not whole yet, the one before it is taken.
    resumed = [int(step) for step in re.findall(r"going on after step (\d+) on 2 processes", said)]
    assert resumed, said
    assert resumed[-1] in (3, 6), said
    assert not run.alive()
    _equal(run.steps_done(), straight)
    starts = read_record(tmp_path / "run")
    assert [s["step"] for s in starts[-1].steps] == list(range(resumed[-1] + 1, STEPS + 1))
    assert starts[-1].start["predicted"]["step_time_s"] > 0
    assert (
        read_measured(tmp_path / "run", load_device("cpu-gloo"))[-1].predicted_s(load_device("cpu-gloo")) > 0
    )


def test_a_run_whose_last_state_is_not_saved_does_not_end_well(tmp_path: Path) -> None:
    """Whoever reads the status, or starts what comes next, is told."""

    def in_the_way(step: Step) -> None:
        if step.number == 3:
            trainer.checkpoints.finish()
            shutil.rmtree(tmp_path / "run" / "checkpoints")
            (tmp_path / "run" / "checkpoints").write_text("")

    def made(**changed: Any) -> Trainer:
        return Trainer(
            Mlp().double(), optimizer=torch.optim.SGD, data=Numbers(), global_batch=8, loss_fn=F.cross_entropy,
            cluster="cpu-gloo:1x1", folder=tmp_path / "run", every=2, on_step=in_the_way, **changed,
        )  # fmt: skip

    with pytest.raises(UserError):  # which leaves the folder to the next one
        made(strategy=Strategy(batch=Batch(global_=8, micro=8), mesh=Mesh(pp=2)), pinned=True)
    trainer = made()
    with pytest.raises(UserError, match="all 3 steps are done, and their result is not saved"):
        trainer.fit(3)
    trainer.close()
    (tmp_path / "run" / "checkpoints").unlink()
    trainer = made()
    trainer.fit(2)
    assert trainer.checkpoints.last_good == 2
    trainer.close()
    (graph,) = (tmp_path / "run").glob("graph-*.json")
    graph.write_text("{")
    with pytest.raises(UserError, match=rf"{graph.name}: .*; remove it, and the model is captured anew"):
        made()
