"""One exchange over one group: rows scattered and added up, or parts gathered, encoded by a method.

`Exchange` is what all reductions of gradients are made of: of buffers over replicas (`reductions.py`), and of FSDP2's
units (`sharded.py`). What is encoded goes from every rank to every other (an all-to-all of bytes), is decoded and added
there; so is, on Gloo, what is not encoded, and elsewhere the backend adds it.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autoparallel.costmodel.compression import parse_method
from autoparallel.runtime.gradients.codecs import Codec
from autoparallel.runtime.gradients.feedback import Memory, current_codec, encoded, follow_residual
from autoparallel.runtime.gradients.point_to_point import (
    Direct,
    RingScatter,
    direct_gather,
    ring_gather,
)
from autoparallel.runtime.ranks.gathers import all_gather_single, reduce_scatter_single
from autoparallel.runtime.tensor.questions import as_bytes


class Scatter(Protocol):
    """A reduce-scatter that has been started."""

    @property
    def held_bytes(self) -> int:
        """Bytes that it holds beside what is scattered."""

    def wait(self) -> Tensor:
        """The sum of this rank's row over the group."""


class Exchange:
    """Scatters and gathers over `group`, encoded by `method` of `grad_sync.compression` (not powersgd); what is not
    encoded round a `ring`, if asked for, or (`served`) from every rank straight to the one that adds it, whatever the backend."""

    def __init__(
        self, group: dist.ProcessGroup, method: str = "none", *, ring: bool = False, served: bool = False
    ) -> None:
        self.group, self.method, self._ring, self._served = group, method, ring, served

    @property
    def biased(self) -> bool:
        """Whether error feedback carries something from one exchange to the next."""
        return parse_method(self.method).biased

    @property
    def sends_at_once(self) -> bool:
        """Whether rows are on their way, and others received, before they are waited for; a ring begins then."""
        return not self._ring

    def scatter(self, rows: Tensor, memory: Memory) -> Scatter:
        """Start to add up [ranks, numbers] so that every rank gets its row of the sum."""
        if self._ring:
            return RingScatter(rows, self.group)
        codec = current_codec(self.method, rows, memory)
        if codec is None:
            straight = self._served or rows.device.type == "cpu"
            return _Sent(rows, self.group) if straight else _Added(rows, self.group)
        messages = encoded(rows, codec, memory, "scatter")
        follow_residual(self.method, rows, self.group, memory)
        return _Decoded(messages, rows, codec, self.group)

    def gather(self, part: Tensor, memory: Memory, into: Tensor | None = None) -> Tensor:
        """[ranks, numbers]: every rank's part, the same everywhere; `into` is filled where it is given, and nothing as large made."""
        if into is None:
            into = part.new_empty(self.group.size(), part.numel())
        if self._ring:
            return ring_gather(part, self.group, into)
        row = part.view(1, -1)
        codec = current_codec(self.method, row, memory)
        if codec is None:
            return _gathered(row, self.group, into)
        sent = encoded(row, codec, memory, "gather")
        messages = _gathered(sent, self.group, sent.new_empty(self.group.size(), sent.numel()))
        for own, message in zip(into, messages, strict=True):  # one at a time: decoding takes memory
            own.copy_(codec.decode(message[None], part.numel(), part.dtype)[0])
        return into


def _gathered(row: Tensor, group: dist.ProcessGroup, into: Tensor) -> Tensor:
    if row.device.type == "cpu":
        return direct_gather(row, group, into)
    all_gather_single(as_bytes(into.view(-1)), as_bytes(row.contiguous()), group=group)
    return into


class _Added:
    """By the backend."""

    def __init__(self, rows: Tensor, group: dist.ProcessGroup) -> None:
        self._sum = rows.new_empty(rows.shape[1])
        self._sent = rows  # alive until it has left
        self._work = reduce_scatter_single(self._sum, rows.view(-1), group=group, async_op=True)

    @property
    def held_bytes(self) -> int:
        return self._sum.nbytes

    def wait(self) -> Tensor:
        assert self._work is not None
        self._work.wait()
        return self._sum


class _Sent:
    """Every row to the rank that adds it: Gloo's own reduce-scatter is an all-reduce, of twice the bytes."""

    def __init__(self, rows: Tensor, group: dist.ProcessGroup) -> None:
        self._exchange = _started(rows.contiguous(), group)

    @property
    def held_bytes(self) -> int:
        return self._exchange.held_bytes

    def wait(self) -> Tensor:
        return self._exchange.wait().sum(dim=0)


class _Decoded:
    """Every message to the rank that adds its row."""

    def __init__(self, messages: Tensor, rows: Tensor, codec: Codec, group: dist.ProcessGroup) -> None:
        self._codec, self._numbers, self._dtype = codec, rows.shape[1], rows.dtype
        self._exchange = _started(messages.contiguous(), group)

    @property
    def held_bytes(self) -> int:
        return 2 * self._exchange.held_bytes  # as much is sent

    def wait(self) -> Tensor:
        return self._codec.decode(self._exchange.wait(), self._numbers, self._dtype).sum(dim=0)


def _started(rows: Tensor, group: dist.ProcessGroup) -> Scatter:
    """Every row on its way to its rank; what is waited for are the rows that came."""
    return Direct(rows, group) if rows.device.type == "cpu" else _AllToAll(rows, group)


class _AllToAll:
    """As `Direct`, by the backend."""

    def __init__(self, rows: Tensor, group: dist.ProcessGroup) -> None:
        self._sent, self._received = rows, torch.empty_like(rows)
        self._work = dist.all_to_all_single(
            as_bytes(self._received), as_bytes(rows), group=group, async_op=True
        )

    @property
    def held_bytes(self) -> int:
        return self._received.nbytes

    def wait(self) -> Tensor:
        assert self._work is not None
        self._work.wait()
        return self._received
