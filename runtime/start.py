"""From a strategy and a module to a running `ParallelModule`: check, start ranks, lower."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Container, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoparallel.costmodel.program import Program
from autoparallel.errors import UserError
from autoparallel.planner.strategy.types import Strategy
from autoparallel.runtime.capabilities.rows import Case, in_tiers
from autoparallel.runtime.capabilities.table import check_capabilities, otherwise_priced
from autoparallel.runtime.experts.modules import ExpertModule
from autoparallel.runtime.experts.parallel import check_experts
from autoparallel.runtime.gradients.replicas import local_updates, with_levels
from autoparallel.runtime.loading.materialise import check_initialisable, common_seed, on_meta
from autoparallel.runtime.loading.weights import find_weights
from autoparallel.runtime.lowering.lower import (
    Dtypes,
    broadcast_state,
    check_rules,
    lower_module,
    module_dtypes,
)
from autoparallel.runtime.lowering.members import check_members
from autoparallel.runtime.lowering.micro_batches import sequences_of, shared_by_samples
from autoparallel.runtime.lowering.parallel_module import Run, make_parallel
from autoparallel.runtime.memory.offload import check_offload
from autoparallel.runtime.memory.optimizer import Optimizers
from autoparallel.runtime.memory.recompute import MODES
from autoparallel.runtime.ranks.accelerator import CPU, backend_of_ranks, generator_state, set_generator_state
from autoparallel.runtime.ranks.mesh import RankMesh, build_mesh, check_mesh, start_ranks, world_size
from autoparallel.runtime.ranks.progress import Progress, silent
from autoparallel.runtime.servers.tiering import tier_tables, tiered_modules
from autoparallel.runtime.torch_private import draw_without_broadcast


def parallelize(
    module: nn.Module,
    example_inputs: Any,
    strategy: Strategy,
    *,
    blocks: Sequence[str],
    program: Callable[[], Program],
    dtypes: Dtypes | None = None,
    level_sizes: tuple[int, ...] = (),
    weights: str | os.PathLike[str] | None = None,
    experts: Sequence[ExpertModule] | None = (),
    entered: Collection[str] = (),
    alone: Collection[str] = (),
    progress: Progress = silent,
) -> nn.Module:
    """Run `module` by `strategy` on the processes of this run, in place where there is no pipeline.

    `blocks` are the paths of its repeated blocks in model order, `level_sizes` those of the cluster's network
    levels (they decide which group crosses which level), `experts` its layers of experts (None: some that are called
    in a way that is not known), `entered` blocks of which its other code uses parameters, `alone` modules outside of them that are gathered by themselves. Every rank ends up with rank 0's values;
    parameters on the meta device are made and initialised share by share. With `weights` (a safetensors file,
    or a folder of them) each rank reads its shares from there. Collective. Raises UserError, before anything is
    changed, for a strategy that does not fit the module or the processes, and for weights that do not fit it.
    """
    found = find_weights(weights, module) if weights is not None else None
    check_strategy(module, strategy, blocks, level_sizes, found or (), shares_experts=experts is not None)
    _, device = start_ranks()
    sharings = check_experts(module, strategy.mesh, experts, device)
    dtypes = dtypes or module_dtypes(module)
    if dtypes.tf32:
        torch.set_float32_matmul_precision("high")
    mesh = with_levels(build_mesh(strategy.mesh, level_sizes), strategy)
    _share_generators(mesh)
    if strategy.mesh.pp > 1:
        from autoparallel.runtime.pipeline.module import pipeline_module

        return pipeline_module(
            module, example_inputs, strategy, blocks=blocks, mesh=mesh, dtypes=dtypes, program=program,
            weights=found, experts=sharings, entered=entered, alone=alone, progress=progress,
        )  # fmt: skip
    broadcast_state(module, mesh.device)
    full = strategy.recompute.per_stage[0] if strategy.recompute.per_stage else 0
    seed = common_seed(mesh.device) if on_meta(module) else 0
    tables, found = tier_tables(
        module, strategy, mesh, param_dtype=dtypes.param, grad_dtype=dtypes.grad, seed=seed, weights=found
    )
    lowered = lower_module(
        module, blocks, strategy, mesh, dtypes, recomputed_in_full=full, seed=seed, weights=found,
        experts=sharings, entered=entered, alone=alone,
    )  # fmt: skip
    optimizers = Optimizers(
        strategy=strategy, device=mesh.device, named=partial(module.named_parameters, remove_duplicate=False),
        owed=lowered.sync.owed, tables=tables, local=local_updates(strategy, mesh, module.parameters()),
    )  # fmt: skip
    run = Run(
        strategy=strategy, mesh=mesh, dtypes=dtypes, lowered=lowered, program=program, optimizers=optimizers,
        shared=shared_by_samples(example_inputs), progress=progress, tables=tables,
        sequences=sequences_of(example_inputs, strategy.batch.seq_len),
    )  # fmt: skip
    return make_parallel(module, run)


def _share_generators(mesh: RankMesh) -> None:
    """Let peers of tp and cp draw the same random numbers, on the CPU and on their devices: they hold the same samples."""
    axes = [axis for axis in ("tp", "cp") if getattr(mesh.sizes, axis) > 1]
    for axis in axes:
        for device in dict.fromkeys((CPU, mesh.device)):
            state = generator_state(device).to(mesh.device)
            dist.broadcast(state, group_src=0, group=mesh.group(axis))
            set_generator_state(state.to(CPU), device)
    if axes and mesh.device_mesh is not None:
        draw_without_broadcast(mesh.device_mesh, mesh.device)


def check_strategy(
    module: nn.Module,
    strategy: Strategy,
    blocks: Sequence[str],
    level_sizes: tuple[int, ...] = (),
    given: Container[str] = (),
    backend: str | None = None,
    shares_experts: bool = True,
) -> None:
    """Refuse a strategy that does not fit the module, the processes or the runtime; changes nothing.

    `given` are the names of tensors that will be loaded; `backend` (the process's own) runs the collectives;
    `shares_experts`: whether tokens can be sent to all of the model's experts.
    """
    case = Case(
        strategy=strategy,
        level_sizes=level_sizes,
        backend=backend or backend_of_ranks(),
        shares_experts=shares_experts,
        numbers=sum(parameter.numel() for parameter in module.parameters()),
    )
    check_capabilities(case)
    for problem in otherwise_priced(case):
        warnings.warn(problem, stacklevel=2)
    check_mesh(strategy.mesh, world_size())
    _check_batch(strategy)
    _check_blocks(strategy, blocks)
    if strategy.shard.zero == 0 and strategy.mesh.dp_shard > 1:
        raise UserError(
            "shard.zero = 0 needs mesh.dp_shard = 1: use mesh.dp_replicate, or choose zero 1, 2 or 3"
        )
    if strategy.recompute.mode not in MODES:
        raise UserError(f'recompute.mode = "{strategy.recompute.mode}": choose one of {", ".join(MODES)}')
    check_offload(strategy.offload)
    tiered_modules(module, strategy.embedding)
    check_rules(module, strategy)
    check_members(module, in_tiers=in_tiers(strategy.embedding))
    check_initialisable(module, given)


def _check_batch(strategy: Strategy) -> None:
    batch, ranks = strategy.batch, strategy.mesh.data_parallel
    per_round = batch.micro * ranks
    if batch.micro < 1 or batch.global_ < per_round or batch.global_ % per_round:
        raise UserError(
            f"batch.global = {batch.global_} is not a positive multiple of batch.micro = {batch.micro} times "
            f"{ranks} data-parallel ranks: change one of them"
        )


def _check_blocks(strategy: Strategy, blocks: Sequence[str]) -> None:
    stages = strategy.pipeline.stage_blocks
    if stages and sum(stages) != len(blocks):
        raise UserError(
            f"pipeline.stage_blocks = {list(stages)} adds up to {sum(stages)} blocks but the model has "
            f"{len(blocks)}: the strategy was made for another model"
        )
    if strategy.mesh.pp == 1 and strategy.pipeline.virtual_stages != 1:
        raise UserError("pipeline.virtual_stages > 1 needs mesh.pp > 1")
