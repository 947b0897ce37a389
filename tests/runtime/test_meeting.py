"""A machine that goes between joining and saying where it is does not end the run of the others."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 600  # until a machine that is that busy counts as a failure
# Joins as the first of two machines, and is gone before it tells the other where its workers meet.
GONE = """
import os, sys
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousStoreInfo, rendezvous_handler_registry
from autoparallel.runtime.elastic.meeting import BACKEND
RendezvousStoreInfo.build = lambda *_, **__: os._exit(7)
given = RendezvousParameters(BACKEND, sys.argv[1], "autoparallel", 2, 2, last_call_timeout=1)
print("here", flush=True)
rendezvous_handler_registry.create_handler(given).next_rendezvous()
"""
SUM = """
import os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
found = torch.ones(1)
dist.all_reduce(found)
print("summed", int(found), flush=True)
"""


@pytest.mark.distributed
def test_who_was_left_alone_meets_again(tmp_path: Path) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    (tmp_path / "gone.py").write_text(GONE)
    (tmp_path / "sum.py").write_text(SUM)
    endpoint, environment = (
        f"localhost:{store.port}",
        {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )
    run = [
        sys.executable,
        "-m",
        "autoparallel",
        "run",
        "--nnodes",
        "2:2",
        "--nproc-per-node",
        "1",
        "--rdzv-endpoint",
        endpoint,
    ]
    gone = subprocess.Popen(
        [sys.executable, tmp_path / "gone.py", endpoint], env=environment, stdout=subprocess.PIPE
    )
    agents = []
    try:
        assert gone.stdout is not None
        gone.stdout.readline()  # its number is the lower one: it is the first machine of the two
        for _ in range(2):
            agents.append(
                subprocess.Popen(
                    [*run, str(tmp_path / "sum.py")], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
            )  # fmt: skip
            if len(agents) == 1:
                assert gone.wait(timeout=PATIENCE_S) == 7
        said = [agent.communicate(timeout=PATIENCE_S)[0] for agent in agents]
    finally:
        for agent in (gone, *agents):
            agent.kill()
            agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert "meeting again" in said[0], said
    assert all("summed 2" in one for one in said), said
