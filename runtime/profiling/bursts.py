"""Computation of a known length, for what is measured beside it or after it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autoparallel.runtime.profiling.case import random
from autoparallel.runtime.profiling.timing import on_accelerator
from autoparallel.runtime.ranks.accelerator import current_device, device_module

SIDE = {False: 384, True: 4096}  # of the square products that a burst is made of
TRIALS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """`count` products of a matrix with itself; `seconds`: what they take while every rank computes."""

    matrix: torch.Tensor
    count: int
    seconds: float

    def __call__(self) -> None:
        for _ in range(self.count):
            torch.mm(self.matrix, self.matrix)


def make_burst(seconds: float) -> Burst:
    """A burst of about `seconds` on the slowest rank, of as many products on all. Every rank calls this."""
    side = SIDE[on_accelerator()]
    dtype = torch.bfloat16 if on_accelerator() else torch.float32
    one = Burst(matrix=random(side, side, dtype=dtype), count=1, seconds=0.0)
    count = max(1, round(seconds / _quickest_s(one)))
    burst = Burst(matrix=one.matrix, count=count, seconds=0.0)
    return Burst(matrix=one.matrix, count=count, seconds=_quickest_s(burst))


def _quickest_s(burst: Burst) -> float:
    """The quickest of a few trials, the slowest rank's of each."""
    burst()
    times = []
    for _ in range(TRIALS):
        dist.barrier()
        start = clock_s()
        burst()
        times.append(clock_s() - start)
    return float(slowest(times).min())


def clock_s() -> float:
    """The time, once the accelerator has done what it was given."""
    if on_accelerator():
        device_module(current_device()).synchronize()
    return time.perf_counter()


def slowest(times: list[float]) -> torch.Tensor:
    """The slowest rank's of each. Collective."""
    found = torch.tensor(times, dtype=torch.float64, device=current_device() if on_accelerator() else "cpu")
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found
