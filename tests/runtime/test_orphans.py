"""A process of a run ends with its agent, also while it is still starting."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.distributed
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's part is Linux'")
def test_a_process_whose_agent_goes_while_it_starts_goes_too(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(120)\n")
    agent = subprocess.Popen(
        [sys.executable, "-m", "autoparallel", "run", "--nproc-per-node", "1", str(tmp_path / "sleeps.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
        _until(lambda: agent.poll() is None and bool(_workers(children)))
        (worker,) = _workers(children)
    finally:
        agent.kill()
        agent.wait()
    _until(lambda: not _runs(worker))


def _workers(children: Path) -> list[int]:
    return [pid for pid in map(int, children.read_text().split()) if b"elastic.worker" in _command(pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _runs(pid: int) -> bool:
    return b"elastic.worker" in _command(pid)


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)
