"""What FSDP2's units do instead of the backend's all-gather of parameters: encoded, `grad_sync.weights`.

FSDP2's public hook (`set_custom_all_gather`). Shards stay as they are: the optimizer updates what was never rounded. Every
rank decodes its own share, too, and rounding is to nearest, so that all ranks, forward and backward, compute with the same
numbers. Source: ZeRO++ (Wang et al., 2023), whose qwZ quantises by blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autoparallel.planner.expand.axes import SECONDARY
from autoparallel.runtime.gradients.codecs import codec_of
from autoparallel.runtime.ranks.gathers import all_gather_single


class UnitGather:
    """FSDP2's all-gather for one unit, by a method of `costmodel.compression.WEIGHTS`."""

    def __init__(self, method: str) -> None:
        self._method = method

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill `output_tensor`, of which `input_tensor` is this rank's part. A unit whose parameters have several dtypes comes
        as bytes, which travel as they are."""
        codec = codec_of(self._method, input_tensor.itemsize, nearest=True)
        numbers = input_tensor.numel()
        if (
            codec is None
            or group.size() == 1  # nothing is sent
            or group.group_desc == SECONDARY  # a copy of what was decoded before the forward pass
            or not input_tensor.is_floating_point()
            or not _shortens(codec.size(numbers), input_tensor)
        ):
            work: dist.Work | None = all_gather_single(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
            return work
        own = codec.encode(input_tensor.view(1, -1)).view(-1)
        messages = own.new_empty(group.size() * len(own))
        all_gather_single(messages, own, group=group)
        parts = zip(output_tensor.view(group.size(), -1), messages.view(group.size(), -1), strict=True)
        for part, message in parts:  # one at a time: decoding takes memory
            part.copy_(codec.decode(message[None], numbers, part.dtype)[0])
        return None


def _shortens(size_bytes: int, numbers: Tensor) -> bool:
    return size_bytes < numbers.nbytes
