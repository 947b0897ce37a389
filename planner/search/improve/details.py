"""Keys that no bound tells apart: how gradients are synchronised, and shares of what is offloaded.

Bounds hold whatever these are (a reduction takes the best rate of any bucket and algorithm). Each is varied alone on one of the
best strategies, as long as one of them makes it better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoparallel.errors import UserError
from autoparallel.planner.check import constraint_problems
from autoparallel.planner.problem import Problem, objective_value
from autoparallel.planner.search import spending
from autoparallel.planner.search.evaluate import TOLERANCE, Evaluation, evaluate, held_by
from autoparallel.planner.search.simulations import SHARES, Simulations
from autoparallel.planner.search.space.candidates import Candidate
from autoparallel.planner.search.space.syncs import other_syncs
from autoparallel.planner.strategy.legal import strategy_problems
from autoparallel.planner.strategy.types import Strategy


def improve_details(sims: Simulations, chosen: Candidate, found: Evaluation) -> None:
    """Vary a candidate's strategy key by key as long as it gets better."""
    better: Evaluation | None = found
    while better is not None:
        found = better
        varied = (
            _better(sims, chosen, found, other) for other in _varied(sims.outer.problem, found.strategy)
        )
        better = next((one for one in varied if one is not None), None)


def _better(sims: Simulations, chosen: Candidate, found: Evaluation, strategy: Strategy) -> Evaluation | None:
    problem, outer = sims.outer.problem, sims.outer
    if strategy_problems(problem.graph, problem.cluster, strategy) or constraint_problems(problem, strategy):
        return None
    if problem.is_refused(strategy):
        return None
    chunks = strategy.mesh.pp * strategy.pipeline.virtual_stages
    sims.work += spending.PER_SIMULATION + spending.PER_STAGE_SIMULATED * chunks
    sims.work += spending.PER_ACTION_WALKED * 2 * chunks * strategy.micro_batches
    try:
        if not outer.fits(held_by(outer.book.expander, strategy)):
            return None
        other = evaluate(outer.book.expander, strategy)
    except UserError:  # tensor entries that mean nothing there
        return None
    sims.seen.append(other)
    value, best = objective_value(problem, other), objective_value(problem, found)
    if not value < tuple(part * (1 - TOLERANCE) for part in best):
        return None
    sims.consider(other, chosen=chosen)
    return other


def _varied(problem: Problem, strategy: Strategy) -> Iterator[Strategy]:
    sync, offloaded = strategy.grad_sync, strategy.offload
    for share in SHARES if offloaded.optimizer else ():
        if share != offloaded.optimizer:
            yield replace(strategy, offload=replace(offloaded, optimizer=share))
    for share in SHARES if offloaded.activations else ():
        if share != offloaded.activations:
            yield replace(strategy, offload=replace(offloaded, activations=share))
    yield from other_syncs(problem, strategy)
    if strategy.mesh.data_parallel * strategy.mesh.cp > 1:
        yield replace(strategy, grad_sync=replace(sync, overlap=not sync.overlap))
