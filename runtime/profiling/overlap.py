"""What computation and a collective cost each other while both are under way. Every rank calls the same."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist

from autoparallel.costmodel.fit_collectives import OverlapSample
from autoparallel.runtime.profiling.bursts import Burst, clock_s, make_burst, slowest
from autoparallel.runtime.profiling.timing import device_name, on_accelerator
from autoparallel.runtime.ranks.accelerator import current_device, device_module

BURST_S = {False: 0.03, True: 0.01}
BYTES = {False: 1 << 22, True: 1 << 26}  # of each all-reduce: a bucket of gradients
LONGER = 1.5  # what is communicated takes so many times as long as what is computed, which is then beside it all along
FP32 = 4
TRIALS, QUICK_TRIALS = 12, 4


def measure_overlap(*, quick: bool = False) -> OverlapSample:
    """Times a burst of computation and a queue of all-reduces, each alone and both at once. Needs an initialised
    process group."""
    burst = make_burst(BURST_S[on_accelerator()])
    bucket = torch.zeros(BYTES[on_accelerator()] // FP32, device=device_name())
    one_s = _median([_queue_s(bucket, 1) for _ in range(QUICK_TRIALS)])
    count = max(1, round(LONGER * burst.seconds / one_s))
    trials = QUICK_TRIALS if quick else TRIALS
    alone_s = _median([_queue_s(bucket, count) for _ in range(trials)])
    both = [_together(burst, bucket, count) for _ in range(trials)]
    return OverlapSample(
        compute_s=_median([_together(burst, bucket, 0)[0] for _ in range(trials)]),
        collective_s=alone_s,
        compute_beside_s=_median([computed for computed, _ in both]),
        both_s=_median([ended for _, ended in both]),
    )


def _queue_s(bucket: torch.Tensor, count: int) -> float:
    dist.barrier()
    start = clock_s()
    for work in [dist.all_reduce(bucket, async_op=True) for _ in range(count)]:
        work.wait()
    return clock_s() - start


def _together(burst: Burst, bucket: torch.Tensor, count: int) -> tuple[float, float]:
    """Seconds until the computation has ended, and until the collectives beside it have, too."""
    dist.barrier()
    start = clock_s()
    works = [dist.all_reduce(bucket, async_op=True) for _ in range(count)]
    burst()
    computed_s = _computed_s() - start
    for work in works:
        work.wait()
    return computed_s, clock_s() - start


def _computed_s() -> float:
    """The time, once the computation is done: on an accelerator its queue waits for no collective yet."""
    if on_accelerator():
        done = device_module(current_device()).Event()
        done.record()
        done.synchronize()
    return time.perf_counter()


def _median(times: list[float]) -> float:
    return float(median(slowest(times).tolist()))
