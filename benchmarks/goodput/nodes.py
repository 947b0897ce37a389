"""The nodes of a run: an agent each, with one process; they fail with SIGKILL and come back after a while."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from benchmarks.goodput.worker import BATCH, NODE, NODES, SAMPLE_S

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 240.0
LIGHTHOUSE = Path(sys.executable).with_name("torchft_lighthouse")
HEARTBEAT_MS = 2000  # a replica is gone after so long without one


@dataclass(slots=True)
class Nodes:
    """A run on `NODES` nodes, and on `spares` that wait; all are killed when the block ends."""

    folder: Path
    policy: str
    every: int
    spares: int = 0
    stored: int = 1000  # steps between checkpoints, where those of `every` are copies in memory
    agents: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    _meeting: Any = None  # where the agents meet: it stays
    _lighthouse: subprocess.Popen[bytes] | None = None
    _port: int = 0

    def __enter__(self) -> Nodes:
        self.folder.mkdir(parents=True)
        if self.policy == "drop-replica":
            (self.folder / "strategy.toml").write_text(f"[mesh]\npp = 1\ntp = 1\ndp_replicate = {NODES}\n")
            self._port = _free_port()
            self._lighthouse = self._started(
                [
                    str(LIGHTHOUSE), "--bind", f"[::]:{self._port}", "--min_replicas", "1", "--join_timeout_ms", "2000",
                    "--quorum_tick_ms", "50", "--heartbeat_timeout_ms", str(HEARTBEAT_MS),
                ]
            )  # fmt: skip
        else:
            self._meeting = TCPStore(
                "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
            )
            self._port = self._meeting.port
        for node in range(NODES + self.spares):
            self.start(node)
            if node == NODES - 1 and self.spares:
                self.until(lambda found: len({entry["node"] for entry in found}) == NODES)
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self.agents.values(), *filter(None, [self._lighthouse])]:
            process.kill()
            process.wait()

    def start(self, node: int) -> None:
        """A node is there, or there again, with an empty memory."""
        shutil.rmtree(self.folder / "memory" / str(node), ignore_errors=True)
        command = [
            sys.executable,
            "-m",
            "autoparallel",
            "run",
            "--nproc-per-node",
            "1",
            "--max-restarts",
            "1000",
            "--join",
            "1",
        ]
        if self.policy == "drop-replica":
            command += ["--lighthouse", f"http://localhost:{self._port}", "--replica", f"r{node}"]
        else:
            fewest = 1 if self.policy == "replan" else NODES
            command += ["--nnodes", f"{fewest}:{NODES}", "--rdzv-endpoint", f"localhost:{self._port}"]
        command += [
            str(Path(__file__).with_name("worker.py")),
            str(self.folder),
            self.policy,
            str(self.every),
            str(self.stored),
        ]
        self.agents[node] = self._started(command, {NODE: str(node)})

    def kill(self, node: int) -> None:
        """The node is gone, with what is in its memory."""
        self.agents[node].kill()  # its processes end with it
        self.agents.pop(node).wait()
        shutil.rmtree(self.folder / "memory" / str(node), ignore_errors=True)

    def _victim(self, place: int) -> int:
        """Which node has this place among those that work."""
        if not self.spares:
            return place
        newest = {entry["node"]: entry["step"] for entry in self.done()}
        working = [node for node in sorted(self.agents) if newest.get(node, -2) >= max(newest.values()) - 1]
        return working[place] if place < len(working) else max(self.agents)

    def done(self, since: float = 0.0) -> list[dict[str, Any]]:
        """The steps that were done, as every rank wrote them down, in their order."""
        lines = (line for log in self.folder.glob("log-*.jsonl") for line in log.read_text().splitlines())
        entries = (json.loads(line) for line in lines if line.endswith("}"))
        return sorted((one for one in entries if one["at"] > since), key=lambda one: one["at"])

    def until(self, true: Callable[[list[dict[str, Any]]], bool], since: float = 0.0) -> list[dict[str, Any]]:
        """Wait until it is true of the steps that were done since then; these."""
        deadline = time.monotonic() + WAIT_S
        while not true(found := self.done(since)):
            if time.monotonic() > deadline or any(agent.poll() is not None for agent in self.agents.values()):
                raise SystemExit(f"{self.policy}: no steps: {(self.folder / 'said').read_text()[-3000:]}")
            time.sleep(0.02)
        return found

    def fail(self, kills: Iterable[tuple[float, int]], away_s: float, end: float) -> int:
        """Until `end` (seconds since the epoch) let nodes fail, at these times and by these places among those that work; each is back
        `away_s` later, and one that fails while it is away takes as long again. How many failed."""
        due, backs, failed = sorted(kills), dict[int, float](), 0
        while (now := time.time()) < end:
            for node in [node for node, at in backs.items() if at <= now]:
                del backs[node]
                self.start(node)
            if due and due[0][0] <= now:
                failed, node = failed + 1, self._victim(due.pop(0)[1])
                if node in self.agents:
                    self.kill(node)
                backs[node] = time.time() + away_s
            time.sleep(0.02)
        return failed

    def _started(self, command: list[str], more: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(more or {})}
        with (self.folder / "said").open("ab") as said:
            return subprocess.Popen(command, env=environment, stdout=said, stderr=said)


def paced_s(nodes: int = NODES) -> float:
    """What a step waits, on so many nodes."""
    return SAMPLE_S * BATCH / nodes


def _free_port() -> int:
    import socket

    with socket.create_server(("", 0)) as free:
        return int(free.getsockname()[1])
