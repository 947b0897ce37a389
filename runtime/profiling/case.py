"""One thing to measure: calls that do it, and the kernels that the cost model prices it as."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from autoparallel.costmodel.program import Kernel
from autoparallel.runtime.profiling.timing import Call, device_name, on_accelerator
from autoparallel.runtime.ranks.accelerator import current_device, device_module

COLD_BYTES = 48e6  # more than a processor's last cache
MOST_COPIES = {False: 12, True: 64}  # on an accelerator, whose memory is larger than its host's caches by far
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`calls` do the same on different data; `family` names the constants that its time decides."""

    family: str
    label: str
    kernels: tuple[Kernel, ...]
    make: Callable[[], Call]

    def calls(self) -> list[Call]:
        """As many copies as it takes to find the data cold, as a model does."""
        moved = max(sum(kernel.bytes_moved for kernel in self.kernels), 1)
        most = MOST_COPIES[on_accelerator()]
        return [self.make() for _ in range(max(1, min(most, round(cold_bytes() / moved))))]


def cold_bytes() -> float:
    """More than the last cache holds, where the device says how much that is (up to 126 MB on GPUs)."""
    if not on_accelerator():
        return COLD_BYTES
    properties = device_module(current_device()).get_device_properties()
    return max(COLD_BYTES, 2.0 * getattr(properties, "L2_cache_size", 0))


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal random numbers on the device that is measured."""
    return torch.randn(*shape, device=device_name(), dtype=dtype)
