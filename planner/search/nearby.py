"""Deals near one that was simulated: what fits where it does not, and what is better."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from autoparallel.planner.expand.schedules import rank_of_stage
from autoparallel.planner.search.bounds.outer import Outer
from autoparallel.planner.search.evaluate import TOLERANCE, Evaluation
from autoparallel.planner.search.space.candidates import Candidate
from autoparallel.planner.search.stages.deals import quick_deal
from autoparallel.planner.search.stages.problem import Deal, Row, StageProblem, deal_fits, with_less_room
from autoparallel.planner.search.stages.rows import path_row
from autoparallel.planner.search.stages.unlike import on_devices

Simulate = Callable[[Deal], Evaluation]

MOVES_TRIED = 8  # moves of a deal that are looked at. Kind: formula
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


def moves(problem: StageProblem, deal: Deal, path: Row) -> Iterator[Deal]:
    """Deals that fit and have one block in another chunk, in the order of what that takes off a critical path: at most
    `MOVES_TRIED`, and none that takes nothing."""
    if problem.blocks is not None or problem.recomputed is not None:
        return
    each = _weights(problem, path)
    pairs = [
        (each[to] - each[off], off, to)
        for off in range(problem.chunks)
        for to in range(problem.chunks)
        if each[to] < each[off]
        and deal.blocks[off] > problem.least[off]
        and deal.blocks[to] < problem.most[to]
    ]
    moved = (_moved(problem, deal, off, to) for _, off, to in sorted(pairs))
    yield from islice((one for one in moved if one is not None), MOVES_TRIED)


def _weights(problem: StageProblem, path: Row) -> list[int]:
    """By chunk, what one more block of it adds to a path; the mean over the kinds of block, times their number."""
    weights = [0] * problem.chunks
    for quantity, chunk, factor in path.terms:
        form = problem.quantities[quantity].forms[0]
        weights[chunk] += factor * sum(form.kept[kind] for kind in dict.fromkeys(problem.kinds))
    return weights


def _moved(problem: StageProblem, deal: Deal, off: int, to: int) -> Deal | None:
    """One block of a chunk in another: recomputed there only if it does not fit else."""
    blocks, recomputed = list(deal.blocks), list(deal.recomputed)
    blocks[off] -= 1
    blocks[to] += 1
    recomputed[off] = min(recomputed[off], blocks[off])
    moved = Deal(blocks=tuple(blocks), recomputed=tuple(recomputed))
    if deal_fits(problem, moved):
        return moved
    if not problem.recompute:
        return None
    recomputed[to] += 1
    moved = replace(moved, recomputed=tuple(recomputed))
    return moved if deal_fits(problem, moved) else None
