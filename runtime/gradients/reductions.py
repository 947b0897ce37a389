"""All-reduces of flat gradient buffers to their mean: at once, or level by level of the network.

At once (`AllReducer`) is the backend's own all-reduce. By scattering (`ScatterReducer`) each rank of the inner
group gets the sum of one part, takes its mean over the outer group, if there is one, and sends it to all: the
hierarchical algorithm (reduce-scatter inside a node, all-reduce across, all-gather inside), and with one level
the form in which encoded numbers travel. These are never added encoded: each rank sends every other the message of
its part, which that one decodes and adds (the bytes of a ring of the encoded size), and the mean is encoded once more.
PowerSGD's factors are added as they are (`LowRank`).

`exchanges.py` says how a part of the work, a scatter or a gather over one group, is done.
"""

from __future__ import annotations

from math import ceil
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autoparallel.costmodel.compression import highest_rank, matrix_shape, parse_method
from autoparallel.runtime.gradients.exchanges import Exchange, Scatter
from autoparallel.runtime.gradients.feedback import Memory, corrected, keep

_SEED = 0x10C


class Reduction(Protocol):
    """An all-reduce that has been started."""

    @property
    def held_bytes(self) -> int:
        """Bytes that it holds beside the buffer."""

    def wait(self) -> None:
        """Return when the buffer holds the mean over the group."""


class Reducer(Protocol):
    """Reduces buffers to their mean over a group; what it remembers of a buffer is in the buffer's memory."""

    def start(self, buffer: Tensor, memory: Memory) -> Reduction:
        """Start the all-reduce of a contiguous buffer."""

    @property
    def biased(self) -> bool:
        """Whether error feedback carries something from step to step."""

    @property
    def beside(self) -> bool:
        """Whether what is under way stands beside the buffer."""

    def owed(self, buffer: Tensor, memory: Memory) -> Tensor:
        """This rank's share of what error feedback still has to bring: added over the group, what the mean lacks so
        far, flat, of the buffer's size."""


class AllReducer:
    """Mean in the buffer's own dtype, by the algorithm that the backend chooses."""

    biased = beside = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, buffer: Tensor, memory: Memory) -> Reduction:
        del memory
        return _AllReduction(buffer, self._group)

    def owed(self, buffer: Tensor, memory: Memory) -> Tensor:
        del memory
        return torch.zeros_like(buffer).view(-1)


class _AllReduction:
    held_bytes = 0

    def __init__(self, buffer: Tensor, group: dist.ProcessGroup) -> None:
        self._buffer, self._size = buffer, group.size()
        self._work = dist.all_reduce(buffer, group=group, async_op=True)

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()
        self._buffer.div_(self._size)


class ScatterReducer:
    """Mean by reduce-scatter and all-gather over `inside`, and between the two by `across` over `outer` ranks that
    stand where this one stands inside others. Every rank ends up with the same numbers."""

    def __init__(self, inside: Exchange, across: Reducer | None = None, outer: int = 1) -> None:
        self._inside, self._across, self._outer = inside, across, outer

    @property
    def biased(self) -> bool:
        return self._inside.biased or (self._across is not None and self._across.biased)

    @property
    def beside(self) -> bool:
        return self._inside.sends_at_once

    def start(self, buffer: Tensor, memory: Memory) -> Reduction:
        return _ScatterReduction(buffer, self._inside, self._across, memory)

    def owed(self, buffer: Tensor, memory: Memory) -> Tensor:
        size, rank = self._inside.group.size(), self._inside.group.rank()
        part = ceil(buffer.numel() / size)
        found = buffer.new_zeros(size, part)
        if (own := memory.residuals.get("scatter")) is not None:
            found += own / (size * self._outer)
        if (mean := memory.residuals.get("gather")) is not None:
            found[rank] += mean.view(-1) / self._outer
        if self._across is not None:
            found[rank] += self._across.owed(found[rank].contiguous(), memory.across)
        return found.view(-1)[: buffer.numel()]


