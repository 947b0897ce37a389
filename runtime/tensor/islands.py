"""Modules that run on plain tensors inside a tensor-parallel model.

A module whose parameters are all replicated, called with replicated inputs, does the same work on every rank:
it runs on this rank's plain tensors. No DTensor rule is needed for its operators (torch has none for batch
norm, and a partial one for convolution), and no dispatch is paid. With any other input (a sequence shard, say)
it stays a DTensor computation.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map_only

from autoparallel.runtime.tensor.layout_hooks import Player, at_pin
from autoparallel.runtime.tensor.questions import is_replicated

_SET_ASIDE = "_autoparallel_parameters"


def run_replicated_locally(module: nn.Module) -> None:
    """Let `module`, which has parameters of its own and no children, run on plain tensors where it may."""
    module.register_forward_pre_hook(_enter, with_kwargs=True)
    module.register_forward_hook(_leave, always_call=True)


def run_block_locally(block: nn.Module) -> None:
    """The same for a repeated block: by its `forward`, which is what runs again where the block is recomputed."""
    forward = block.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _enter(block, args, kwargs) or (args, kwargs)
        output = None
        try:
            output = forward(*args, **kwargs)
        finally:
            output = _leave(block, args, output)
        return output

    block.forward = run


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(at_pin(), Player):  # all there is runs on plain tensors
        return None
    held = {name: p for name, p in module._parameters.items() if p is not None}
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not all(is_replicated(tensor) and not _of_sequence(tensor) for tensor in [*held.values(), *given]):
        return None
    mesh = next((p.device_mesh for p in held.values() if isinstance(p, DTensor)), None)
    if mesh is None:
        return None
    module.__dict__[_SET_ASIDE] = (held, mesh)
    for name, parameter in held.items():
        module._parameters[name] = _plain(parameter)
    return tree_map_only(DTensor, _plain, (args, kwargs))


def _leave(module: nn.Module, _: Any, output: Any) -> Any:
    held, mesh = module.__dict__.pop(_SET_ASIDE, (None, None))
    if held is None:
        return output
    module._parameters.update(held)
    return tree_map_only(Tensor, lambda tensor: _replicated(tensor, mesh), output)


def _of_sequence(tensor: Tensor) -> bool:
    """Whether context parallelism may shard it: on its axis and tp (see `context/values.py`)."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.ndim > 1


def _plain(tensor: Any) -> Any:
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local(grad_placements=[Replicate()] * tensor.device_mesh.ndim)


def _replicated(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    if isinstance(tensor, DTensor):  # context parallelism has cut what the module read
        return tensor
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
