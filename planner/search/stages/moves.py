"""Deals one block away from another: what to try where a simulation has shown what decides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from autoparallel.planner.search.stages.problem import Deal, Row, StageProblem, deal_fits

TRIED = 8  # moves of a deal that are looked at. Kind: formula


def moves(problem: StageProblem, deal: Deal, path: Row) -> Iterator[Deal]:
    """Deals that fit and have one block in another chunk, in the order of what that takes off a critical path: at most
    `TRIED`, and none that takes nothing."""
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
    yield from islice((one for one in moved if one is not None), TRIED)


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
