"""What layout hooks do while a block runs plain, or is tried: see `plain_blocks.py`. One is where a `[[tensor]]` rule lays a value out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autoparallel.runtime.tensor.shares import Layouts
from autoparallel.runtime.torch_private import change_placement


class NotPlain(Exception):
    """The block cannot run on plain tensors."""


@dataclass(slots=True)
class Change:
    """Of placement at a layout hook; `gradient` is how the gradient of the result comes back."""

    before: Placement
    after: Placement
    gradient: Placement | None = None


@dataclass(slots=True)
class Plain:
    """How a kind of block runs plain."""

    mesh: DeviceMesh
    changes: list[Change] = field(default_factory=list)
    parameters: dict[str, Placement] = field(default_factory=dict)  # of their gradients, by name in the block
    outputs: tuple[Placement | None, ...] = ()  # None: plain anyway
    layouts: Layouts = field(default_factory=dict)  # of the outputs


class Recorder:
    """While a trial runs as DTensors: what layout hooks do."""

    def __init__(self, plain: Plain) -> None:
        self.plain = plain

    def changed(self, tensor: Tensor, placement: Placement, convert: Callable[[Tensor], Tensor]) -> Tensor:
        if not isinstance(tensor, DTensor) and placement.is_replicate():
            self.plain.changes.append(Change(placement, placement))
            return tensor
        result = convert(tensor)
        before = tensor.placements[-1] if isinstance(tensor, DTensor) else Replicate()
        change = Change(sound(before), sound(placement))
        self.plain.changes.append(change)
        if isinstance(result, DTensor) and result.requires_grad:

            def note(gradient: Tensor) -> None:
                change.gradient = gradient.placements[-1] if isinstance(gradient, DTensor) else Replicate()

            result.register_hook(note)
        return result


class Player:
    """While a block runs plain: layout hooks change what was written down, one after the other."""

    def __init__(self, plain: Plain) -> None:
        self.plain, self.next = plain, iter(plain.changes)

    def changed(self, tensor: Tensor, placement: Placement, _: Callable[[Tensor], Tensor]) -> Tensor:
        change = next(self.next, None)
        if change is None or change.after != placement:
            raise NotPlain
        back = Replicate() if change.before.is_partial() else change.before
        if change.before == change.after and change.gradient in (None, back):
            return tensor
        moved: Tensor = _Changed.apply(tensor, change, back, self.plain.mesh)
        return moved


class _Changed(torch.autograd.Function):
    """A share in one placement as the share in another, and its gradient the way back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: Change, back: Placement, mesh: DeviceMesh) -> Tensor:
        ctx.way = (change.gradient or change.after, back, mesh)
        return change_placement(tensor, change.before, change.after, mesh)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return change_placement(gradient, *ctx.way), None, None, None


_running = threading.local()


def at_pin() -> Recorder | Player | None:
    """Who decides what a layout hook does to a tensor in this thread; None: DTensor does."""
    return getattr(_running, "by", None)


@contextmanager
def decided_by(who: Recorder | Player | None) -> Iterator[None]:
    """Inside, that one decides, in this thread."""
    before = at_pin()
    _running.by = who
    try:
        yield
    finally:
        _running.by = before


def sound(placement: Placement) -> Placement:
    """The placement, if shares of it can be told to be shares."""
    plain_sum = type(placement) is Partial and placement.reduce_op == "sum"
    if not (placement.is_replicate() or type(placement) is Shard or plain_sum):
        raise NotPlain
    return placement
