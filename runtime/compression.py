"""Reductions of flat gradient buffers: as they are, or compressed to bfloat16.

The compressed forms move bfloat16 but add in the buffer's own dtype, so that they run on backends without
bfloat16 arithmetic (Gloo) and round only twice: each rank sends every peer its part (all-to-all) and sums the
parts that it gets; an all-reduce then sends the sums to all (all-gather). The same bytes as a ring of half
the item size. Rounding to nearest is unbiased, so no error is fed back and no residual kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autoparallel.errors import UserError

_METHODS = ("none", "bf16")


class Reduction(Protocol):
    """An all-reduce that has been started."""

    def wait(self) -> None:
        """Return when the buffer holds the mean over the group."""


class Reducer(Protocol):
    """Starts the all-reduce of a buffer to its mean over a group."""

    def start(self, buffer: Tensor) -> Reduction: ...


class PlainReducer:
    """Mean in the buffer's own dtype."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, buffer: Tensor) -> Reduction:
        return _PlainReduction(buffer, self._group)


class _PlainReduction:
    def __init__(self, buffer: Tensor, group: dist.ProcessGroup) -> None:
        self._buffer, self._size = buffer, group.size()
        self._work = dist.all_reduce(buffer, group=group, async_op=True)

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()
        self._buffer.div_(self._size)


class Bf16Reducer:
    """Mean of bfloat16 roundings, itself rounded to bfloat16: the same on every rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, buffer: Tensor) -> Reduction:
        return _Bf16Reduction(buffer, self._group)


class _Bf16Reduction:
    def __init__(self, buffer: Tensor, group: dist.ProcessGroup) -> None:
        self._buffer, self._group = buffer, group
        part = -(-buffer.numel() // group.size())
        self._sent = buffer.new_zeros(part * group.size(), dtype=torch.bfloat16)
        self._sent[: buffer.numel()].copy_(buffer)
        self._received = torch.empty_like(self._sent)
        # As bytes: backends that lack bfloat16 still move it.
        self._work = dist.all_to_all_single(
            _bytes(self._received), _bytes(self._sent), group=group, async_op=True
        )

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()
        parts = self._received.view(self._group.size(), -1).to(self._buffer.dtype)
        mean = parts.sum(dim=0).div_(self._group.size()).to(torch.bfloat16)
        dist.all_gather_into_tensor(_bytes(self._sent), _bytes(mean), group=self._group)
        self._buffer.copy_(self._sent[: self._buffer.numel()])


class Bf16ReduceScatter:
    """What FSDP2 takes as its reduce-scatter: bfloat16 on the wire, sums in the input's own dtype."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert not async_op
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), f"FSDP2 asked for {op}"
        sent = input_tensor.to(torch.bfloat16)
        received = torch.empty_like(sent)
        dist.all_to_all_single(_bytes(received), _bytes(sent), group=group)
        total = received.view(group.size(), -1).to(output_tensor.dtype).sum(dim=0)
        if op == dist.ReduceOp.AVG:
            total /= group.size()
        output_tensor.copy_(total.view(output_tensor.shape))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def check_compression(compression: Sequence[str]) -> None:
    """Refuse a compression that the runtime does not run."""
    for method in compression:
        if method not in _METHODS:
            raise UserError(
                f'grad_sync.compression "{method}": the runtime runs {" and ".join(_METHODS)}; choose one of them'
            )


def method_between(ranks: Sequence[int], compression: Sequence[str], level_sizes: Sequence[int]) -> str:
    """The method for a group of `ranks`: that of the outermost network level between them.

    `level_sizes` are devices below one port of each level, innermost first; where they are not known, the
    outermost level is taken to lie between any two ranks.
    """
    if not compression:
        return "none"
    for level, size in enumerate(level_sizes):
        if len({rank // size for rank in ranks}) == 1:
            return compression[level] if level < len(compression) else "none"
    return compression[-1]


def make_reducer(group: dist.ProcessGroup, method: str) -> Reducer:
    """The reducer over `group` for a method of `grad_sync.compression`."""
    return Bf16Reducer(group) if method == "bf16" else PlainReducer(group)
