"""Phases of training: which strategy holds at which step."""

from __future__ import annotations

from dataclasses import replace

from autoparallel.planner.strategy.file import strategy_from_constraints, strategy_to_constraints
from autoparallel.planner.strategy.types import Phase, Strategy


def strategy_at(strategy: Strategy, step: int) -> Strategy:
    """What runs in a step, counted from 1: the keys of every phase that has begun, the last one's where several say something.
    Without phases of its own. Where the mesh changes, tensor placements are those of the strategy if tp stays, else chosen."""
    found = replace(strategy, phases=())
    for phase in strategy.phases:
        if phase.from_step <= step:
            found = with_keys(found, phase)
    return found


def with_keys(strategy: Strategy, phase: Phase) -> Strategy:
    """The strategy with a phase's keys."""
    keys = dict(phase.keys)
    constraints = {**strategy_to_constraints(strategy), **keys}
    if keys.keys() & {"mesh.pp", "pipeline.virtual_stages"} and "pipeline.stage_blocks" not in keys:
        constraints["pipeline.stage_blocks"] = ()
    found = strategy_from_constraints(constraints)
    return replace(found, tensor=()) if found.mesh.tp != strategy.mesh.tp else found


def starts(strategy: Strategy) -> tuple[int, ...]:
    """The first step of each phase, the first phase's among them."""
    return (1, *(phase.from_step for phase in strategy.phases))


def only_synchronisation(one: Strategy, other: Strategy) -> bool:
    """Whether two strategies differ in `[grad_sync]` alone, which changes between two steps."""
    return replace(one, grad_sync=other.grad_sync) == other


def differences(before: Strategy, after: Strategy) -> tuple[tuple[str, object], ...]:
    """The keys, dotted, in which a strategy differs from the one before it."""
    old = strategy_to_constraints(before)
    return tuple(
        (k, v) for k, v in strategy_to_constraints(after).items() if old.get(k) != v and k != "tensor"
    )
