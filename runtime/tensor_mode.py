"""Functions of tensor-parallel code that DTensor's own rules do not run, or not well.

For operators that it has no rule for at all see `replicate_without_rule`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from autoparallel.runtime.cross_entropy import in_parts
from autoparallel.runtime.tensor_tools import to_plain

# The places that `as_strided` names are those of the whole tensor (the pooling calls it, out of sight); and a meta device,
# which DTensor asks for shapes, does not know the loss.
_WHOLE = frozenset({
    torch.as_strided, Tensor.as_strided, F.ctc_loss, torch.ctc_loss, torch.adaptive_avg_pool1d,
})  # fmt: skip


def run_with_rules(module: nn.Module, blocks: Sequence[str]) -> None:
    """Let `module` run in `TensorParallel`, in place: names, hooks and class stay.

    By instance-level `forward`s, of the blocks too, so that a block that is recomputed does the same in its backward
    pass.
    """
    active = threading.local()
    for path in dict.fromkeys(("", *blocks)):
        part = module.get_submodule(path)
        part.forward = _with_rules(part.forward, active)


def _with_rules(forward: Callable[..., Any], active: threading.local) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if vars(active).get("here"):  # a block within the module
            return forward(*args, **kwargs)
        active.here = True
        try:
            with TensorParallel():
                return forward(*args, **kwargs)
        finally:
            active.here = False

    return run


class TensorParallel(TorchFunctionMode):
    """Runs `F.cross_entropy` on class-sharded DTensors in parts, and a few functions on whole tensors, on every rank
    alike. Every other call is untouched."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy and (loss := in_parts(args, kwargs)) is not None:
            return loss
        if func in _WHOLE and (mesh := _mesh(args, kwargs)) is not None:
            return _on_whole(mesh, func, args, kwargs)
        return func(*args, **kwargs)


def _mesh(args: Any, kwargs: Any) -> DeviceMesh | None:
    """The axis tp, if one of the arguments lies on it alone (see `context` for others)."""
    found = next(
        (leaf.device_mesh for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)), None
    )
    return found if found is not None and found.ndim == 1 else None


def _on_whole(mesh: DeviceMesh, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`func` of gathered tensors; its results are replicated."""

    def replicated(tensor: Tensor) -> DTensor:
        return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)

    return tree_map_only(Tensor, replicated, func(*to_plain(args), **to_plain(kwargs)))
