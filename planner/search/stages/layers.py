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
from itertools import pairwise
from math import inf

import numpy as np

from autoparallel.planner.search.space.meshes import Floats, Ints
from autoparallel.planner.search.stages.deals import quick_deal
from autoparallel.planner.search.stages.dominance import Measures, distinct_pairs, measures, undominated
from autoparallel.planner.search.stages.pieces import Layer, layers_of, pieces_at_most
from autoparallel.planner.search.stages.problem import (
    Deal,
    Form,
    StageAnswer,
    StageProblem,
    deal_value,
    starts_of,
)

# Sizes up to which this is faster than CP-SAT: pieces (of unlike blocks, of alike ones, and of these where ranks have
# several chunks), and numbers made for partial deals. Kind: measured.
MOST_PIECES, MOST_ALIKE, MOST_OF_SEVERAL, MOST_NUMBERS = 200_000, 40_000, 600, 4_000_000
# Partial deals after a chunk; where ranks have several chunks few are dominated. Kind: measured
MOST_PARTIAL, MOST_PARTIAL_OF_SEVERAL = 1_000, 150
PER_TABLED, PER_GROWN = 3e-5, 4e-6  # milliseconds on one core for each number. Kind: measured
# How much longer than the longest path's least a deal may be, tried one after the other: mostly there is one that is no
# longer at all, and the tighter the limit, the fewer partial deals. Kind: measured
SLACKS = (0.0, 0.004, 0.016, inf)
EXACT = 2.0**52  # whole numbers below are exact in floating point. Kind: formula


def solve_in_layers(
    problem: StageProblem,
    excluded: Sequence[Deal],
    below: int | None,
    spend: Callable[[float], None] | None = None,
) -> tuple[bool, StageAnswer | None]:
    """Whether the problem was small enough, and then its best deal below `below` that is not excluded, if any. `spend`
    is told how much work it was, about milliseconds."""
    if problem.chunks == 1:
        return True, _only_chunk(problem, excluded, below)
    if below is None:
        below = _below_quickly(problem, excluded, None)
    if below is not None:
        problem = with_fitting_chunks(problem, below)
        if any(b < a for a, b in zip(problem.least, problem.most, strict=True)):
            return True, None
    if sum(pieces_at_most(problem)) > _most_pieces(problem):
        return False, None
    below = _below_quickly(problem, excluded, below)
    layers = layers_of(problem)
    if spend is not None:
        spend(PER_TABLED * sum(layer.table.size for layer in layers))
    largest = max((float(np.abs(layer.table).max(initial=0.0)) for layer in layers), default=0.0)
    if largest * len(layers) > EXACT:
        return False, None
    left = _least_left(layers, len(problem.kinds))
    last = inf if below is None else float(below)
    limits = _limits(problem, last)
    least = left[0].of_rows([0])[0]
    if (least > limits).any():
        return True, None
    ahead = np.array([*(float(row.constant) for row in problem.paths), *(-limits[len(problem.paths) :])])
    measured = measures(layers, ahead, len(problem.paths))
    shortest = max((float(least[i]) + row.constant for i, row in enumerate(problem.paths)), default=0.0)
    most = MOST_PARTIAL_OF_SEVERAL if _several_on_a_rank(problem) else MOST_PARTIAL
    for slack in SLACKS:
        within = min(shortest * (1 + slack) + 1, last)
        partial, grown = _grow(layers, left, _limits(problem, within), measured, excluded, most)
        if spend is not None:
            spend(PER_GROWN * grown)
        if partial is None:
            return False, None
        found = _best(problem, layers, *partial, excluded)
        if found is not None or within == last:
            return True, found
    return True, None


def _only_chunk(problem: StageProblem, excluded: Sequence[Deal], below: int | None) -> StageAnswer | None:
    """The best of all numbers of recomputed blocks."""
    (layer,) = layers_of(problem)
    sums = layer.table.T[:, layer.which]
    kept = np.flatnonzero((sums <= _limits(problem, inf if below is None else below)).all(axis=1))
    return _best(problem, [layer], sums[kept], [kept], excluded)


def _limits(problem: StageProblem, below: float) -> Floats:
    """By row, what the chunks may add to it in a deal below `below` that fits."""
    paths = [below - 1.0 - row.constant for row in problem.paths]
    return np.array([*paths, *(float(problem.room(row) - row.constant) for row in problem.memory)])


