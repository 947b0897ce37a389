"""Parameter servers started: processes on the hosts of the nodes, and where they can be reached."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from autoparallel.runtime.servers.wire import Address


@dataclass(slots=True, kw_only=True)
class Started:
    """Servers of this run: where each is, their key, and those that this rank has started."""

    addresses: tuple[Address, ...]
    key: bytes
    own: list[subprocess.Popen[str]] = field(default_factory=list)

    def stop(self) -> None:
        """End those that this rank has started."""
        for process in self.own:
            process.kill()
            process.wait()
        self.own.clear()


def start_servers(nodes: Sequence[Sequence[int]], serving: Sequence[int], per_node: int) -> Started:
    """`per_node` servers on each node of `serving`, by the first rank there; `nodes` are the ranks of each. Collective."""
    ranked = dist.is_initialized() and dist.get_world_size() > 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    key = secrets.token_bytes(16)
    if ranked:
        told: list[bytes | None] = [key]
        dist.broadcast_object_list(told, src=0)
        key = told[0] or b""
    own, here = list[subprocess.Popen[str]](), list[Address]()
    for node in serving:
        if nodes[node][0] == rank:
            for _ in range(per_node):
                process, address = start_server(key)
                own.append(process)
                here.append(address)
    every: list[list[Address]] = [here]
    if ranked:
        every = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, here)
    by_node = [every[nodes[node][0]] for node in serving]
    # A pair stands on two nodes: neighbours in the list do.
    addresses = [row[n] for n in range(per_node) for row in by_node]
    return Started(addresses=tuple(addresses), key=key, own=own)


def start_server(key: bytes, folder: str | None = None) -> tuple[subprocess.Popen[str], Address]:
    """A server on this host, which ends with this process; rows that are not in its memory are on the disk of `folder`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "autoparallel.runtime.servers.server", folder or tempfile.gettempdir()],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps({"key": key.hex()}) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a parameter server did not start: exit status {process.wait()}")
    return process, (own_host(), json.loads(line)["port"])


def own_host() -> str:
    """The address by which other nodes reach this one: the one that leads to the run's first rank."""
    first = os.environ.get("MASTER_ADDR")
    if not first:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        try:
            end.connect((first, 9))
        except OSError:
            return "127.0.0.1"
        return str(end.getsockname()[0])


def ranks_by_node(world: int, per_node: int | None) -> list[list[int]]:
    """The ranks of each node: so many in a row, or, where that is not known, those of one host's name. Collective then."""
    if per_node:
        return [list(range(first, min(first + per_node, world))) for first in range(0, world, per_node)]
    hosts = [socket.gethostname()] * world
    if dist.is_initialized() and world > 1:
        found: list[str] = [""] * world
        dist.all_gather_object(found, socket.gethostname())
        hosts = found
    return [[rank for rank in range(world) if hosts[rank] == host] for host in dict.fromkeys(hosts)]
