"""All-reduce of one flat gradient buffer: as it is, or compressed to bfloat16 with error feedback.

The compressed form moves bfloat16 but adds in the buffer's own dtype, so that it runs on backends without
bfloat16 arithmetic (Gloo): each rank sends every peer its part (all-to-all), sums the parts that it gets, and
sends the sum to all (all-gather). The same bytes as a ring all-reduce of half the size. What rounding drops
is added to the next step's gradient; that residual takes as much memory as the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autoparallel.errors import UserError


class Reduction(Protocol):
    """An all-reduce that has been started."""

    def wait(self) -> None:
        """Return when the buffer holds the mean over the group."""


class Reducer(Protocol):
    """Starts the all-reduce of a buffer; `key` names the buffer from step to step."""

    def start(self, buffer: Tensor, key: int) -> Reduction: ...


class PlainReducer:
    """Mean in the buffer's own dtype."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, buffer: Tensor, key: int) -> Reduction:  # noqa: ARG002
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
    """Mean of bfloat16 roundings, with error feedback."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._residuals: dict[int, Tensor] = {}

    def start(self, buffer: Tensor, key: int) -> Reduction:
        if key not in self._residuals or self._residuals[key].shape != buffer.shape:
            self._residuals[key] = torch.zeros_like(buffer)
        return _Bf16Reduction(buffer, self._residuals[key], self._group)


class _Bf16Reduction:
    def __init__(self, buffer: Tensor, residual: Tensor, group: dist.ProcessGroup) -> None:
        self._buffer, self._residual, self._group = buffer, residual, group
        ranks = group.size()
        self._part = -(-buffer.numel() // ranks)
        sent = buffer.new_zeros(self._part * ranks, dtype=torch.bfloat16)
        buffer.add_(residual)
        sent[: buffer.numel()].copy_(buffer)
        residual.copy_(buffer).sub_(sent[: buffer.numel()])
        self._sent, self._received = sent, torch.empty_like(sent)
        # As bytes: backends that lack bfloat16 still move the bytes.
        self._work = dist.all_to_all_single(
            self._received.view(torch.uint8), sent.view(torch.uint8), group=group, async_op=True
        )

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()
        ranks, rank = self._group.size(), self._group.rank()
        exact = self._received.view(ranks, self._part).to(self._buffer.dtype).sum(dim=0).div_(ranks)
        rounded = exact.to(torch.bfloat16)
        dist.all_gather_into_tensor(
            self._sent.view(torch.uint8), rounded.view(torch.uint8), group=self._group
        )
        mine = slice(rank * self._part, min((rank + 1) * self._part, self._buffer.numel()))
        kept = max(0, mine.stop - mine.start)
        # The mean counts each rank's residual 1/ranks, this rounding error is of the mean itself.
        self._residual[mine].add_((exact - rounded)[:kept] * ranks)
        self._buffer.copy_(self._sent[: self._buffer.numel()])


def check_compression(compression: Sequence[str]) -> str:
    """The method that `grad_sync.compression` (per network level, innermost first) asks for.

    One group spans its levels up to the outermost, so that the last entry that is not "none" decides. Raises
    UserError for a compression that the runtime does not run.
    """
    method = next((entry for entry in reversed(compression) if entry != "none"), "none")
    if method not in ("none", "bf16"):
        raise UserError(
            f'grad_sync.compression "{method}": the runtime runs "none" and "bf16"; choose one of them'
        )
    return method


def make_reducer(group: dist.ProcessGroup, compression: Sequence[str]) -> Reducer:
    """The reducer over `group` for `grad_sync.compression`."""
    return Bf16Reducer(group) if check_compression(compression) == "bf16" else PlainReducer(group)