class _ScatterReduction:
    def __init__(self, buffer: Tensor, inside: Exchange, across: Reducer | None, memory: Memory) -> None:
        self._buffer, self._inside, self._across, self._memory = buffer, inside, across, memory
        size = inside.group.size()
        if buffer.numel() % size == 0:  # nothing else writes into the buffer until the mean is there
            rows = buffer.view(size, -1)
        else:
            rows = buffer.new_zeros(size, ceil(buffer.numel() / size))
            rows.view(-1)[: buffer.numel()].copy_(buffer.view(-1))
        self._scatter: Scatter | None = inside.scatter(rows, memory)

    @property
    def held_bytes(self) -> int:
        return 0 if self._scatter is None else self._scatter.held_bytes

    def wait(self) -> None:
        assert self._scatter is not None
        mean = self._scatter.wait().div_(self._inside.group.size())
        self._scatter = None  # what was received is not wanted any more
        if self._across is not None:
            self._across.start(mean, self._memory.across).wait()
        size = self._inside.group.size()
        if self._buffer.numel() == mean.numel() * size:
            self._inside.gather(mean, self._memory, into=self._buffer.view(size, -1))
        else:
            rows = self._inside.gather(mean, self._memory)
            self._buffer.view(-1).copy_(rows.reshape(-1)[: self._buffer.numel()])


class LowRank:
    """PowerSGD (Vogels et al., 2019): a buffer as the product of two factors, which are averaged one after the other.

    n numbers are a matrix of ceil(sqrt(n)) rows. The second factor of a step is what the next one begins with, so that
    the steps together are a power iteration; what the product lacks goes to error feedback. Buffers of which the factors
    would be no smaller are averaged as they are.
    """

    biased = beside = True

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self._group, self._rank = group, rank

    def start(self, buffer: Tensor, memory: Memory) -> Reduction:
        if self._rank > highest_rank(buffer.numel()):
            return _AllReduction(buffer, self._group)
        return _LowRankReduction(buffer, self._group, self._rank, memory)

    def owed(self, buffer: Tensor, memory: Memory) -> Tensor:
        residual = memory.residuals.get("scatter")
        if residual is None:
            return torch.zeros_like(buffer).view(-1)
        return residual.view(-1)[: buffer.numel()] / self._group.size()


class _LowRankReduction:
    def __init__(self, buffer: Tensor, group: dist.ProcessGroup, rank: int, memory: Memory) -> None:
        self._buffer, self._group, self._memory = buffer, group, memory
        rows, columns = matrix_shape(buffer.numel())
        whole = buffer.new_zeros(rows * columns)
        whole[: buffer.numel()].copy_(buffer.view(-1))
        self._matrix = corrected(whole.view(rows, columns), memory, "scatter")
        if memory.factor is None or memory.factor.shape != (columns, rank):  # the same on every rank
            generator = torch.Generator().manual_seed(_SEED)
            memory.factor = torch.randn(columns, rank, generator=generator).to(buffer)
        self._left = self._matrix @ memory.factor
        self._work = dist.all_reduce(self._left, group=group, async_op=True)

    @property
    def held_bytes(self) -> int:
        return self._matrix.nbytes

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()
        basis = torch.linalg.qr(self._left.to(_exact(self._left))).Q.to(self._left)
        right = self._matrix.T @ basis
        dist.all_reduce(right, group=self._group)
        right /= self._group.size()
        product = basis @ right.T
        keep(self._memory, "scatter", self._matrix, product)
        self._memory.factor = right
        self._buffer.view(-1).copy_(product.view(-1)[: self._buffer.numel()])


def _exact(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def make_reducer(group: dist.ProcessGroup, method: str) -> Reducer:
    """The reducer over `group` at once, for a method of `grad_sync.compression`."""
    parsed = parse_method(method)
    if parsed.name == "powersgd":
        return LowRank(group, int(parsed.amount))
    return AllReducer(group) if parsed.name == "none" else ScatterReducer(Exchange(group, method))
