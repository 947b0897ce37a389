"""Stage problems solved chunk by chunk: every partial deal that may still win, as rows of arrays.

A *piece* (i, n, k) is n units from unit i on, of which the first k are recomputed. After chunk c a partial deal is
the unit where it ends and what it adds to each row so far. With S[c][row, i] the least that chunks c, c + 1, … can
add to a row when they start at unit i, a partial deal is dropped as soon as sum + S reaches the best deal known for
a path, or exceeds the capacity for a moment of memory; and where another one that ends at the same unit is at least as
good in every row that is still open and in the longest of the paths that are not (`dominance`). What is left after the
last chunk holds the best deal. All numbers are whole and small enough for floating point to be exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from autoparallel.planner.search.stages.deals import quick_deal
from autoparallel.planner.search.stages.dominance import Measures, measures, undominated
from autoparallel.planner.search.stages.problem import Deal, Form, StageAnswer, StageProblem, deal_value

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Before = tuple[Floats, Floats]  # of units kept, and of units recomputed
# Sizes up to which this is faster than CP-SAT: pieces, and numbers in the table of partial deals. Kind: measured.
MOST_PIECES, MOST_NUMBERS = 20_000, 4_000_000
PER_TABLED, PER_GROWN = 3e-5, 4e-6  # milliseconds on one core for each number. Kind: measured
EXACT = 2.0**52  # whole numbers below are exact in floating point. Kind: formula


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """What a chunk may hold, by start: units `start` to `end`, the first `recomputed` of them recomputed."""

    start: Ints
    end: Ints
    recomputed: Ints

    def take(self, rows: NDArray[np.bool_]) -> Pieces:
        return Pieces(start=self.start[rows], end=self.end[rows], recomputed=self.recomputed[rows])


def solve_in_layers(
    problem: StageProblem,
    excluded: Sequence[Deal],
    below: int | None,
    spend: Callable[[float], None] | None = None,
) -> tuple[bool, StageAnswer | None]:
    """Whether the problem was small enough, and then its best deal below `below` that is not excluded, if any. `spend`
    is told how much work it was, about milliseconds."""
    units = len(problem.kinds)
    quick = quick_deal(problem)
    if quick is not None and quick not in excluded:
        found = deal_value(problem, quick)
        below = found + 1 if below is None else min(below, found + 1)
    pieces_at_most = (units + 1) * (units + 2) // 2 * (units if problem.recompute else 1)
    if below is not None and len(set(problem.kinds)) > 1:  # CP-SAT is quick where units are alike
        problem = with_smaller_chunks(problem, below)
        if sum(problem.most) < units or any(b < a for a, b in zip(problem.least, problem.most, strict=True)):
            return True, None
        starts = units - sum(problem.least) + 1  # of each chunk, when all get what they must have
        own = [
            starts * sum(n + 1 if problem.recompute else 1 for n in range(least, most + 1))
            for least, most in zip(problem.least, problem.most, strict=True)
        ]
        if sum(own) * (len(problem.paths) + len(problem.memory)) > MOST_NUMBERS:
            return False, None
        pieces_at_most = max(own)
    if pieces_at_most > MOST_PIECES:
        return False, None
    pieces = _pieces(problem)
    before = _before(problem)
    rows = [*problem.paths, *problem.memory]
    terms: list[list[tuple[int, int, int]]] = [[] for _ in pieces]  # by chunk: row, quantity, factor
    for r, row in enumerate(rows):
        for q, c, factor in row.terms:
            terms[c].append((r, q, factor))
    tables = [
        _added(problem, before, one, c, own, len(rows))
        for c, (one, own) in enumerate(zip(pieces, terms, strict=True))
    ]
    if spend is not None:
        spend(PER_TABLED * sum(table.size for table in tables))
    if max((float(np.abs(table).max(initial=0.0)) for table in tables), default=0.0) * len(tables) > EXACT:
        return False, None
    limits = np.array(
        [(float("inf") if below is None else below - 1.0) - row.constant for row in problem.paths]
        + [float(problem.room(row) - row.constant) for row in problem.memory]
    )
    left = _least_left(tables, pieces, units)
    if (left[0][:, 0] > limits).any():
        return True, None
    ahead = np.array([*(float(row.constant) for row in problem.paths), *(-limits[len(problem.paths) :])])
    partial, grown = _grow(
        tables, pieces, left, limits, measures(tables, ahead, len(problem.paths)), excluded
    )
    if spend is not None:
        spend(PER_GROWN * grown)
    if partial is None:
        return False, None
    sums, chosen = partial
    return True, _best(problem, pieces, sums, chosen, excluded)


def with_smaller_chunks(problem: StageProblem, below: int) -> StageProblem:
    """The problem with no larger chunks than a path below `below` leaves room for when all others are as small as
    they can be."""
    kinds = _kinds_within(problem)
    least, each = [], []  # by quantity and chunk: of the fewest units, and of each further one
    for quantity in problem.quantities:
        rates = [[_rate(form, k) for k in kinds] for form in quantity.forms]
        floors = [
            [fixed + rate * n + min(form.when_all, 0) + min(form.when_few, 0) + min((0, *form.when_none))
             for fixed, rate, n in zip(form.fixed, own, problem.least, strict=True)]
            for form, own in zip(quantity.forms, rates, strict=True)
        ]  # fmt: skip
        least.append([max(values) for values in zip(*floors, strict=True)])
        each.append([min(values) for values in zip(*rates, strict=True)])
    most = list(problem.most)
    for row in problem.paths:
        room = below - 1 - row.constant - sum(factor * least[q][c] for q, c, factor in row.terms)
        more: dict[int, int] = {}
        for q, c, factor in row.terms:
            more[c] = more.get(c, 0) + factor * each[q][c]
        for c, rate in more.items():
            if rate > 0:
                most[c] = min(most[c], problem.least[c] + room // rate)
    return replace(problem, most=tuple(most))


def _kinds_within(problem: StageProblem) -> list[tuple[int, ...]]:
    """The kinds that each chunk's units can be of."""
    units, before, after = len(problem.kinds), 0, sum(problem.least)
    found = []
    for low in problem.least:
        after -= low
        found.append(tuple(sorted(set(problem.kinds[before : units - after]))))
        before += low
    return found


