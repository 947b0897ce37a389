"""Sharded data parallelism: ZeRO levels over the dp_shard and cp axes, lowered to FSDP2.

What each level keeps on a rank, N = dp_shard * cp, P = bytes of the parameters, in every case 1/N of the optimizer
state:

    zero 3   P/N parameters, plus the unit being computed; gradients P/N; gather and reduce per micro-batch
    zero 2   P/N + P: the shard, and what was gathered once per step; gradients P/N, reduced per micro-batch
    zero 1   P/N + P, gradients P, accumulated whole and reduced once per step

The unit is a repeated block, or a module outside of them whose parameters are its own. What is left is one more
unit, which stays gathered for a whole pass. `parameters()` hands out the shards, so that any torch optimizer holds its state for them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from autoparallel.planner.expand.axes import EXPERT_SHARD
from autoparallel.runtime.fsdp_private import (
    drop_copies,
    end_reductions,
    gradients_as_summed,
    reduce_unit,
    regathered_from,
    wait_where_needed,
    whole_weights,
)
from autoparallel.runtime.gradients.copies import cast_copies
from autoparallel.runtime.gradients.gathered import UnitGather
from autoparallel.runtime.gradients.own_outputs import own_outputs
from autoparallel.runtime.gradients.put_off import PutOff
from autoparallel.runtime.gradients.sharded import ShardWire, UnitScatter
from autoparallel.runtime.gradients.split_backward import WeightHalf
from autoparallel.runtime.ranks.mesh import RankMesh
from autoparallel.runtime.tensor.questions import local
from autoparallel.runtime.torch_private import parts_of

# What torch runs in one dtype only. Code that casts its input to that of such a module's weight (transformers' vision models)
# sees the weight before it is gathered, in the dtype that it is held in.
_ONE_DTYPE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LONG = 32  # so many rows a rank, and padding is no more than 3 % of them
_told: WeakSet[FSDPModule] = WeakSet()  # units that no longer reduce in the backend's own way
_gathering: WeakSet[FSDPModule] = WeakSet()  # nor gather


def shard_data(
    module: nn.Module,
    blocks: Sequence[str],
    mesh: RankMesh,
    *,
    axes: Sequence[str],
    zero: int,
    dtype: torch.dtype,
    param_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    experts: Sequence[nn.Module] = (),
    entered: Collection[str] = (),
    alone: Collection[str] = (),
    secondary: int = 0,
) -> set[nn.Parameter]:
    """Shard the parameters over `axes` (see `unit_axes`), in place; nothing to do without any. Those
    of the layers `experts`, which are shared over ep already, over the ranks that hold the same ones. Blocks that are
    `entered`, of which other parts of the model use parameters, are no units of their own; modules that are `alone` are. `secondary`
    ranks share a second copy of what ZeRO-3 shards, for backward passes (0: there is none).

    Returns those of which every rank keeps a copy (see `unshardable`), whose gradients are left to the caller.
    """
    if not axes or mesh.device_mesh is None:
        return set()
    _lay_out(module)
    axis = mesh.axis(*axes)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if dtype != param_dtype else None,
        reduce_dtype=grad_dtype if grad_dtype != dtype else None,
    )
    copied = unshardable(module.parameters(), axis.size())
    copies = mesh.secondary(secondary) if secondary else None
    # FSDP2 makes copies of what is sharded along the first dim alone.
    placed = partial(_placed, axis.size()) if copies is None else None
    ignored = copied | _shard_experts(experts, mesh, policy, reshard=zero == 3)
    unit = partial(
        fully_shard, mesh=axis, reshard_after_forward=zero == 3, ignored_params=ignored, shard_placement_fn=placed
    )  # fmt: skip
    with regathered_from(copies):
        for block in unshared_blocks(module, [path for path in blocks if path not in entered]):
            if any(p not in ignored for p in block.parameters()):
                if zero == 3:
                    own_outputs(block)
                unit(block, mp_policy=policy)
        for part in (*_by_themselves(module, alone), module):
            if part is module or any(p not in ignored for p in part.parameters()):
                if zero == 3 and part is not module:
                    own_outputs(part)
                whole = part is module or isinstance(part, _ONE_DTYPE)
                unit(part, mp_policy=policy if whole else replace(policy, cast_forward_inputs=False))
    if copies is not None:
        module.register_forward_hook(_without_backward)
    cast_copies(module, copied, dtype)
    if mesh.sizes.pp > 1:
        _gather_ahead_in_order(module, blocks)
    if zero == 3 and dist.get_backend(axis.get_group()) == dist.Backend.GLOO:
        _gather_beside(module, blocks)
    return copied


def _lay_out(module: nn.Module) -> None:
    """Lay parameters out row by row, which FSDP2 shards alone: some are made in another order (`weight.t()`, channels last)."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _by_themselves(module: nn.Module, alone: Collection[str]) -> list[nn.Module]:
    """The modules that are units of their own: what stands inside another comes first."""
    found = {m for name, m in module.named_modules() if name in alone}
    return unshared_blocks(module, [name for name, own in module.named_modules() if own in found])[::-1]


