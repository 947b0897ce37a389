"""Better partitions of one candidate: those that its stage problem likes best, by the paths that are known; then those near the
best one, blocks going from chunks that weigh much in the critical path to ones that weigh less, and fewer of them recomputed, as
long as the simulation gets shorter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from autoparallel.planner.problem import Objective
from autoparallel.planner.search.evaluate import TOLERANCE
from autoparallel.planner.search.partition.forms import PS
from autoparallel.planner.search.partition.problem import (
    Partition,
    Row,
    StageProblem,
    has_choice,
    partition_fits,
)
from autoparallel.planner.search.partition.solve import EFFORT, SHORT, solve_stages
from autoparallel.planner.search.partition.unlike import on_devices
from autoparallel.planner.search.simulations import Simulations
from autoparallel.planner.search.space.candidates import Candidate

MOST_SIMULATED = 24  # partitions in all,
MOVES_TRIED = 8  # and moves of each that are simulated; further ones as long as these took no more than
LITTLE_WORK = 100.0  # of all, and
LITTLE_EACH = 40.0  # of each. Kind: formula
MOST_SOLVED = 4  # times the stage problem is solved, each with the path that the simulation before showed


def solve_partition(sims: Simulations, chosen: Candidate) -> None:
    """Simulate the partitions that a candidate's stage problem likes best, one after the other, each with the path that the one
    before showed."""
    problem, found = sims.problem(chosen), sims.candidates[chosen]
    if problem is None or not has_choice(problem) or sims.outer.problem.objective == Objective.MEMORY:
        return
    excluded: tuple[Partition, ...] = ()
    for _ in range(MOST_SOLVED):
        below = ceil(found.step_time_s * (1 - TOLERANCE) * PS)
        answer = solve_stages(
            problem, excluded=excluded, below=below, effort=EFFORT * SHORT, spend=sims.spend
        )
        if answer is None or answer.partition is None:
            return
        tried = sims.simulate(chosen, problem, answer.partition)
        excluded, problem = (*excluded, answer.partition), sims.with_paths(chosen, problem)
        if sims.outer.fits(tried) and tried.step_time_s < found.step_time_s:
            found = tried


def move_blocks(sims: Simulations, chosen: Candidate) -> None:
    """Move single blocks of a candidate's best partition as long as that makes the step shorter."""
    problem, found = sims.problem(chosen), sims.candidates[chosen]
    if problem is None or (problem.chunks == 1 and not problem.recompute):
        return
    strategy = found.strategy
    partition = Partition(
        blocks=strategy.pipeline.stage_blocks,
        recomputed=strategy.recompute.per_stage or (0,) * problem.chunks,
    )
    better, left, begun = True, MOST_SIMULATED, sims.work
    while better and (left > 0 or sims.work - begun < LITTLE_WORK):
        better = False
        if found.path is None:
            return
        (path,) = on_devices(problem, [found.path])
        work = sims.work
        for number, moved in enumerate(moves(problem, partition, path)):
            if number >= MOVES_TRIED and sims.work - work >= LITTLE_EACH:
                break
            tried, left = sims.simulate(chosen, problem, moved), left - 1
            if sims.outer.fits(tried) and tried.step_time_s < found.step_time_s * (1 - TOLERANCE):
                found, partition, better = tried, moved, True
                break


def moves(problem: StageProblem, partition: Partition, path: Row) -> Iterator[Partition]:
    """Partitions that fit and differ by one block, in the order of what that takes off a critical path."""
    if problem.recompute and problem.recomputed is None:
        for chunk, full in enumerate(partition.recomputed):
            if full:
                kept = replace(partition, recomputed=_with(partition.recomputed, chunk, full - 1))
                if partition_fits(problem, kept):
                    yield kept
    if problem.blocks is not None or problem.recomputed is not None:
        return
    each = _weights(problem, path)
    pairs = [
        (each[to] - each[off], off, to)
        for off in range(problem.chunks)
        for to in range(problem.chunks)
        if each[to] < each[off]
        and partition.blocks[off] > problem.least[off]
        and partition.blocks[to] < problem.most[to]
    ]
    for _, off, to in sorted(pairs):
        moved = _moved(problem, partition, off, to)
        if moved is not None:
            yield moved


def _with(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _weights(problem: StageProblem, path: Row) -> list[int]:
    """By chunk, what one more block of it adds to a path; the mean over the kinds of block, times their number."""
    weights = [0] * problem.chunks
    for quantity, chunk, factor in path.terms:
        form = problem.quantities[quantity].forms[0]
        weights[chunk] += factor * sum(form.kept[kind] for kind in dict.fromkeys(problem.kinds))
    return weights


def _moved(problem: StageProblem, partition: Partition, off: int, to: int) -> Partition | None:
    """One block of a chunk in another: recomputed there only if it does not fit else."""
    blocks = _with(_with(partition.blocks, off, partition.blocks[off] - 1), to, partition.blocks[to] + 1)
    recomputed = _with(partition.recomputed, off, min(partition.recomputed[off], blocks[off]))
    moved = Partition(blocks=blocks, recomputed=recomputed)
    if partition_fits(problem, moved):
        return moved
    if not problem.recompute:
        return None
    moved = replace(moved, recomputed=_with(recomputed, to, recomputed[to] + 1))
    return moved if partition_fits(problem, moved) else None
