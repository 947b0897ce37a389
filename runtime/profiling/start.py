"""The processes that profile together: one, or those that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

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
    """Joins the process group of torchrun: NCCL on CUDA devices, Gloo otherwise. One process needs none."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World()
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend, timeout=WAIT)
    try:
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
        yield World(rank=dist.get_rank(), size=size, per_node=per_node, backend=backend)
    finally:
        dist.destroy_process_group()