def _rate(form: Form, kinds: tuple[int, ...]) -> int:
    """The least that a unit of these kinds adds to a form."""
    return min((min(form.kept[k], form.recomputed[k]) for k in kinds), default=0)


def _pieces(problem: StageProblem) -> list[Pieces]:
    """The pieces that each chunk may hold when all chunks get what they must have."""
    units = len(problem.kinds)
    again = problem.recompute or problem.recomputed is not None
    every = [
        (start, start + n, k)
        for start in range(units + 1)
        for n in range(min(units - start, max(problem.most)) + 1)
        for k in range(n + 1 if again else 1)
    ]
    start, end, recomputed = np.array(every, dtype=np.int64).T
    whole, size = Pieces(start=start, end=end, recomputed=recomputed), end - start
    found, before = [], list(accumulate(problem.least, initial=0))
    for chunk in range(problem.chunks):
        fits = (size >= problem.least[chunk]) & (size <= problem.most[chunk]) & (start >= before[chunk])
        fits &= end <= units - (before[-1] - before[chunk + 1])
        if chunk == 0:
            fits &= start == 0
        if chunk == problem.chunks - 1:
            fits &= end == units
        if problem.blocks is not None:
            fits &= size == problem.blocks[chunk]
        if problem.recomputed is not None:
            fits &= recomputed == problem.recomputed[chunk]
        found.append(whole.take(fits))
    return found


def _before(problem: StageProblem) -> list[list[Before]]:
    """By quantity and form: what all units before a position need, kept and recomputed."""
    return [
        [
            (
                np.array([0, *accumulate(form.kept[k] for k in problem.kinds)], dtype=np.float64),
                np.array([0, *accumulate(form.recomputed[k] for k in problem.kinds)], dtype=np.float64),
            )
            for form in quantity.forms
        ]
        for quantity in problem.quantities
    ]


