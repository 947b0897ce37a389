"""A replica is killed and comes back: the other goes on with the same samples and losses, and hands its state on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autoparallel.errors import UserError
from autoparallel.plan_cache import read_source
from autoparallel.planner.strategy.types import Batch, GradSync, Mesh, Outer, Phase, Strategy
from autoparallel.planner.strategy.write import write_text
from autoparallel.replan import of_one_replica
from autoparallel.runtime.checkpoints.ledger import Ledger
from tests.runtime.models import Mlp
from tests.runtime.train_elastic import Numbers

ROOT = Path(__file__).resolve().parents[2]
BATCH, COUNT = 8, 2
LIGHTHOUSE = Path(sys.executable).with_name("torchft_lighthouse")


def _alone(steps: int) -> list[float]:
    """Losses of a run in one process that nothing interrupts."""
    torch.manual_seed(0)
    data, model, ledger, losses = Numbers(), Mlp().double(), Ledger(samples=37, seed=0), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    for _ in range(steps):
        inputs, targets = zip(*(data[i] for i in ledger.batch(BATCH).tolist()), strict=True)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.stack(inputs)), torch.stack(targets))
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        ledger = ledger.after(BATCH)
    return losses


def _done(folder: Path) -> list[dict[str, Any]]:
    lines = (line for log in sorted(folder.glob("log-*.jsonl")) for line in log.read_text().splitlines())
    return sorted((json.loads(line) for line in lines if line.endswith("}")), key=lambda entry: entry["at"])


def _until(true: Callable[[], bool], said: Path) -> None:
    deadline = time.monotonic() + 240
    while not true():
        assert time.monotonic() < deadline, said.read_text()[-3000:]
        time.sleep(0.2)


@pytest.mark.distributed
@pytest.mark.long
@pytest.mark.sweep(1)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_replica_drops_out_and_comes_back(tmp_path: Path, processes: int) -> None:
    pytest.importorskip("torchft")
    mesh = f"dp_shard = {processes}\n[shard]\nzero = {3 if processes > 1 else 0}\n"
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    (tmp_path / "strategy.toml").write_text(f"[mesh]\npp = 1\ntp = 1\ndp_replicate = {COUNT}\n{mesh}")
    said, script = tmp_path / "said", str(ROOT / "tests/runtime/train_replicas.py")

    with contextlib.ExitStack() as ended, said.open("ab") as out:

        def start(*command: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(command, env=env, stdout=out, stderr=out)
            ended.callback(process.wait)
            ended.callback(process.kill)
            return process

        def replica(name: str) -> subprocess.Popen[bytes]:
            return start(
                sys.executable, "-m", "autoparallel", "run", "--nproc-per-node", str(processes), "--lighthouse", f"http://localhost:{port}",
                "--replica", name, script, str(tmp_path), str(COUNT), "0.3",
            )  # fmt: skip

        def of_b() -> list[dict[str, Any]]:
            return [entry for entry in _done(tmp_path) if entry["replica"] == "b"]

        start(
            str(LIGHTHOUSE), "--bind", f"[::]:{port}", "--min_replicas", "1", "--join_timeout_ms", "1000",
            "--quorum_tick_ms", "50", "--heartbeat_timeout_ms", "1500",
        )  # fmt: skip
        replicas = [replica("a")]
        _until(lambda: bool(_done(tmp_path)), said)
        replicas.append(replica("b"))
        _until(lambda: bool(of_b()), said)
        first = of_b()[0]["pid"]
        os.kill(first, signal.SIGKILL)
        _until(lambda: len({entry["pid"] for entry in of_b()}) > processes, said)
        last = (_done(tmp_path)[-1]["step"] // 10 + 2) * 10
        write_text(tmp_path / "last", str(last))
        assert [one.wait(timeout=240) for one in replicas] == [0, 0], said.read_text()[-3000:]

    entries, alone, ledger = _done(tmp_path), _alone(last), Ledger(samples=37, seed=0)
    for step in range(1, last + 1):
        own = [entry for entry in entries if entry["step"] == step]
        assert [entry["loss"] for entry in own] == pytest.approx([alone[step - 1]] * len(own), rel=1e-9)
        consumed = sorted(sample for entry in own for sample in entry["ids"])
        assert consumed == sorted(ledger.batch(BATCH).tolist()), f"step {step}"
        ledger = ledger.after(BATCH)
    alone_again = [
        e["step"] for e in entries if len(e["ids"]) == BATCH // processes and e["step"] > of_b()[0]["step"]
    ]
    assert alone_again, "the other went on while it was away"
    assert {entry["pid"] for entry in of_b()} > {first}, "it came back"


def test_a_replica_has_its_share_of_a_run() -> None:
    whole = Strategy(batch=Batch(global_=12, micro=1), mesh=Mesh(dp_replicate=6, dp_shard=2))
    own = of_one_replica(read_source(whole), 3).strategy
    assert own is not None
    assert (own.mesh.dp_replicate, own.mesh.dp_shard, own.batch.global_) == (2, 2, 4)
    with pytest.raises(UserError, match=r"mesh.dp_replicate = 6 has no 4 equal shares"):
        of_one_replica(read_source(whole), 4)
    with pytest.raises(UserError, match=r"mesh.dp_replicate is missing"):
        of_one_replica(read_source(None), 2)
    for lossy in (
        replace(whole, grad_sync=GradSync(compression=("topk:0.1",))),
        replace(whole, outer=Outer(algorithm="diloco")),
        replace(whole, phases=(Phase(from_step=3, keys=(("grad_sync.bucket_mib", 50.0),)),)),
    ):
        with pytest.raises(UserError, match="sum their gradients as they are"):
            of_one_replica(read_source(lossy), 3)
    of_one_replica(read_source(replace(whole, grad_sync=GradSync(compression=("none",)))), 3)