def _below_quickly(problem: StageProblem, excluded: Sequence[Deal], below: int | None) -> int | None:
    """`below`, or just above an easily found deal that is below it."""
    quick = quick_deal(problem)
    if quick is None or quick in excluded:
        return below
    found = deal_value(problem, quick) + 1
    return found if below is None else min(below, found)


def _most_pieces(problem: StageProblem) -> int:
    """Pieces up to which this is faster than CP-SAT, which is quick where blocks and devices are alike."""
    if len(set(problem.kinds)) > 1 or problem.device_of:
        return MOST_PIECES
    return MOST_OF_SEVERAL if _several_on_a_rank(problem) else MOST_ALIKE


def _several_on_a_rank(problem: StageProblem) -> bool:
    """Whether several chunks share the memory of a rank."""
    own = (row for row in problem.memory if row.capacity_bytes is None)
    return any(len({chunk for _, chunk, _ in row.terms}) > 1 for row in own)


def with_fitting_chunks(problem: StageProblem, below: int) -> StageProblem:
    """The problem with no larger chunks than a path below `below` leaves room for when all others are as small as
    they can be, and no smaller ones than all others being as large leaves to them."""
    if not problem.paths:
        return problem
    units, last, terms = len(problem.kinds), None, _terms_of(problem)
    while problem != last and all(a <= b for a, b in zip(problem.least, problem.most, strict=True)):
        last, most = problem, _most_below(problem, terms, below)
        least = [max(a, units - sum(most) + b) for a, b in zip(problem.least, most, strict=True)]
        problem = replace(problem, least=tuple(least), most=tuple(most))
    return problem


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """The terms of all paths: path, quantity, chunk and factor of each; and the forms of all quantities one after the
    other, where those of each quantity start."""

    path: Ints
    quantity: Ints
    chunk: Ints
    factor: Ints
    forms: tuple[Form, ...]
    first: Ints
    fixed: Ints  # [form, chunk], surcharges that are negative included


def _terms_of(problem: StageProblem) -> _Terms:
    every = [(number, *term) for number, row in enumerate(problem.paths) for term in row.terms]
    path, quantity, chunk, factor = np.array(every, dtype=np.int64).reshape(-1, 4).T
    forms = tuple(form for quantity in problem.quantities for form in quantity.forms)
    counts = np.array([len(quantity.forms) for quantity in problem.quantities], dtype=np.int64)
    less = [min(f.when_all, 0) + min(f.when_few, 0) + min((0, *f.when_none)) for f in forms]
    fixed = np.array([form.fixed for form in forms], dtype=np.int64) + np.array(less, dtype=np.int64)[:, None]
    first = np.cumsum(counts) - counts
    return _Terms(
        path=path, quantity=quantity, chunk=chunk, factor=factor, forms=forms, first=first, fixed=fixed
    )