def _added(
    problem: StageProblem,
    before: list[list[Before]],
    pieces: Pieces,
    chunk: int,
    terms: Sequence[tuple[int, int, int]],
    rows: int,
) -> Floats:
    """What each piece adds to each row as that chunk: [row, piece]. `terms`: row, quantity, factor."""
    used = sorted({q for _, q, _ in terms})
    place = {q: i for i, q in enumerate(used)}
    factors = np.zeros((rows, len(used)))
    for r, q, factor in terms:
        factors[r, place[q]] += factor
    amounts = []
    for q in used:
        forms = zip(problem.quantities[q].forms, before[q], strict=True)
        each = [_amount(form, known, pieces, chunk, problem.kinds) for form, known in forms]
        amounts.append(each[0] if len(each) == 1 else np.max(each, axis=0))
    return np.asarray(factors @ np.array(amounts).reshape(len(used), len(pieces.start)))


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


def _least_left(tables: list[Floats], pieces: list[Pieces], units: int) -> list[Floats]:
    """S[c][row, i]: the least that chunks from c on add to each row when they start at unit i."""
    rows = len(tables[0])
    after = np.full((rows, units + 1), np.inf)
    after[:, units] = 0.0
    found = [after]
    for table, one in zip(reversed(tables), reversed(pieces), strict=True):
        here = np.full((rows, units + 1), np.inf)
        if len(one.start):
            starts, first = np.unique(one.start, return_index=True)
            here[:, starts] = np.minimum.reduceat(table + found[-1][:, one.end], first, axis=1)
        found.append(here)
    return found[::-1]


def _grow(
    tables: list[Floats],
    pieces: list[Pieces],
    left: list[Floats],
    limits: Floats,
    measured: Sequence[Measures],
    excluded: Sequence[Deal],
) -> tuple[tuple[Floats, list[Ints]] | None, int]:
    """Deals within the limits, the best one that is not excluded among them: the sums of their rows, and by chunk their
    pieces, None if they are too many; and how many numbers were made."""
    sums, grown = np.zeros((1, len(limits))), 0
    at = np.zeros(1, dtype=np.int64)
    chosen: list[Ints] = []
    like = np.ones(
        (1, len(excluded)), dtype=np.bool_
    )  # the start of an excluded deal, which rules out no other
    steps = zip(tables, pieces, left[1:], measured, strict=True)
    for chunk, (table, one, after, measure) in enumerate(steps):
        first = np.searchsorted(one.start, at, side="left")
        count = np.searchsorted(one.start, at, side="right") - first
        if int(count.sum()) * len(limits) > MOST_NUMBERS:
            return None, grown
        grown += int(count.sum()) * len(limits)
        parent = np.repeat(np.arange(len(at)), count)
        piece = np.arange(len(parent)) - np.repeat(np.cumsum(count) - count, count) + first[parent]
        total = sums[parent] + table.T[piece]
        kept = np.flatnonzero((total + after.T[one.end[piece]] <= limits).all(axis=1))
        total, parent, piece = total[kept], parent[kept], piece[kept]
        sizes, again = (one.end - one.start)[piece, None], one.recomputed[piece, None]
        same = [(deal.blocks[chunk], deal.recomputed[chunk]) for deal in excluded]
        blocks, recomputed = (np.array([pair[i] for pair in same], dtype=np.int64) for i in range(2))
        alike = like[parent] & (sizes == blocks) & (again == recomputed)
        best = undominated(one.end[piece], measure.of(total), alike.any(axis=1))
        sums, at, like = total[best], one.end[piece[best]], alike[best]
        chosen = [*(row[parent[best]] for row in chosen), piece[best]]
    return (sums, chosen), grown


def _best(
    problem: StageProblem,
    pieces: list[Pieces],
    sums: Floats,
    chosen: list[Ints],
    excluded: Sequence[Deal],
) -> StageAnswer | None:
    """The best of the deals that is not excluded, the first of equals."""
    constants = np.array([row.constant for row in problem.paths])
    values = (sums[:, : len(constants)] + constants).max(axis=1, initial=0.0)
    for row in np.argsort(values, kind="stable"):
        blocks = [int(one.end[p[row]] - one.start[p[row]]) for one, p in zip(pieces, chosen, strict=True)]
        recomputed = [int(one.recomputed[p[row]]) for one, p in zip(pieces, chosen, strict=True)]
        deal = Deal(blocks=tuple(blocks), recomputed=tuple(recomputed))
        if deal not in excluded:
            return StageAnswer(deal=deal, value=int(values[row]), bound=int(values[row]))
    return None
