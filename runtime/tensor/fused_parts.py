"""Fused projections under tensor parallelism: a dim of several parts, each of them sharded, cut into its parts.

DTensor's strided shard holds this rank's piece of each part; its rule for `split` gathers such a dim all the
same. Seen as (parts, size) the dim is sharded along the size, and taking it apart needs no communication; so
that is how `split` and `chunk` into these very parts, and slices that are one of them, run here. Gradients come back
the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from autoparallel.planner.capture.heads import heads_apart
from autoparallel.planner.capture.indexing import part_taken
from autoparallel.runtime.torch_private import parts_of

_BY_SIZE = (torch.split, Tensor.split, torch.split_with_sizes, Tensor.split_with_sizes)
_BY_COUNT = (torch.chunk, Tensor.chunk, torch.tensor_split, Tensor.tensor_split)


class _CutApart(TorchFunctionMode):
    """Runs a cut of a strided dim into its parts without communication; anything else as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (attend := heads_apart(func, args, kwargs)) is not None:  # the cut is inside
            with self:
                return attend()
        if func is Tensor.__getitem__ and (part := _part(*args)) is not None:
            return part
        if func in _BY_SIZE or func in _BY_COUNT:
            parts = _parts(func, *args, **kwargs)
            if parts is not None:
                return parts
        return func(*args, **kwargs)


def _parts(func: Any, value: Any, how: Any = None, dim: int = 0, **kwargs: Any) -> tuple[Tensor, ...] | None:
    """The parts of `value`, if it is strided along `dim` and cut into just these parts."""
    if not isinstance(value, DTensor):
        return None
    how = how if how is not None else next(iter(kwargs.values()), None)
    dim = dim % value.dim()
    parts = next((n for n in map(parts_of, value.placements) if n is not None and n[0] == dim), None)
    if parts is None:
        return None
    _, count = parts
    size = value.shape[dim] // count
    wanted = [how] * count if isinstance(how, int) else list(how or ())
    if wanted != [count if func in _BY_COUNT else size] * count:
        return None
    apart: tuple[Tensor, ...] = value.unflatten(dim, (count, size)).unbind(dim)
    return apart


def _part(value: Any, index: Any) -> Tensor | None:
    """What a slice takes, if `value` is strided along a dim of which it is just one of the parts."""
    if not isinstance(value, DTensor) or not any(map(parts_of, value.placements)):
        return None
    taken = part_taken(index, value.shape)
    if taken is None or (taken[0], taken[2]) not in map(parts_of, value.placements):
        return None
    dim, number, count = taken
    part: Tensor = value.unflatten(dim, (count, -1)).select(dim, number)
    return part


def cut_parts_apart(module: nn.Module) -> None:
    """Let the code of `module` and of everything in it cut strided dims apart, in place.

    By an instance-level `forward`, so that a block that is recomputed does the same in its backward pass.
    """
    module.forward = _with_mode(module.forward)


def _with_mode(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _CutApart():
            return forward(*args, **kwargs)

    return run
