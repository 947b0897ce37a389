"""Functions of tensor-parallel code that DTensor's own rules do not run, or not well.

For operators that it has no rule for at all see `replicate_without_rule`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from types import MethodWrapperType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from autoparallel.planner.capture.heads import heads_apart
from autoparallel.planner.capture.library_kernels import Place, called_whole, is_library_call, lookups
from autoparallel.runtime.tensor.cross_entropy import in_parts
from autoparallel.runtime.tensor.layout_hooks import Player, at_pin
from autoparallel.runtime.tensor.questions import is_counted_out, is_in_place, to_plain
from autoparallel.runtime.tensor.vocabulary import rows_of_shares
from autoparallel.runtime.torch_private import GROUPED_PRODUCTS

# The places that `as_strided` names are those of the whole tensor (the pooling calls it, out of sight); and a meta device,
# which DTensor asks for shapes, does not know the loss.
_WHOLE = frozenset({
    torch.as_strided, Tensor.as_strided, F.ctc_loss, torch.ctc_loss, torch.adaptive_avg_pool1d, F.adaptive_avg_pool2d,
    F.adaptive_avg_pool3d,
})  # fmt: skip


def run_with_rules(module: nn.Module, blocks: Sequence[str], *, in_shares: bool = False) -> None:
    """Let `module` run in `TensorParallel`, in place: names, hooks and class stay.

    By instance-level `forward`s, of the blocks too, so that a block that is recomputed does the same in its backward
    pass. `in_shares`: as in `rules.shard_tensors`.
    """
    active = threading.local()
    for path in dict.fromkeys(("", *blocks)):
        part = module.get_submodule(path)
        part.forward = _with_rules(part.forward, active, lookups(part), in_shares=in_shares)


def _with_rules(
    forward: Callable[..., Any], active: threading.local, places: Sequence[Place], *, in_shares: bool
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if vars(active).get("here") or isinstance(
            at_pin(), Player
        ):  # a block within the module, or one that runs plain
            return forward(*args, **kwargs)
        active.here = True
        try:
            with TensorParallel(in_shares=in_shares), called_whole(places):
                return forward(*args, **kwargs)
        finally:
            active.here = False

    return run


class TensorParallel(TorchFunctionMode):
    """Runs `F.cross_entropy` on class-sharded DTensors in parts, `F.embedding` on shares of a vocabulary, a few functions on whole tensors, on every rank alike,
    and lets plain tensors meet DTensors. Every other call is untouched."""

    def __init__(self, *, in_shares: bool) -> None:
        super().__init__()
        self._looks_up = not in_shares

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if type(func) is MethodWrapperType:  # the getter of an attribute (shape, dtype ...)
            return func(*args, **kwargs)
        given = _tensors_of((*args, *kwargs.values()))
        mesh = next((tensor.device_mesh for tensor in given if isinstance(tensor, DTensor)), None)
        if mesh is None or mesh.ndim > 1:  # shares of the sequence: see `context/`
            return func(*args, **kwargs)
        if (attend := heads_apart(func, args, kwargs)) is not None:
            with self:
                return attend()
        if func is F.cross_entropy and (loss := in_parts(args, kwargs)) is not None:
            return loss
        looked_up = func is F.embedding and self._looks_up
        if looked_up and (rows := rows_of_shares(args, kwargs)) is not None:
            return rows
        odd = (
            func in GROUPED_PRODUCTS and given[0].dtype is not torch.bfloat16
        )  # DTensor knows those in bfloat16
        if odd or func in _WHOLE or is_library_call(func) or is_counted_out(func, args):
            made = func(*to_plain(args), **to_plain(kwargs))
            return tree_map_only(Tensor, lambda tensor: _replicated(tensor, mesh), made)
        if is_in_place(func, kwargs) and not isinstance(
            kwargs.get("out", args[0] if args else None), DTensor
        ):
            return func(*to_plain(args), **to_plain(kwargs))
        if any(tensor.requires_grad and not isinstance(tensor, DTensor) for tensor in given):
            args, kwargs = tree_map_only(Tensor, lambda tensor: _replicated(tensor, mesh), (args, kwargs))
        if func is F.linear and args and args[0].dim() == 1:
            return _of_one_row(*args, **kwargs)
        return func(*args, **kwargs)


def _of_one_row(vector: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`F.linear` of a vector. Torch takes the row of its product away in place, which DTensor does not see (torch 2.13: the shape
    that it says is that of one row)."""
    return F.linear(vector.unsqueeze(0), *args, **kwargs).squeeze(0)


def _tensors_of(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among the arguments, and in lists of them."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def _replicated(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The tensor, if it is plain, as one that every rank has; so is its gradient."""
    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