def _without_backward(module: nn.Module, *_: object) -> None:
    if not torch.is_grad_enabled():
        drop_copies(module)


def _gather_ahead_in_order(module: nn.Module, blocks: Sequence[str]) -> None:
    """Beside a block's backward the block before it is gathered. FSDP2 goes by the order of forward passes, in which the
    units of several micro-batches follow one another: it gathers units of another micro-batch for nothing."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.set_modules_to_backward_prefetch([unit])  # none: it is there already
    units = [unit for unit in map(module.get_submodule, blocks) if isinstance(unit, FSDPModule)]
    for before, unit in pairwise(units):
        unit.set_modules_to_backward_prefetch([before])


def _gather_beside(module: nn.Module, blocks: Sequence[str]) -> None:
    """Beside a block the next one is gathered, as FSDP2 does by streams of its own where the host does not wait for gathers. On Gloo
    it does: unless a gather is waited for only where it is needed, nothing runs beside it."""
    wait_where_needed(module)
    units = [unit for unit in map(module.get_submodule, blocks) if isinstance(unit, FSDPModule)]
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])


def set_scatters(
    module: nn.Module, wire: ShardWire, experts: Sequence[nn.Module]
) -> dict[FSDPModule, UnitScatter]:
    """What reduces the gradients of each unit from now on; nothing where no other way than the backend's was ever asked
    for. Units of `experts`, which other ranks share, reduce at once."""
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    if wire.is_plain and not any(unit in _told for unit in units):
        return {}
    apart = set(experts)
    found: dict[FSDPModule, UnitScatter] = {
        unit: UnitScatter(ShardWire(method=wire.method, ring=wire.ring) if unit in apart else wire)
        for unit in units
    }
    for unit, scatter in found.items():
        unit.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]  # by its shape
        _told.add(unit)
    return found


def set_gathers(module: nn.Module, method: str) -> None:
    """What the parameters of each unit travel as from the next gather on; nothing where no other way than the backend's was
    ever asked for."""
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    if method == "none" and not any(unit in _gathering for unit in units):
        return
    for unit in units:
        unit.set_custom_all_gather(UnitGather(method))  # type: ignore[arg-type]  # by its shape
        _gathering.add(unit)


def _shard_experts(
    experts: Sequence[nn.Module], mesh: RankMesh, policy: MixedPrecisionPolicy, *, reshard: bool
) -> set[nn.Parameter]:
    """Shard each layer over the ranks that hold the same experts; the parameters, if one rank alone holds them and computes with them
    as they are. Those that it casts are a unit all the same, so that it does so once for all micro-batches."""
    if not experts:
        return set()
    axis = mesh.expert_axis(EXPERT_SHARD)
    if axis.size() == 1 and policy.param_dtype is None:
        return {parameter for layer in experts for parameter in layer.parameters()}

    def placed(parameter: nn.Parameter) -> Shard | None:
        """Along dim 0 ranks would go without where there are fewer experts than ranks."""
        held = local(parameter).shape
        return Shard(next((dim for dim, size in enumerate(held) if size % axis.size() == 0), 0))

    for layer in experts:
        # Weights of the choices keep their dtype, as they do where a block with its experts is one unit.
        fully_shard(
            layer, mesh=axis, reshard_after_forward=reshard, shard_placement_fn=placed,
            mp_policy=replace(policy, cast_forward_inputs=False),
        )  # fmt: skip
    return set()


def unshardable(parameters: Iterable[nn.Parameter], ranks: int) -> set[nn.Parameter]:
    """Parameters that FSDP2 cannot shard over `ranks`: scalars, complex numbers (a unit has one dtype), and what tensor parallelism holds in parts along
    dim 0 and that has no other dim to shard (the bias of a fused projection). Each rank keeps its own copy."""

    def held_in_parts(p: nn.Parameter) -> bool:
        return in_parts_along(p) == 0 and (p.dim() == 1 or p.shape[1] % ranks != 0)

    return {p for p in parameters if p.dim() == 0 or p.is_complex() or held_in_parts(p)}


def in_parts_along(parameter: Tensor) -> int | None:
    """The dim along which tensor parallelism holds a piece of each of several parts, None if it does not."""
    if not isinstance(parameter, DTensor):
        return None
    found = [parts[0] for parts in map(parts_of, parameter.placements) if parts is not None]
    return found[0] if found else None


def _placed(ranks: int, parameter: nn.Parameter) -> Shard | None:
    """The dim that is sharded over `ranks`; None: the first one. DTensor cannot say that a piece of each part is cut again
    along the same dim, and of a short first dim (position embeddings of one sample) some ranks would hold padding: then
    another is taken."""
    if in_parts_along(parameter) == 0:
        return Shard(1)
    held = local(parameter).shape
    if not held or held[0] % ranks == 0 or held[0] >= _LONG * ranks:
        return None
    layout = parameter.placements if isinstance(parameter, DTensor) else ()
    free = [d for d in range(1, len(held)) if not any(p.is_shard(d) for p in layout)]
    return next((Shard(d) for d in free if held[d] % ranks == 0), None)


def unshared_blocks(module: nn.Module, blocks: Sequence[str]) -> list[nn.Module]:
    """The distinct blocks, less those that share a parameter with a module outside: these stay in the root."""
    distinct = list(dict.fromkeys(module.get_submodule(path) for path in blocks))
    places: dict[nn.Parameter, int] = {}
    for owner in module.modules():
        for parameter in owner._parameters.values():
            if parameter is not None:
                places[parameter] = places.get(parameter, 0) + 1

    def alone(block: nn.Module) -> bool:
        held: dict[nn.Parameter, int] = {}
        for owner in block.modules():
            for parameter in owner._parameters.values():
                if parameter is not None:
                    held[parameter] = held.get(parameter, 0) + 1
        return all(places[parameter] == count for parameter, count in held.items())

    return [block for block in distinct if alone(block)]


def gather_ahead(module: nn.Module) -> None:
    """Begin to gather what the units will compute with, in the order in which the next forward needs it: each waits for its own.

    FSDP2 by itself begins with a unit when the one before runs: on a backend whose gathers wait (Gloo) nothing runs beside them, and of a
    pipeline each stage would begin when the first micro-batch has come to it.
    """
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.unshard(async_op=True)


def announce_micro_batch(module: nn.Module, *, reduces: bool, frees: bool) -> None:
    """Tell FSDP2 what the next backward pass does beside: whether it reduces gradients, and frees parameters.

    Every backward ends as a step's last one does: its last reduction is over, as is priced (`costmodel/price.py`), and does not
    wait in memory for the next micro-batch.
    """
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.set_is_last_backward(True)
            unit.set_requires_gradient_sync(reduces, recurse=False)
            unit.set_reshard_after_backward(frees, recurse=False)


def run_weights(module: nn.Module, half: WeightHalf | PutOff, *, zero: int) -> None:
    """The second half of a split backward pass at zero 2 and 3: each unit reduces its gradients as soon as it has them all.

    At zero 3 the first half has freed the parameters. Gradients that were put off are products of activations and their gradients,
    which need none; kernels of autograd's graph are handed them, whether they read them or not, so that units are gathered again,
    the next one beside each.
    """
    waiting, frees = whole_weights(module), zero == 3
    home = {weight: unit for unit, weights in waiting.items() for weight in weights}
    if isinstance(half, PutOff):
        run = half.run
    elif not half.junctions:  # a pass of its own, in which FSDP2 sees to all of that
        for unit in waiting:
            unit.set_requires_gradient_sync(True, recurse=False)
        run = half.run
    else:
        for unit in waiting:  # whose hooks run where it returned what one of these kernels made
            unit.set_reshard_after_backward(False, recurse=False)
        run = partial(half.run, begin=_gathering_again(module, home) if frees else None)

    def complete(weight: Tensor) -> None:
        unit = home.get(weight)
        if unit is not None:
            waiting[unit].discard(weight)
            if not waiting[unit]:
                waiting.pop(unit)
                reduce_unit(unit, frees=frees)

    with gradients_as_summed(module):
        run(complete)
    for unit in waiting:
        reduce_unit(unit, frees=frees)
    end_reductions(module)


def _gathering_again(
    module: nn.Module, home: Mapping[Tensor, FSDPModule]
) -> Callable[[Sequence[Tensor]], None]:
    """What gathers the units of weights, and begins with the one before them, which comes next on the way back."""
    read = set(home.values())
    units: list[FSDPModule] = [unit for unit in whole_weights(module) if unit in read]
    before: dict[FSDPModule, FSDPModule] = dict(zip(units[1:], units, strict=False))
    met: set[FSDPModule] = set()

    def begin(weights: Sequence[Tensor]) -> None:
        for unit in dict.fromkeys(home[w] for w in weights if w in home):
            if unit not in met:
                met.add(unit)
                unit.unshard()
                if (following := before.get(unit)) is not None and following not in met:
                    following.unshard(async_op=True)

    return begin


def reductions_per_step(zero: int, micro_batches: int, *, sharded: bool) -> int:
    """How often a parameter's gradient arrives in one step: once if accumulated whole (zero 1)."""
    return 1 if sharded and zero <= 1 else micro_batches
