"""What each chunk of a stage problem may hold, and what that adds to the problem's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoparallel.planner.search.space.meshes import Floats, Ints
from autoparallel.planner.search.stages.problem import Form, Quantity, StageProblem, starts_of

Before = tuple[Floats, Floats]  # of units kept, and of units recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """What a chunk may hold, by start: units `start` to `end`, the first `recomputed` of them recomputed."""

    start: Ints
    end: Ints
    recomputed: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A chunk's pieces, and what each adds to the rows: `table[which[row], piece]`, as many rows get the same."""

    pieces: Pieces
    table: Floats
    which: Ints  # 0: nothing


def layers_of(problem: StageProblem) -> list[Layer]:
    """A layer for each chunk."""
    rows = (*problem.paths, *problem.memory)
    terms: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(problem.chunks)]  # by chunk and row
    for number, row in enumerate(rows):
        for q, c, factor in row.terms:
            terms[c].setdefault(number, []).append((q, factor))
    needed = dict.fromkeys(q for row in rows for q, _, _ in row.terms)
    before = {q: _before(problem, problem.quantities[q]) for q in needed}
    found = []
    for chunk, (pieces, own) in enumerate(zip(_pieces(problem), terms, strict=True)):
        distinct: dict[tuple[tuple[int, int], ...], int] = {(): 0}
        which = np.zeros(len(rows), dtype=np.int64)
        for number, here in own.items():
            which[number] = distinct.setdefault(tuple(sorted(here)), len(distinct))
        used = sorted({q for added in distinct for q, _ in added})
        factors = np.zeros((len(distinct), len(used)))
        for at, added in enumerate(distinct):
            for q, factor in added:
                factors[at, used.index(q)] += factor
        amounts = [_amounts(problem, q, before[q], pieces, chunk) for q in used]
        table = factors @ np.array(amounts).reshape(len(used), len(pieces.start))
        found.append(Layer(pieces=pieces, table=table, which=which))
    return found


def pieces_at_most(problem: StageProblem) -> list[int]:
    """No fewer than the pieces of each chunk."""
    again = problem.recompute or problem.recomputed is not None
    return [
        len(starts) * sum(n + 1 if again else 1 for n in range(least, most + 1))
        for starts, least, most in zip(
            starts_of(len(problem.kinds), problem.least, problem.most),
            problem.least,
            problem.most,
            strict=False,
        )
    ]


def _pieces(problem: StageProblem) -> list[Pieces]:
    """The pieces that each chunk may hold, by start, end and recomputed units."""
    again = problem.recompute or problem.recomputed is not None
    starts = starts_of(len(problem.kinds), problem.least, problem.most)
    found = []
    for chunk, (least, most) in enumerate(zip(problem.least, problem.most, strict=True)):
        sizes = np.arange(least, most + 1)
        if problem.blocks is not None:
            sizes = sizes[sizes == problem.blocks[chunk]]
        start, size = (side.ravel() for side in np.meshgrid(starts[chunk], sizes, indexing="ij"))
        ends = starts[chunk + 1]
        kept = (start + size >= ends.start) & (start + size < ends.stop)
        start, size = start[kept], size[kept]
        each = size + 1 if again else np.ones_like(size)
        recomputed = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)
        start, size = np.repeat(start, each), np.repeat(size, each)
        if problem.recomputed is not None:
            kept = recomputed == problem.recomputed[chunk]
            start, size, recomputed = start[kept], size[kept], recomputed[kept]
        found.append(Pieces(start=start, end=start + size, recomputed=recomputed))
    return found


def _before(problem: StageProblem, quantity: Quantity) -> list[Before]:
    """By form: what all units before a position need, kept and recomputed."""
    kinds = np.array(problem.kinds, dtype=np.int64)
    found = []
    for form in quantity.forms:
        sums = np.zeros((2, len(kinds) + 1))
        np.cumsum(np.array([form.kept, form.recomputed], dtype=np.float64)[:, kinds], axis=1, out=sums[:, 1:])
        found.append((sums[0], sums[1]))
    return found


def _amounts(
    problem: StageProblem, number: int, before: Sequence[Before], pieces: Pieces, chunk: int
) -> Floats:
    """What each piece needs of a quantity."""
    forms = zip(problem.quantities[number].forms, before, strict=True)
    each = [_amount(form, known, pieces, chunk, problem.kinds) for form, known in forms]
    return each[0] if len(each) == 1 else np.asarray(np.max(each, axis=0))


def _amount(form: Form, before: Before, pieces: Pieces, chunk: int, kinds: Sequence[int]) -> Floats:
    kept, again = before
    size, turn = pieces.end - pieces.start, pieces.start + pieces.recomputed
    amount = form.fixed[chunk] + again[turn] - again[pieces.start] + kept[pieces.end] - kept[turn]
    if form.when_all:
        amount = amount + form.when_all * ((pieces.recomputed == size) & (size > 0))
    if form.when_few:
        amount = amount + form.when_few * (size <= 1)
    if form.when_none:
        amount = amount + form.when_none[chunk] * (size == 0)
    if form.last:
        of_unit = np.array([form.last[kind] for kind in kinds], dtype=np.float64)
        amount = amount + np.where(size > 0, of_unit[pieces.end - 1], 0.0)
    return np.asarray(amount)
