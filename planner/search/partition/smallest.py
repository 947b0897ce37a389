"""Where memory is short: a partition that fits, sought by moving single blocks off ranks that hold too much."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

from autoparallel.planner.search.partition.problem import (
    Partition,
    StageProblem,
    partition_fits,
    piece_amount,
    without_idle_rows,
)
from autoparallel.planner.search.partition.quick import (
    balanced_blocks,
    even_blocks,
    recomputed_until_fit,
)
from autoparallel.planner.search.partition.relaxation import relaxed_bound_s

MOST_MOVES = 64  # of single blocks. Kind: choice
MOST_PAIRS = (
    256  # of chunks that a block may go from and to; with more of them it only goes to the next. Kind: choice
)
PER_AMOUNT = 0.004  # milliseconds for what a chunk needs of one quantity. Kind: measured


def smallest_partition(problem: StageProblem, spend: Callable[[float], None]) -> Partition | None:
    """A partition that fits, with no more recomputed than that takes; None where moving single blocks leads to none, everything
    (or what is fixed) recomputed (others may fit). `spend` is told how much work it was, about milliseconds."""
    if problem.blocks is not None:
        return None
    spend(PER_AMOUNT * sum(len(row.terms) for row in problem.memory))
    if relaxed_bound_s(problem, ()) is None:
        return None
    search = _Search(problem=without_idle_rows(problem))
    begins = even_blocks(problem), balanced_blocks(problem, again=problem.recompute)
    found = None
    for blocks in dict.fromkeys(one for one in begins if one is not None):
        found = found or search.emptied(blocks)
    spend(PER_AMOUNT * len(search.known))
    if found is None or not partition_fits(problem, found):
        return None
    if problem.recomputed is not None:
        return found
    fewer = recomputed_until_fit(problem, replace(found, recomputed=(0,) * problem.chunks))
    return fewer if partition_fits(problem, fewer) else found


@dataclass(slots=True, kw_only=True, eq=False)
class _Search:
    """Moves of single blocks between chunks; what chunks need, by quantity, chunk, first block and number of them."""

    problem: StageProblem
    known: dict[tuple[int, int, int, int], int] = field(default_factory=dict)

    def emptied(self, blocks: tuple[int, ...]) -> Partition | None:
        """From these blocks on a partition that fits, by moves that each leave less too much; None where there is no such move."""
        over = self._over(blocks)
        for _ in range(MOST_MOVES):
            if not any(over):
                return Partition(blocks=blocks, recomputed=tuple(map(self._recomputed, count(), blocks)))
            tried = [(_worth(self._over(one)), one) for one in self._moved(blocks, over)]
            worth, best = min(tried, default=(_worth(over), blocks))
            if worth >= _worth(over):
                return None
            blocks, over = best, self._over(best)
        return None

    def _over(self, blocks: tuple[int, ...]) -> list[int]:
        """By chunk, the most bytes that a moment in which it holds something is above what there is room for."""
        over, begins = [0] * self.problem.chunks, [0]
        for number in blocks:
            begins.append(begins[-1] + number)
        for row in self.problem.memory:
            value = row.constant - self.problem.room(row)
            value += sum(factor * self._amount(q, c, begins[c], blocks[c]) for q, c, factor in row.terms)
            if value > 0:
                for _, chunk, _ in row.terms:
                    over[chunk] = max(over[chunk], value)
        return over

    def _amount(self, quantity: int, chunk: int, begin: int, number: int) -> int:
        key = (quantity, chunk, begin, number)
        if key not in self.known:
            problem, again = self.problem, self._recomputed(chunk, number)
            here = range(begin, begin + number)
            self.known[key] = piece_amount(problem, problem.quantities[quantity], chunk, here, again)
        return self.known[key]

    def _recomputed(self, chunk: int, number: int) -> int:
        """How many of so many blocks of a chunk are recomputed: all that may be."""
        if self.problem.recomputed is not None:
            return self.problem.recomputed[chunk]
        return number if self.problem.recompute else 0

    def _moved(self, blocks: tuple[int, ...], over: list[int]) -> Iterator[tuple[int, ...]]:
        """Blocks with one of a chunk that is too full in another."""
        problem = self.problem
        full = [c for c in range(problem.chunks) if over[c] and blocks[c] > problem.least[c]]
        open_ = [c for c in range(problem.chunks) if blocks[c] < problem.most[c]]
        near = len(full) * len(open_) > MOST_PAIRS
        for off in full:
            for to in open_:
                if to != off and (not near or abs(off - to) == 1):
                    moved = list(blocks)
                    moved[off] -= 1
                    moved[to] += 1
                    yield tuple(moved)


def _worth(over: list[int]) -> tuple[int, int]:
    """What moves make less: the sum over all chunks, then the most of one."""
    return sum(over), max(over)