def _most_below(problem: StageProblem, terms: _Terms, below: int) -> list[int]:
    """Units that each chunk may have in a deal below `below`."""
    starts = starts_of(len(problem.kinds), problem.least, problem.most)
    kinds = [tuple(sorted(set(problem.kinds[a.start : b.stop - 1]))) for a, b in pairwise(starts)]
    rate_of = {k: [_rate(form, k) for form in terms.forms] for k in dict.fromkeys(kinds)}
    rates = np.array([rate_of[k] for k in kinds], dtype=np.int64).T  # [form, chunk]
    fewest = np.array(problem.least, dtype=np.int64)
    # [quantity, chunk], of the fewest units, and of each further one
    least = np.maximum.reduceat(terms.fixed + rates * fewest, terms.first)
    each = np.minimum.reduceat(rates, terms.first)
    paths = len(problem.paths)
    taken, more = np.zeros(paths, dtype=np.int64), np.zeros((paths, problem.chunks), dtype=np.int64)
    np.add.at(taken, terms.path, terms.factor * least[terms.quantity, terms.chunk])
    np.add.at(more, (terms.path, terms.chunk), terms.factor * each[terms.quantity, terms.chunk])
    room = below - 1 - np.array([row.constant for row in problem.paths], dtype=np.int64) - taken
    further = np.where(more > 0, room[:, None] // np.maximum(more, 1), len(problem.kinds)).min(axis=0)
    return [int(n) for n in np.minimum(np.array(problem.most), fewest + further)]


def _rate(form: Form, kinds: tuple[int, ...]) -> int:
    """The least that a unit of these kinds adds to a form."""
    return min((min(form.kept[k], form.recomputed[k]) for k in kinds), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """S[c][row, i] as `least[which[row], i]`, as what is to come is the same for many rows."""

    least: Floats
    which: Ints

    def of_rows(self, starts: Sequence[int] | Ints) -> Floats:
        """[start, row]."""
        return np.asarray(self.least.T[starts][:, self.which])


def _least_left(layers: Sequence[Layer], units: int) -> list[Left]:
    """S[c]: the least that chunks from c on add to each row when they start at each unit."""
    after = np.full((1, units + 1), np.inf)
    after[:, units] = 0.0
    found = [Left(least=after, which=np.zeros(len(layers[0].which), dtype=np.int64))]
    for layer in reversed(layers):
        own, later, which = distinct_pairs(layer.which, found[-1].which)
        here = np.full((len(own), units + 1), np.inf)
        if len(layer.pieces.start):
            starts, first = np.unique(layer.pieces.start, return_index=True)
            sums = layer.table[own] + found[-1].least[later][:, layer.pieces.end]
            here[:, starts] = np.minimum.reduceat(sums, first, axis=1)
        found.append(Left(least=here, which=which))
    return found[::-1]


def _grow(
    layers: Sequence[Layer],
    left: Sequence[Left],
    limits: Floats,
    measured: Sequence[Measures],
    excluded: Sequence[Deal],
    most: int,
) -> tuple[tuple[Floats, list[Ints]] | None, int]:
    """Deals within the limits, the best one that is not excluded among them: the sums of their rows, and by chunk their
    pieces, None if they are more than `most` somewhere; and how many numbers were made."""
    sums, grown = np.zeros((1, len(limits))), 0
    at = np.zeros(1, dtype=np.int64)
    chosen: list[Ints] = []
    like = np.ones((1, len(excluded)), dtype=np.bool_)  # an excluded deal so far: rules out no other
    for chunk, (layer, after, measure) in enumerate(zip(layers, left[1:], measured, strict=True)):
        one = layer.pieces
        first = np.searchsorted(one.start, at, side="left")
        count = np.searchsorted(one.start, at, side="right") - first
        if int(count.sum()) * len(limits) > MOST_NUMBERS:
            return None, grown
        grown += int(count.sum()) * len(limits)
        parent = np.repeat(np.arange(len(at)), count)
        piece = np.arange(len(parent)) - np.repeat(np.cumsum(count) - count, count) + first[parent]
        total = sums[parent] + layer.table.T[piece][:, layer.which]
        kept = np.flatnonzero((total + after.of_rows(one.end[piece]) <= limits).all(axis=1))
        total, parent, piece = total[kept], parent[kept], piece[kept]
        sizes, again = (one.end - one.start)[piece, None], one.recomputed[piece, None]
        blocks = np.array([deal.blocks[chunk] for deal in excluded], dtype=np.int64)
        recomputed = np.array([deal.recomputed[chunk] for deal in excluded], dtype=np.int64)
        alike = like[parent] & (sizes == blocks) & (again == recomputed)
        best = undominated(one.end[piece], measure.of(total), alike.any(axis=1))
        if np.count_nonzero(best) > most:
            return None, grown
        sums, at, like = total[best], one.end[piece[best]], alike[best]
        chosen = [*(row[parent[best]] for row in chosen), piece[best]]
    return (sums, chosen), grown


def _best(
    problem: StageProblem,
    layers: Sequence[Layer],
    sums: Floats,
    chosen: list[Ints],
    excluded: Sequence[Deal],
) -> StageAnswer | None:
    """The best of the deals that is not excluded, the first of equals."""
    constants, pieces = np.array([row.constant for row in problem.paths]), [layer.pieces for layer in layers]
    values = (sums[:, : len(constants)] + constants).max(axis=1, initial=0.0)
    for row in np.argsort(values, kind="stable"):
        blocks = [int(one.end[p[row]] - one.start[p[row]]) for one, p in zip(pieces, chosen, strict=True)]
        recomputed = [int(one.recomputed[p[row]]) for one, p in zip(pieces, chosen, strict=True)]
        deal = Deal(blocks=tuple(blocks), recomputed=tuple(recomputed))
        if deal not in excluded:
            return StageAnswer(deal=deal, value=int(values[row]), bound=int(values[row]))
    return None
