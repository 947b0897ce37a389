"""How long a call takes on a machine that may be busy with other work."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle

import torch

from autoparallel.runtime.ranks.accelerator import accelerator_type, current_device, device_module

Call = Callable[[], object]

# Shorter than this, calls are timed together: the clock's own cost and grain are then below one percent.
LEAST_TIMED_S = 2e-4
LEAST_SAMPLES = 7
# Other work on the machine only ever adds time, so low quantiles are what the machine takes by itself; not the
# least, since memory that must be mapped first is part of what a kernel takes. Kind: formula.
QUANTILE = 0.25


def on_accelerator() -> bool:
    """Whether measurements run on an accelerator, such as a CUDA device."""
    return accelerator_type() is not None


def use_threads(count: int) -> None:
    """How many threads each process computes with, on a CPU."""
    torch.set_num_threads(count)


def device_name() -> str:
    """The torch device that measurements run on."""
    return accelerator_type() or "cpu"


def measure_s(calls: Sequence[Call], *, budget_s: float) -> float:
    """Seconds of one call: a low quantile over about `budget_s` of repetitions.

    `calls` do the same work on different data and run in turn, and as many results are kept before they are
    freed: so caches and the allocator are as a model leaves them. An accelerator is timed by its own
    events; one CPU thread by its processor time, which other processes do not lengthen; several threads by the clock.
    """
    turn = _Turn(calls)
    for _ in range(len(calls) + 2):
        turn()
    timer = accelerator_s if on_accelerator() else _cpu_s
    first_s = timer(turn, 1)
    repeat = max(1, round(LEAST_TIMED_S / max(first_s, 1e-7)))
    samples: list[float] = []
    end = time.monotonic() + budget_s
    while len(samples) < LEAST_SAMPLES or time.monotonic() < end:
        samples.append(timer(turn, repeat))
    return low_quantile(samples)


def low_quantile(samples: Sequence[float]) -> float:
    """The `QUANTILE` of the samples."""
    return sorted(samples)[int(QUANTILE * len(samples))]


class _Turn:
    """One call after the other, the last results alive."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = cycle(calls)
        self.results: deque[object] = deque(maxlen=len(calls))

    def __call__(self) -> None:
        self.results.append(next(self.calls)())


def _cpu_s(turn: Call, repeat: int) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    for _ in range(repeat):
        turn()
    return (clock() - begin) / repeat


def accelerator_s(turn: Call, repeat: int) -> float:
    """Seconds of one of `repeat` calls after one another, by the events of the accelerator."""
    module = device_module(current_device())
    start, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
    module.synchronize()
    start.record()
    for _ in range(repeat):
        turn()
    end.record()
    module.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / repeat
