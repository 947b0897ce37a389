"""The stage problem as data: quantities per chunk, rows over them, and partitions of blocks to chunks.

What a partition needs is computed here without a solver; `planner/search/partition/solve.py` says what the problem means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate
from math import ceil


class Q(IntEnum):
    """The quantities of a chunk: seconds of its actions, then bytes."""

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3
    LAST_BACKWARD = 4
    LAST_BACKWARD_WEIGHT = 5
    END = 6  # the last backward and what is then left of the reduction
    END_WEIGHT = 7  # likewise the last weight gradients
    STEP = 8
    SEND = 9
    TIED = 10  # the exchange of gradients of tied tensors
    REDUCE = 11  # what is left of the reduction after the last backward, alone
    REDUCE_AFTER_WEIGHT = 12  # likewise after the last weight gradients
    UPDATED = 13  # what a first forward waits for of updated parameters that are gathered beside it
    STATE = 14
    SAVED = 15
    WEIGHT_SAVED = 16
    FORWARD_PEAK = 17
    BACKWARD_PEAK = 18
    WEIGHT_PEAK = 19
    HOST_STATE = 20  # in the memory of the host: of the optimizer, and of one micro-batch
    HOST_SAVED = 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A sum over a chunk's blocks, in integers: per kind of block kept or recomputed, per chunk besides,
    `when_all` more where the chunk recomputes every block, `when_few` more where it has one or none,
    `when_none[chunk]` more where it has none, `last[kind]`, not negative, more by the kind of its last block, and
    `after[n]`, not negative, more where it ends after n of all blocks."""

    kept: tuple[int, ...]
    recomputed: tuple[int, ...]
    fixed: tuple[int, ...]
    when_all: int = 0
    when_few: int = 0
    when_none: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """What a chunk needs of one thing: the largest of its forms."""

    forms: tuple[Form, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A linear form: sum of coefficient * quantity of a chunk, plus a constant. Terms: (quantity, chunk, factor)."""

    terms: tuple[tuple[int, int, int], ...]
    constant: int = 0
    capacity_bytes: int | None = None  # of a memory that is not the devices' own


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Blocks per chunk, and of these how many are recomputed in full."""

    blocks: tuple[int, ...]
    recomputed: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProblem:
    """Kinds of the repeated blocks in model order, quantities, and the rows over them."""

    kinds: tuple[int, ...]
    chunks: int
    quantities: tuple[Quantity, ...]
    paths: tuple[Row, ...]  # each <= T
    memory: tuple[Row, ...]  # each <= capacity_bytes, or its own
    capacity_bytes: int
    recompute: bool  # whether blocks may be recomputed one by one
    least: tuple[int, ...]  # blocks that each chunk must have
    most: tuple[int, ...]  # and may have
    blocks: tuple[int, ...] | None = None  # fixed by the user
    recomputed: tuple[int, ...] | None = None
    likely: tuple[int, ...] | None = None  # blocks per chunk that are tried first; even ones if None
    device_of: tuple[int, ...] = ()  # over unlike devices: by chunk, which device's quantities it takes

    def with_paths(self, rows: Sequence[Row]) -> StageProblem:
        """The problem with further paths."""
        return replace(self, paths=(*self.paths, *(row for row in rows if row not in self.paths)))

    @property
    def terms(self) -> int:
        """Terms of all rows: what the work on a problem grows with."""
        return sum(len(row.terms) for row in (*self.paths, *self.memory))

    @property
    def each_device(self) -> int:
        """How many quantities each device has."""
        return len(self.quantities) // (max(self.device_of, default=0) + 1)

    def quantity(self, number: int, chunk: int) -> Quantity:
        """A quantity as the device has it that a chunk stands on."""
        return self.quantities[number + self.each_device * (self.device_of[chunk] if self.device_of else 0)]

    def room(self, row: Row) -> int:
        """What a row of memory may come to."""
        return self.capacity_bytes if row.capacity_bytes is None else row.capacity_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAnswer:
    """The best partition of a stage problem; no partition is below `bound` (equal to `value` when proved). Where the solver
    found none in its time there is only the bound."""

    partition: Partition | None
    value: int
    bound: int


def starts_of(groups: int, least: Sequence[int], most: Sequence[int]) -> list[range]:
    """Where each chunk may start, and where the last one ends, if each has `least` to `most` of so many layer groups in order."""
    low, high = list(accumulate(least, initial=0)), list(accumulate(most, initial=0))
    return [
        range(max(a, groups - (high[-1] - b)), min(b, groups - (low[-1] - a)) + 1)
        for a, b in zip(low, high, strict=True)
    ]


def most_amounts(problem: StageProblem) -> list[list[int]]:
    """For each quantity and chunk, no less than any partition makes of it."""
    spare = max(len(problem.kinds) - sum(problem.least), 0)
    blocks = [min(least + spare, most) for least, most in zip(problem.least, problem.most, strict=True)]
    kinds = sorted(set(problem.kinds))
    found = []
    for quantity in problem.quantities:
        chunks = [0] * problem.chunks
        for form in quantity.forms:
            rate = max((max(form.kept[k], form.recomputed[k], 0) for k in kinds), default=0)
            more = max(form.when_all, 0) + max(form.when_few, 0) + max((0, *form.when_none))
            more += max((0, *form.last)) + max((0, *form.after))
            most = (abs(fixed) + more + rate * n for fixed, n in zip(form.fixed, blocks, strict=True))
            chunks = list(map(max, chunks, most))
        found.append(chunks)
    return found


def without_idle_rows(problem: StageProblem) -> StageProblem:
    """The problem without the moments in which no partition has too many bytes."""
    most = most_amounts(problem)
    binding = tuple(
        row
        for row in problem.memory
        if row.constant + sum(factor * most[q][c] for q, c, factor in row.terms) > problem.room(row)
    )
    return replace(problem, memory=binding)


def without_needless_recomputation(problem: StageProblem) -> StageProblem:
    """The problem with nothing recomputed, where every partition fits without it and it only takes time."""
    if not problem.recompute or problem.recomputed is not None or without_idle_rows(problem).memory:
        return problem
    return replace(problem, recompute=False) if recomputation_takes_time(problem) else problem


def recomputation_takes_time(problem: StageProblem) -> bool:
    """Whether no path is shorter for what is recomputed."""
    on_paths = dict.fromkeys(quantity for row in problem.paths for quantity, _, _ in row.terms)
    forms = [form for quantity in on_paths for form in problem.quantities[quantity].forms]
    longer = all(
        form.when_all >= 0 and all(a <= b for a, b in zip(form.kept, form.recomputed, strict=True))
        for form in forms
    )
    least = min((factor for row in problem.paths for _, _, factor in row.terms), default=0)
    return longer and least >= 0


def with_less_room(problem: StageProblem, home: Sequence[int], lacking: Sequence[float]) -> StageProblem:
    """The problem with so many bytes less on each rank that lacks some; `home` is the rank of each chunk."""
    rows = [
        row
        if row.capacity_bytes is not None
        else replace(row, constant=row.constant + max(ceil(lacking[home[row.terms[0][1]]]), 0))
        for row in problem.memory
    ]
    return replace(problem, memory=tuple(rows))


def chunk_amount(problem: StageProblem, quantity: Quantity, partition: Partition, chunk: int) -> int:
    """What `chunk` needs of `quantity` under a partition."""
    start = sum(partition.blocks[:chunk])
    return piece_amount(
        problem, quantity, chunk, range(start, start + partition.blocks[chunk]), partition.recomputed[chunk]
    )


def piece_amount(
    problem: StageProblem, quantity: Quantity, chunk: int, blocks: range, recomputed: int
) -> int:
    """What `chunk` needs of `quantity` where it holds these blocks, the first `recomputed` of them recomputed."""
    kinds, k = problem.kinds[blocks.start : blocks.stop], recomputed
    return max(
        form.fixed[chunk]
        + _total(form.recomputed, kinds[:k])
        + _total(form.kept, kinds[k:])
        + (form.when_all if k == len(kinds) > 0 else 0)
        + (form.when_few if len(kinds) <= 1 else 0)
        + (form.when_none[chunk] if form.when_none and not kinds else 0)
        + (form.last[kinds[-1]] if form.last and kinds else 0)
        + (form.after[blocks.stop] if form.after else 0)
        for form in quantity.forms
    )


def _total(each: tuple[int, ...], kinds: tuple[int, ...]) -> int:
    """What blocks of these kinds take together."""
    return each[0] * len(kinds) if len(each) == 1 else sum(map(each.__getitem__, kinds))


def merged(terms: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Terms of a row with the factors of equal ones added up."""
    total: dict[tuple[int, int], int] = {}
    for quantity, chunk, count in terms:
        total[quantity, chunk] = total.get((quantity, chunk), 0) + count
    return tuple((q, c, n) for (q, c), n in total.items() if n)


def row_values(problem: StageProblem, rows: Sequence[Row], partition: Partition) -> Iterator[int]:
    """The values of rows under a partition; what a chunk needs is added up once."""
    known: dict[tuple[int, int], int] = {}
    for row in rows:
        value = row.constant
        for q, c, factor in row.terms:
            if (q, c) not in known:
                known[q, c] = chunk_amount(problem, problem.quantities[q], partition, c)
            value += factor * known[q, c]
        yield value


def partition_fits(problem: StageProblem, partition: Partition) -> bool:
    """Whether a partition respects every constraint of the model, without a solver."""
    return (
        len(partition.blocks) == problem.chunks
        and sum(partition.blocks) == len(problem.kinds)
        and all(a <= n <= b for a, n, b in zip(problem.least, partition.blocks, problem.most, strict=True))
        and all(0 <= k <= n for n, k in zip(partition.blocks, partition.recomputed, strict=True))
        and (problem.recompute or problem.recomputed is not None or not any(partition.recomputed))
        and problem.blocks in (None, partition.blocks)
        and problem.recomputed in (None, partition.recomputed)
        and all(
            value <= problem.room(row)
            for row, value in zip(problem.memory, row_values(problem, problem.memory, partition), strict=True)
        )
    )


def partition_value(problem: StageProblem, partition: Partition) -> int:
    """The longest of the paths under a partition: what the model minimises."""
    return max(row_values(problem, problem.paths, partition), default=0)


def has_choice(problem: StageProblem) -> bool:
    """Whether a stage problem has more than one partition."""
    spare = len(problem.kinds) > sum(problem.least) and problem.chunks > 1 and problem.blocks is None
    return spare or (problem.recompute and problem.recomputed is None)
