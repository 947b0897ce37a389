"""Sharded data parallelism: ZeRO levels over the dp_shard and cp axes, lowered to FSDP2.

What each level keeps on a rank, N = dp_shard * cp, P = bytes of the parameters, in every case 1/N of the optimizer
state:

    zero 3   P/N parameters, plus the unit being computed; gradients P/N; gather and reduce per micro-batch
    zero 2   P/N + P: the shard, and what was gathered once per step; gradients P/N, reduced per micro-batch
    zero 1   P/N + P, gradients P, accumulated whole and reduced once per step

The unit is a repeated block; everything outside the blocks is one more unit, which stays gathered for a whole
micro-batch. `parameters()` hands out the shards, so that any torch optimizer holds its state for them alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from autoparallel.planner.expand.axes import EXPERT_SHARD
from autoparallel.runtime.gradients.compression import Bf16ReduceScatter
from autoparallel.runtime.gradients.split_backward import WeightHalf
from autoparallel.runtime.ranks.mesh import RankMesh, sharding_axes
from autoparallel.runtime.tensor.questions import local
from autoparallel.runtime.torch_private import parts_of, reduce_unit, whole_weights


def shard_data(
    module: nn.Module,
    blocks: Sequence[str],
    mesh: RankMesh,
    *,
    zero: int,
    compression: str,
    dtype: torch.dtype,
    param_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    experts: Sequence[nn.Module] = (),
    entered: Collection[str] = (),
) -> set[nn.Parameter]:
    """Shard the parameters over dp_shard * cp, in place; nothing to do at zero 0, or where that is one rank. Those
    of the layers `experts`, which are shared over ep already, over the ranks that hold the same ones. Blocks that are
    `entered`, of which other parts of the model use parameters, are no units of their own.

    Returns those of which every rank keeps a copy (see `unshardable`): their gradients are left to the caller.
    """
    sharded = sharding_axes(mesh.sizes, zero)
    if not sharded:
        return set()
    axis = mesh.axis(*sharded)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if dtype != param_dtype else None,
        reduce_dtype=grad_dtype if grad_dtype != dtype else None,
    )
    copied = unshardable(module.parameters(), axis.size())
    ignored = copied | _shard_experts(experts, mesh, policy, reshard=zero == 3)
    for block in unshared_blocks(module, [path for path in blocks if path not in entered]):
        if any(p not in ignored for p in block.parameters()):
            fully_shard(
                block, mesh=axis, reshard_after_forward=zero == 3, mp_policy=policy, ignored_params=ignored,
                shard_placement_fn=_placed,
            )  # fmt: skip
    fully_shard(
        module, mesh=axis, reshard_after_forward=False, mp_policy=policy, ignored_params=ignored,
        shard_placement_fn=_placed,
    )  # fmt: skip
    if compression == "bf16":
        for unit in module.modules():
            if isinstance(unit, FSDPModule):
                unit.set_custom_reduce_scatter(Bf16ReduceScatter())  # type: ignore[arg-type]  # by its shape
    return copied


def _shard_experts(
    experts: Sequence[nn.Module], mesh: RankMesh, policy: MixedPrecisionPolicy, *, reshard: bool
) -> set[nn.Parameter]:
    """Shard each layer over the ranks that hold the same experts; the parameters, if one rank alone holds them."""
    if not experts:
        return set()
    axis = mesh.expert_axis(EXPERT_SHARD)
    if axis.size() == 1:
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


def _placed(parameter: nn.Parameter) -> Shard | None:
    """DTensor cannot say that a piece of each part is cut again along the same dim: another is taken."""
    return Shard(1) if in_parts_along(parameter) == 0 else None


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


def announce_micro_batch(module: nn.Module, *, zero: int, last: bool) -> None:
    """Tell FSDP2 which micro-batch of the step comes: when to reduce gradients and to free parameters."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.set_is_last_backward(last)
            unit.set_requires_gradient_sync(last or zero >= 2, recurse=False)
            unit.set_reshard_after_backward(last or zero == 3, recurse=False)


def run_weights(module: nn.Module, half: WeightHalf) -> None:
    """The second half of a split backward pass at zero 2: each unit reduces its gradients as soon as it has them all."""
    waiting = whole_weights(module)
    for unit in waiting if not half.junctions else ():  # a pass of its own, in which FSDP2 sees to that
        unit.set_requires_gradient_sync(True, recurse=False)
    home = {weight: unit for unit, weights in waiting.items() for weight in weights}

    def complete(weight: Tensor) -> None:
        unit = home.get(weight)
        if unit is not None:
            waiting[unit].discard(weight)
            if not waiting[unit]:
                waiting.pop(unit)
                reduce_unit(unit)

    half.run(complete)
    for unit in waiting:
        reduce_unit(unit)


def reductions_per_step(zero: int, micro_batches: int, *, sharded: bool) -> int:
    """How often a parameter's gradient arrives in one step: once if accumulated whole (zero 1)."""
    return 1 if sharded and zero <= 1 else micro_batches
