"""All-reduces of flat gradient buffers to their mean: at once, or level by level of the network.

At once (`AllReducer`) is the backend's own all-reduce. By scattering (`ScatterReducer`) each rank of the inner
group gets the sum of one part, takes its mean over the outer group, if there is one, and sends it to all: the
hierarchical algorithm (reduce-scatter inside a node, all-reduce across, all-gather inside), and with one level
the form in which compressed numbers travel.

bfloat16 is moved but never added, so that it runs on backends without bfloat16 arithmetic (Gloo) and rounds
only twice a level: what a rank sends, and the mean. Those are the bytes of a ring of half the item size.
Rounding to nearest is no bias of the method: errors are of either sign, so none is fed back and no residual is
kept (methods that drop numbers, or that always round one way, would need one).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autoparallel.runtime.tensor.questions import as_bytes


class Reduction(Protocol):
    """An all-reduce that has been started."""

    def wait(self) -> None:
        """Return when the buffer holds the mean over the group."""


class Reducer(Protocol):
    """Starts the all-reduce of a buffer to its mean over a group."""

    def start(self, buffer: Tensor) -> Reduction: ...


class AllReducer:
    """Mean in the buffer's own dtype, by the algorithm that the backend chooses."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, buffer: Tensor) -> Reduction:
        return _AllReduction(buffer, self._group)


class _AllReduction:
    def __init__(self, buffer: Tensor, group: dist.ProcessGroup) -> None:
        self._buffer, self._size = buffer, group.size()
        self._work = dist.all_reduce(buffer, group=group, async_op=True)

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()
        self._buffer.div_(self._size)


class ScatterReducer:
    """Mean by reduce-scatter and all-gather over `inside`, and between the two by `across` over other ranks.

    `method` is how numbers travel inside: "none" or "bf16". Every rank ends up with the same numbers.
    """

    def __init__(self, inside: dist.ProcessGroup, method: str, across: Reducer | None = None) -> None:
        self._inside, self._across = inside, across
        self._wire = torch.bfloat16 if method == "bf16" else None

    def start(self, buffer: Tensor) -> Reduction:
        return _ScatterReduction(buffer, self._inside, self._wire, self._across)


class _ScatterReduction:
    def __init__(
        self, buffer: Tensor, group: dist.ProcessGroup, wire: torch.dtype | None, across: Reducer | None
    ) -> None:
        self._buffer, self._group, self._across = buffer, group, across
        part = -(-buffer.numel() // group.size())
        self._sent = buffer.new_zeros(part * group.size(), dtype=wire or buffer.dtype)
        self._sent[: buffer.numel()].copy_(buffer)
        self._received = torch.empty_like(self._sent if wire else self._sent[:part])
        if wire:  # as bytes: backends that lack bfloat16 still move it
            work = dist.all_to_all_single(
                as_bytes(self._received), as_bytes(self._sent), group=group, async_op=True
            )
        else:
            work = dist.reduce_scatter_tensor(self._received, self._sent, group=group, async_op=True)
        self._work = work

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()
        size = self._group.size()
        parts = self._received.view(-1, self._sent.numel() // size).to(self._buffer.dtype)
        mean = parts.sum(dim=0).div_(size)
        if self._across is not None:
            self._across.start(mean).wait()
        dist.all_gather_into_tensor(
            as_bytes(self._sent), as_bytes(mean.to(self._sent.dtype)), group=self._group
        )
        self._buffer.copy_(self._sent[: self._buffer.numel()])


def make_reducer(group: dist.ProcessGroup, method: str) -> Reducer:
    """The reducer over `group` at once, for a method of `grad_sync.compression`."""
    return ScatterReducer(group, method) if method == "bf16" else AllReducer(group)


def two_levels(ranks: Sequence[int], level_sizes: Sequence[int]) -> tuple[list[list[int]], int] | None:
    """`ranks` divided into those below one port each, and the level they are divided at.

    The innermost network level below whose ports several of them stand, of those above which they are not all
    together; `level_sizes` are devices below one port of each level, innermost first. None where there is no
    such level, or where unequal numbers stand below its ports.
    """
    for level, size in enumerate(level_sizes):
        below: dict[int, list[int]] = {}
        for rank in ranks:
            below.setdefault(rank // size, []).append(rank)
        counts = {len(part) for part in below.values()}
        if len(below) > 1 and len(counts) == 1 and counts != {1}:
            return list(below.values()), level
    return None
