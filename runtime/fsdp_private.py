"""The private names of torch's FSDP2 that the runtime touches; see `torch_private.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fully_shard as _units
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.tensor import DTensor


@contextmanager
def regathered_from(copies: DeviceMesh | None) -> Iterator[None]:
    """Inside, units that `fully_shard` makes keep a second copy of their parameters from forward to backward, shared along the inner
    dim of `copies`; None: they do not.

    What `reshard_after_forward=RANKS` says, but for its groups: torch 2.13 makes new ones for each unit, of the ranks of one group of shards
    alone, which hangs where there are others.
    """
    name = "_get_post_forward_mesh_info"
    known = getattr(_units, name)
    if copies is not None:
        again = HSDPMeshInfo(copies, shard_mesh_dim=1, replicate_mesh_dim=0)
        setattr(_units, name, lambda *_: again)
    try:
        yield
    finally:
        setattr(_units, name, known)


def drop_copies(module: nn.Module) -> None:
    """Free the second copies of parameters after a forward pass that no backward follows: `parameters()` are the shards again."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
            group = unit._get_fsdp_state()._fsdp_param_group
            for parameter in group.fsdp_params if group else ():
                parameter._sharded_post_forward_param = None
                parameter._sharded_post_forward_param_data = None


def wait_where_needed(module: nn.Module) -> None:
    """Let gathers of parameters, also those ahead of a backward pass, be waited for by the unit that needs them, not where they begin."""
    assert isinstance(module, FSDPModule)
    module._set_unshard_async_op(True)  # of all units within, too


def reduce_accumulated(module: nn.Module) -> None:
    """Let FSDP2 reduce and scatter the gradients that it has been told to keep whole, and free parameters.

    What it does by itself at the end of the last backward pass, if that pass has brought all gradients.
    """
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.set_is_last_backward(True)
            unit.set_requires_gradient_sync(True, recurse=False)
            unit.set_reshard_after_backward(True, recurse=False)
    assert isinstance(module, FSDPModule)
    module._get_fsdp_state()._root_post_backward_final_callback()


def whole_weights(module: nn.Module) -> dict[FSDPModule, set[Tensor]]:
    """Of each unit of FSDP2 that is gathered, the parameters as they are computed with."""
    return {
        unit: {
            w
            for p in group.fsdp_params
            if (w := getattr(p, "_unsharded_param", None)) is not None and w.requires_grad
        }
        for unit in module.modules()
        if isinstance(unit, FSDPModule) and (group := unit._get_fsdp_state()._fsdp_param_group)
    }


def computed_with(module: nn.Module) -> list[Tensor]:
    """The parameters of a module, in their order, as passes compute with them: of those that units of FSDP2 hold in shares the whole
    ones, whose numbers may have been freed."""
    groups = [u._get_fsdp_state()._fsdp_param_group for u in module.modules() if isinstance(u, FSDPModule)]
    whole = {p.sharded_param: p for group in groups if group for p in group.fsdp_params}
    return [getattr(whole.get(p), "_unsharded_param", p) for p in module.parameters()]


def reduce_unit(unit: FSDPModule, *, frees: bool) -> None:
    """Let one unit of FSDP2 reduce and scatter the gradients that its parameters have; it stays gathered, unless it `frees` its
    parameters before."""
    group = unit._get_fsdp_state()._fsdp_param_group
    assert group is not None
    before = group._training_state
    unit.set_requires_gradient_sync(True, recurse=False)
    unit.set_reshard_after_backward(frees, recurse=False)
    group.post_backward()
    unit.set_requires_gradient_sync(False, recurse=False)
    unit.set_reshard_after_backward(False, recurse=False)
    group._training_state = before  # what it does at the end of a step is still to come


@contextmanager
def gradients_as_summed(module: nn.Module) -> Iterator[None]:
    """Inside, gradients of whole parameters keep the dtype in which autograd adds them up, whatever FSDP2 does.

    A way to weights alone may lead through another unit (T5's first block makes the position bias of all). FSDP2 takes that for
    a whole backward pass and at its end casts the gradients that are there to the dtype of reductions. Those still to come
    would have another dtype, and it refuses to reduce a unit of both.
    """
    groups = [u._get_fsdp_state()._fsdp_param_group for u in module.modules() if isinstance(u, FSDPModule)]
    before = {p: p.reduce_dtype for group in groups if group for p in group.fsdp_params}
    for parameter in before:
        parameter.reduce_dtype = None  # the unit has noted what it reduces in
    try:
        yield
    finally:
        for parameter, dtype in before.items():
            parameter.reduce_dtype = dtype


def end_reductions(module: nn.Module) -> None:
    """Let go of what FSDP2 reduced last, when that is over, as it does itself at the end of a step's last backward pass."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            state = unit._get_fsdp_state()
            context: Any = state._comm_ctx
            for reduced in _standing(context):
                if reduced.event is not None:
                    state._device_handle.current_stream().wait_event(reduced.event)
            if hasattr(context, "reduce_scatter_states"):
                context.reduce_scatter_states.clear()
            else:
                context.reduce_scatter_state = None


def _standing(context: Any) -> list[Any]:
    """What was reduced, and the events after which it may go; torch 2.13 may keep several, others one."""
    if hasattr(context, "reduce_scatter_states"):
        return list(context.reduce_scatter_states)
    one = context.reduce_scatter_state
    return [] if one is None else [one]


def adding_up(module: nn.Module) -> Callable[[Tensor], None]:
    """What adds the gradient that a whole parameter has got to those that FSDP2 keeps of it in another dtype, as it does
    itself at the end of a backward pass."""
    groups = [u._get_fsdp_state()._fsdp_param_group for u in module.modules() if isinstance(u, FSDPModule)]
    own = {getattr(p, "_unsharded_param", None): p for group in groups if group for p in group.fsdp_params}

    def add_up(weight: Tensor) -> None:
        if (parameter := own.get(weight)) is not None:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()

    return add_up


def unit_shards(unit: FSDPModule) -> list[tuple[nn.Parameter, int]]:
    """The parameters of a unit of FSDP2 that get gradients, in the order in which a rank's part of the reduced gradients
    holds theirs, and how many numbers each takes there (its share comes first, then padding)."""
    group = unit._get_fsdp_state()._fsdp_param_group
    found = group.fsdp_params if group else ()
    return [
        (p.sharded_param, p.padded_sharded_param_size.numel()) for p in found if p.sharded_param.requires_grad
    ]


def accumulated_bytes(module: nn.Module) -> int:
    """Bytes of whole gradients that FSDP2 keeps between micro-batches, outside of `.grad`."""
    found = 0
    for unit in module.modules():
        group = unit._get_fsdp_state()._fsdp_param_group if isinstance(unit, FSDPModule) else None
        for parameter in group.fsdp_params if group else ():
            whole = parameter.unsharded_accumulated_grad
            part = whole.to_local() if isinstance(whole, DTensor) else whole
            found += 0 if part is None else part.nbytes
    return found
