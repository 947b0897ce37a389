"""Deals near one that was simulated: what fits where it does not, and what is better."""

from __future__ import annotations

from collections.abc import Callable

from autoparallel.planner.expand.schedules import rank_of_stage
from autoparallel.planner.search.bounds.outer import Outer
from autoparallel.planner.search.evaluate import TOLERANCE, Evaluation
from autoparallel.planner.search.space.candidates import Candidate
from autoparallel.planner.search.stages.deals import quick_deal
from autoparallel.planner.search.stages.moves import moves
from autoparallel.planner.search.stages.problem import Deal, StageProblem, with_less_room
from autoparallel.planner.search.stages.rows import path_row
from autoparallel.planner.search.stages.unlike import on_devices

Simulate = Callable[[Deal], Evaluation]

ROOMS_TRIED = 5  # deals of a variant tried, each with as much more room as the one before lacked


def leave_room(
    outer: Outer, problem: StageProblem, chosen: Candidate, deal: Deal, found: Evaluation, simulate: Simulate
) -> tuple[Evaluation, Deal]:
    """Where a simulated deal does not fit, as rows bound memory from below: one that leaves as much room there; the last
    one tried."""
    home = rank_of_stage(chosen.schedule, chosen.mesh.pp, chosen.virtual_stages)
    for _ in range(ROOMS_TRIED):
        if outer.excess_bytes(found) <= 0:
            break
        problem = with_less_room(problem, home, outer.lacking_bytes(found))
        smaller = quick_deal(problem)
        if smaller is None:
            break
        if smaller != deal:
            found, deal = simulate(smaller), smaller
    return found, deal


def improve(
    outer: Outer, problem: StageProblem, deal: Deal, found: Evaluation, limit_s: float, simulate: Simulate
) -> None:
    """Where ranks or blocks are unlike, and a deal that fits is no slower than the limit: single blocks go elsewhere as long
    as that helps. What is decided by rows of the stage problem alone is left to its solver."""
    if problem.chunks == 1 or not (problem.device_of or len(set(problem.kinds)) > 1):
        return
    better = found.step_time_s < limit_s
    while better:
        better = False
        (path,) = on_devices(problem, [path_row(found.path())])
        for moved in moves(problem, deal, path):
            tried = simulate(moved)
            if outer.fits(tried) and tried.step_time_s < found.step_time_s * (1 - TOLERANCE):
                found, deal, better = tried, moved, True
                break
