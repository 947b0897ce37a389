"""Of strategies that are equally good the simplest: fewer axes, less recomputation, a lower ZeRO level.

The search takes whichever it meets first. What it found is taken apart here, step by step, as long as the objective
does not notice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from autoparallel.errors import UserError
from autoparallel.planner.check import constraint_problems
from autoparallel.planner.problem import Value, objective_value
from autoparallel.planner.search.bounds.outer import Outer
from autoparallel.planner.search.evaluate import TOLERANCE, Evaluation, evaluate, held_by
from autoparallel.planner.search.space.candidates import rules_of
from autoparallel.planner.strategy.legal import strategy_problems
from autoparallel.planner.strategy.types import AXES, Offload, Recompute, Strategy


def simplest(outer: Outer, best: Evaluation, limit: float | None = None) -> Evaluation:
    """`best` without what makes it no better (or no worse than `limit` in the objective), as far as the user's constraints
    go."""
    value, found = objective_value(outer.problem, best), best
    if limit is not None:
        value = (limit, inf)
    while (simpler := next(_as_good(outer, found.strategy, value), None)) is not None:
        found = simpler
    return found


def _as_good(outer: Outer, strategy: Strategy, value: Value) -> Iterator[Evaluation]:
    problem = outer.problem
    for other in _simpler(outer, strategy):
        if strategy_problems(problem.graph, problem.cluster, other) or constraint_problems(problem, other):
            continue
        if problem.is_refused(other):
            continue
        try:
            if not outer.fits(held_by(outer.book.expander, other)):
                continue
            one = evaluate(outer.book.expander, other)
        except UserError:  # tensor entries that mean nothing there
            continue
        if all(a <= b * (1 + TOLERANCE) for a, b in zip(objective_value(problem, one), value, strict=True)):
            yield one


def _simpler(outer: Outer, strategy: Strategy) -> Iterator[Strategy]:
    """The strategy with one thing less, each in turn."""
    mesh, shard, given = strategy.mesh, replace(strategy.shard, secondary=0), rules_of(outer.problem)
    if strategy.offload != Offload():
        yield replace(strategy, offload=Offload())
    if strategy.tensor != given:  # the first plan of the tensor plans
        yield replace(strategy, tensor=given)
    idle = mesh.tp > 1 and not outer.book.expander.tensor_plan(strategy).rules  # its ranks do the same work
    if idle and not outer.problem.all_devices:
        alone = replace(shard, sequence_parallel=False)
        yield replace(strategy, mesh=replace(mesh, tp=1), shard=alone)
    ranks = mesh.data_parallel
    if mesh.dp_shard > 1 and mesh.cp == 1:
        replicas = replace(mesh, dp_replicate=ranks, dp_shard=1)
        yield replace(strategy, mesh=replicas, shard=replace(shard, zero=0))
    if mesh.dp_shard > 1 and mesh.dp_replicate > 1:
        yield replace(strategy, mesh=replace(mesh, dp_replicate=1, dp_shard=ranks))
    for zero in range(1, shard.zero):
        yield replace(strategy, shard=replace(shard, zero=zero))
    if strategy.shard.secondary:
        yield replace(strategy, shard=shard)
    if shard.sequence_parallel:
        yield replace(strategy, shard=replace(shard, sequence_parallel=False))
    if strategy.recompute != Recompute():
        yield replace(strategy, recompute=Recompute())
        if strategy.recompute.mode != "none" and any(strategy.recompute.per_stage):
            yield replace(strategy, recompute=replace(strategy.recompute, mode="none"))
    if strategy.offload != Offload():
        yield replace(strategy, offload=Offload())
    if strategy.grad_sync.compresses:
        yield replace(strategy, grad_sync=replace(strategy.grad_sync, compression=()))
    if strategy.grad_sync.weights != "none":
        yield replace(strategy, grad_sync=replace(strategy.grad_sync, weights="none"))
    if mesh.order != AXES:
        yield replace(strategy, mesh=replace(mesh, order=AXES))
