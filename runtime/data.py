"""Sharded data parallelism: ZeRO levels over the dp_shard axis, lowered to FSDP2.

What each level keeps on a rank, N = dp_shard, P = bytes of the parameters, in every case 1/N of the optimizer
state:

    zero 3   P/N parameters, plus the unit being computed; gradients P/N; gather and reduce per micro-batch
    zero 2   P/N + P: the shard, and what was gathered once per step; gradients P/N, reduced per micro-batch
    zero 1   P/N + P, gradients P, accumulated whole and reduced once per step

The unit is a repeated block; everything outside the blocks is one more unit, which stays gathered for a whole
micro-batch. `parameters()` hands out the shards, so that any torch optimizer holds its state for them alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from autoparallel.runtime.compression import Bf16ReduceScatter
from autoparallel.runtime.mesh import RankMesh


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
) -> None:
    """Shard the parameters over dp_shard, in place; nothing to do where that axis has size 1."""
    if mesh.sizes.dp_shard == 1:
        return
    axis = mesh.axis("dp_shard")
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if dtype != param_dtype else None,
        reduce_dtype=grad_dtype if grad_dtype != dtype else None,
    )
    ignored = {p for p in module.parameters() if p.dim() == 0}  # FSDP2 has no shard of a scalar
    for block in unshared_blocks(module, blocks):
        if any(p not in ignored for p in block.parameters()):
            fully_shard(
                block, mesh=axis, reshard_after_forward=zero == 3, mp_policy=policy, ignored_params=ignored
            )
    fully_shard(module, mesh=axis, reshard_after_forward=False, mp_policy=policy, ignored_params=ignored)
    if compression == "bf16":
        for unit in module.modules():
            if isinstance(unit, FSDPModule):
                unit.set_custom_reduce_scatter(Bf16ReduceScatter())  # type: ignore[arg-type]  # by its shape


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


def reductions_per_step(zero: int, micro_batches: int, *, sharded: bool) -> int:
    """How often a parameter's gradient arrives in one step: once if accumulated whole (zero 1)."""
    return 1 if sharded and zero <= 1 else micro_batches
