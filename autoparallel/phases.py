"""The next phase of training, between two steps: other gradients without a restart, another mesh by way of state in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autoparallel.errors import UserError
from autoparallel.planner.strategy.phases import only_synchronisation, strategy_at
from autoparallel.planner.strategy.types import Strategy
from autoparallel.runtime.checkpoints.in_memory import names_of, reshard


def enter_phase(
    model: Any, optimizer: Any, strategy: Strategy, step: int, remake: Callable[[Strategy], tuple[Any, Any]] | None = None
) -> tuple[Any, Any]:  # fmt: skip
    """Model and optimizer for step `step` (the first is 1) of a strategy with phases; what was given where nothing changes.

    Where `[grad_sync]` alone changes, the same ones go on (`synchronise_by`). Else `remake(strategy)` makes both anew, of a model
    as it was before `auto_parallelize` (on the meta device, so that nothing is initialised for nothing) and with
    `model.optimizer(...)`; they get the state of the old ones, share by share. Schedules of the learning rate are the
    caller's. Collective. Raises UserError where something else changes and nothing remakes.
    """
    if not strategy.phases:
        return model, optimizer
    wanted, now = strategy_at(strategy, step), replace(model.strategy, phases=())
    run = _as_run(wanted, now)  # dtypes and kernels are the module's own
    if run == now:
        return model, optimizer
    if only_synchronisation(now, run):
        model.synchronise_by(wanted.grad_sync)
        return model, optimizer
    if remake is None:
        raise UserError(
            f"[[phase]] from step {step}: more than [grad_sync] changes, so that the model has to be made anew: give remake=, or "
            "restart from a checkpoint with the next phase's strategy"
        )
    optimizer.zero_grad()
    state, kept = model.state_dict(), optimizer.state_dict()
    new_model, new_optimizer = remake(wanted)
    new_model.load_state_dict(reshard(state, new_model.state_dict()))
    new_optimizer.load_state_dict(reshard(kept, new_optimizer.state_to_load(names_of(kept))))
    return new_model, new_optimizer


def _as_run(wanted: Strategy, now: Strategy) -> Strategy:
    """What is chosen where a phase leaves it open, is as it was chosen."""
    tensor = now.tensor if wanted.mesh.tp == now.mesh.tp and not wanted.tensor else wanted.tensor
    pipeline = wanted.pipeline
    if not pipeline.stage_blocks:
        pipeline = replace(pipeline, stage_blocks=now.pipeline.stage_blocks)
    return replace(wanted, execution=now.execution, tensor=tensor, pipeline=pipeline)
