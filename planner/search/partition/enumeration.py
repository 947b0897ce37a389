"""Stage problems by looking at every way to cut the layers that may be the best: exact, and often sooner done than by CP-SAT.

What a chunk needs depends on where it starts and ends, as long as no block of it is recomputed for memory's sake. So a row is a sum
of one number for each chunk, and the least that the chunks from c on add to it is known for every place where they may start
(dynamic programming, each row alone). Beginnings of cuts are laid side by side and made longer chunk by chunk; those of which some row
is too long, or holds too much, whatever follows, are dropped. Cuts that fit without recomputation need none, where it takes time,
unless they were simulated and did not fit: rows bound memory from below.
Others take no less than without it (or, where it saves copies to the host, than whatever is recomputed), and are asked for one by
one, the shortest first, as long as they lead. Numbers stay below 2^53, so that doubles are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from math import inf

import numpy as np

from autoparallel.planner.search.partition.problem import (
    Form,
    Partition,
    Quantity,
    Row,
    StageAnswer,
    StageProblem,
    most_amounts,
    recomputation_takes_time,
    starts_of,
)
from autoparallel.planner.search.space.meshes import Bools, Floats, Ints

MOST_PIECES = 40_000  # of chunks and where they start and end: some ten milliseconds. Kind: measured
MOST_NUMBERS = 400_000  # of beginnings of cuts and rows: likewise
MOST_ASKED = 8  # cuts of which blocks have to be recomputed that one look asks for. Kind: choice
EXACT = 2.0**53  # whole numbers that a double holds
Ask = Callable[[tuple[int, ...]], StageAnswer | None]


class TooMany(Exception):
    """There are too many cuts to look at."""


def can_be_cut(problem: StageProblem) -> bool:
    """Whether all cuts of a problem may be looked at: it is small enough, and more is left than what is recomputed."""
    if problem.chunks * (len(problem.kinds) + 1) ** 2 > MOST_PIECES:
        return False
    if problem.blocks is not None and problem.recompute and problem.recomputed is None:
        return False
    most, rows = most_amounts(problem), (*problem.paths, *problem.memory)
    return all(abs(r.constant) + sum(abs(n) * most[q][c] for q, c, n in r.terms) < EXACT for r in rows)


def best_of_all(
    problem: StageProblem,
    ask: Ask,
    excluded: Sequence[Partition] = (),
    below: int | None = None,
    *,
    fitted: bool = False,
) -> StageAnswer | None:
    """The best partition with a value below `below` that is not excluded; None where there is none. For problems that
    `can_be_cut`; raises `TooMany`. `ask` has the best partition, likewise, of so many blocks by chunk, some of which are
    recomputed. Where what is excluded `fitted`, its cuts are not asked for again with more recomputation."""
    again = problem.recomputed or (0,) * problem.chunks
    chooses = problem.recompute and problem.recomputed is None
    # Whether any cut may be better with some blocks recomputed.
    always = chooses and not recomputation_takes_time(problem)
    pieces = _pieces_of(problem.quantities, problem.kinds, again)
    cuts, value = _cuts_below(problem, pieces, inf if below is None else below, least=always, chooses=chooses)
    if not len(cuts):
        return None
    fits = np.zeros(len(cuts), dtype=np.bool_) if always else _fit(problem, pieces, cuts)
    open_ = fits.copy()
    for one in excluded:
        if one.recomputed == again:
            open_ &= (cuts[:, 1:] != np.cumsum(one.blocks)).any(axis=1)
    at = int(np.argmin(np.where(open_, value, inf)))
    found = None
    if open_[at]:
        blocks = tuple(np.diff(cuts[at]).tolist())
        found = StageAnswer(
            partition=Partition(blocks=blocks, recomputed=again),
            value=int(value[at]), bound=int(value[at]),
        )  # fmt: skip
    if not chooses:
        return found
    asked = ~fits if fitted else ~open_
    return _with_recomputation(cuts[asked], value[asked], ask, found)


def _with_recomputation(cuts: Ints, value: Floats, ask: Ask, found: StageAnswer | None) -> StageAnswer | None:
    """The better one of `found` and of what is `ask`ed for of cuts that take no less than their `value`."""
    asked = [inf]  # bounds of cuts that were not decided
    for n, at in enumerate(np.argsort(value, kind="stable").tolist()):
        if found is not None and value[at] >= found.value:
            break
        if n == MOST_ASKED:
            asked.append(value[at])
            break
        answer = ask(tuple(np.diff(cuts[at]).tolist()))
        if answer is None:
            continue
        asked.append(max(answer.bound, value[at]))
        if answer.partition is not None and (found is None or answer.value < found.value):
            found = answer
    bound = min(asked)
    if found is None:
        return None if bound == inf else StageAnswer(partition=None, value=int(bound), bound=int(bound))
    return StageAnswer(partition=found.partition, value=found.value, bound=int(min(found.value, bound)))


def _cuts_below(
    problem: StageProblem, pieces: _Pieces, below: float, *, least: bool, chooses: bool
) -> tuple[Ints, Floats]:
    """Where the chunks of each partition start and where the last one ends, [cut, chunk + 1], of those that take less than
    `below` and may fit; and what they take. `least` speaks of time, `chooses` of memory: whatever is recomputed."""
    rows = [*problem.paths, *problem.memory]
    room = np.array([below - 0.5] * len(problem.paths) + [problem.room(row) for row in problem.memory])
    ways = _ways(problem)
    each = [
        np.concatenate(
            [
                pieces.rows(problem.paths, chunk, *found, least=least),
                pieces.rows(problem.memory, chunk, *found, least=chooses),
            ]
        )
        for chunk, found in enumerate(map(np.nonzero, ways))
    ]  # [chunk][row, piece]
    # From the last chunk back: what is added at least, [row, start].
    after = [np.zeros((len(rows), len(problem.kinds) + 1))]
    for chunk in range(problem.chunks - 1, 0, -1):
        start, end = np.nonzero(ways[chunk])
        more, own = each[chunk] + after[-1][:, end], np.full_like(after[-1], inf)
        if len(start):
            firsts = np.flatnonzero(np.diff(start, prepend=-1))  # pieces are ordered by where they start
            own[:, start[firsts]] = np.minimum.reduceat(more, firsts, axis=1)
        after.append(own)
    after.reverse()
    cuts, sums = np.zeros((1, 1), dtype=np.int64), np.array([[float(row.constant) for row in rows]])
    for chunk in range(problem.chunks):
        which, end = np.nonzero(ways[chunk][cuts[:, -1]])
        if len(which) * max(len(rows), 1) > 16 * MOST_NUMBERS:
            raise TooMany
        number = np.cumsum(ways[chunk]).reshape(ways[chunk].shape) - 1  # of a piece, by its start and end
        longer = sums[which] + each[chunk][:, number[cuts[which, -1], end]].T
        open_ = (longer + after[chunk][:, end].T <= room).all(axis=1)
        if np.count_nonzero(open_) * max(len(rows), 1) > MOST_NUMBERS:
            raise TooMany
        cuts = np.concatenate([cuts[which[open_]], end[open_, None]], axis=1)
        sums = longer[open_]
    return cuts, sums[:, : len(problem.paths)].max(axis=1, initial=0.0)


def _ways(problem: StageProblem) -> list[Bools]:
    """Of each chunk, whether it may start and end there, [start, end]."""
    if problem.blocks is not None:
        places = [range(n, n + 1) for n in np.cumsum([0, *problem.blocks]).tolist()]
    else:
        places = starts_of(len(problem.kinds), problem.least, problem.most)
    every = np.arange(len(problem.kinds) + 1)
    blocks = every[None, :] - every[:, None]
    found = []
    for chunk, (start, end) in enumerate(pairwise(places)):
        here = (blocks >= max(problem.least[chunk], 0)) & (blocks <= problem.most[chunk])
        if problem.recomputed is not None:
            here &= blocks >= problem.recomputed[chunk]
        here &= np.isin(every, start)[:, None] & np.isin(every, end)[None, :]
        found.append(here)
    return found


def _fit(problem: StageProblem, pieces: _Pieces, cuts: Ints) -> Bools:
    """Which cuts have room in every memory without further recomputation."""
    rows = problem.memory
    held = np.array([[float(row.constant)] for row in rows]).reshape(len(rows), 1)
    for chunk in range(problem.chunks):
        held = held + pieces.rows(rows, chunk, cuts[:, chunk], cuts[:, chunk + 1], least=False)
    room = np.array([[problem.room(row)] for row in rows]).reshape(len(rows), 1)
    return np.broadcast_to((held <= room).all(axis=0), len(cuts)).copy()


@lru_cache(maxsize=4)  # one problem is solved again and again, with more paths each time
def _pieces_of(quantities: tuple[Quantity, ...], kinds: tuple[int, ...], again: tuple[int, ...]) -> _Pieces:
    return _Pieces(quantities, kinds, again)


class _Pieces:
    """What a chunk needs by where it starts and ends, [start, end], added up once: with its first `again` blocks recomputed, or the
    least of whatever is."""

    def __init__(
        self, quantities: tuple[Quantity, ...], kinds: tuple[int, ...], again: tuple[int, ...]
    ) -> None:
        self._quantities, self._again = quantities, again
        self._kinds = np.array(kinds, dtype=np.int64)
        every = np.arange(len(kinds) + 1)
        self._start, self._end = every[:, None], every[None, :]
        self._blocks = np.maximum(self._end - self._start, 0)
        self._known: dict[tuple[int, int, bool], Floats] = {}

    def rows(self, rows: Sequence[Row], chunk: int, start: Ints, end: Ints, *, least: bool) -> Floats:
        """What pieces add to rows as that chunk, [row, piece]."""
        found: dict[int, list[tuple[int, int]]] = {}
        for number, row in enumerate(rows):
            for q, c, factor in row.terms:
                if c == chunk:
                    found.setdefault(q, []).append((number, factor))
        if not found:
            return np.zeros((len(rows), len(start)))
        factors = np.zeros((len(rows), len(found)))
        for at, terms in enumerate(found.values()):
            for number, factor in terms:
                factors[number, at] += factor
        amounts = np.stack([self._of(q, chunk, least=least)[start, end] for q in found])
        return np.asarray(factors @ amounts)

    def _of(self, q: int, chunk: int, *, least: bool) -> Floats:
        if (q, chunk, least) not in self._known:
            form = self._least if least else self._kept
            forms = [form(one, chunk) for one in self._quantities[q].forms]
            self._known[q, chunk, least] = np.asarray(np.max(forms, axis=0), dtype=np.float64)
        found: Floats = self._known[q, chunk, least]
        return found

    def _kept(self, form: Form, chunk: int) -> Floats:
        return self._with(form, chunk, np.minimum(self._again[chunk], self._blocks))

    def _least(self, form: Form, chunk: int) -> Floats:
        none, all_ = (
            self._with(form, chunk, np.zeros_like(self._blocks)),
            self._with(form, chunk, self._blocks),
        )
        at_least = np.minimum(none, all_ - max(form.when_all, 0) * (self._blocks > 0))
        return np.asarray(at_least - max(-form.when_all, 0), dtype=np.float64)

    def _with(self, form: Form, chunk: int, again: Ints) -> Floats:
        """`problem.piece_amount` of one form."""
        start, end, blocks = self._start, self._end, self._blocks
        kept, recomputed = (
            np.concatenate([[0], np.cumsum(np.array(each, dtype=np.int64)[self._kinds])])
            for each in (form.kept, form.recomputed)
        )
        turn = start + again
        found = form.fixed[chunk] + recomputed[turn] - recomputed[start] + kept[end] - kept[turn]
        found = found + form.when_all * ((blocks == again) & (blocks > 0)) + form.when_few * (blocks <= 1)
        if form.when_none:
            found = found + form.when_none[chunk] * (blocks == 0)
        if form.last:
            last = np.array(form.last, dtype=np.int64)[self._kinds[np.maximum(end - 1, 0)]]
            found = found + np.where(blocks > 0, last, 0)
        if form.after:
            found = found + np.array(form.after, dtype=np.int64)[end]
        return np.asarray(found, dtype=np.float64)
