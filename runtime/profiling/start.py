"""The processes that profile together: one, or those that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from autoparallel.runtime.ranks.accelerator import backends, own_backend, take_device

# Rank 0 measures kernels while the others wait.
WAIT = timedelta(minutes=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among all."""

    rank: int = 0
    size: int = 1
    per_node: int = 1
    backend: str = ""

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def processes() -> Iterator[World]:
    """Joins the process group of torchrun: the accelerators' own (NCCL on CUDA), or Gloo. One process needs none."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World()
        return
    device = take_device()
    backend = own_backend(device.type)
    dist.init_process_group(backends(device), timeout=WAIT)
    try:
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
        yield World(rank=dist.get_rank(), size=size, per_node=per_node, backend=backend)
    finally:
        dist.destroy_process_group()
