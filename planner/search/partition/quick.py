"""Partitions found without a solver: blocks as even as can be, or balanced, and recomputed until they fit."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from heapq import heapify, heappop, heappush

from autoparallel.planner.search.partition.problem import (
    Partition,
    Q,
    Row,
    StageProblem,
    chunk_amount,
    partition_fits,
    partition_value,
    piece_amount,
)


def even_partition(blocks: int, chunks: int) -> Partition:
    """Blocks as even as can be, none recomputed one by one; the middle chunks take one more, as the first and
    the last one carry the ends of the model."""
    if blocks < chunks:  # the ends of the model fill a first and a last chunk
        ends = (0, chunks - 1)[: chunks - blocks]
        return Partition(blocks=tuple(int(c not in ends) for c in range(chunks)), recomputed=(0,) * chunks)
    each, more = divmod(blocks, chunks)
    middle = sorted(range(chunks), key=lambda c: (c in (0, chunks - 1), c))[:more]
    return Partition(blocks=tuple(each + (c in middle) for c in range(chunks)), recomputed=(0,) * chunks)


def even_blocks(problem: StageProblem) -> tuple[int, ...]:
    """Blocks as even as a stage problem allows."""
    even = even_partition(len(problem.kinds), problem.chunks).blocks
    if all(a <= n <= b for a, n, b in zip(problem.least, even, problem.most, strict=True)):
        return even
    blocks, ends = list(problem.least), (0, problem.chunks - 1)
    for _ in range(len(problem.kinds) - sum(blocks)):
        open_ = [c for c, n in enumerate(blocks) if n < problem.most[c]]
        if not open_:
            break
        blocks[min(open_, key=lambda c: (blocks[c], c in ends, c))] += 1
    return tuple(blocks)


def proportional(shares: Sequence[float], least: Sequence[int], most: Sequence[int]) -> tuple[int, ...]:
    """Whole numbers of blocks in proportion to `shares`, which sum to all blocks, within what each chunk may have."""
    found = [min(max(round(share), a), b) for share, a, b in zip(shares, least, most, strict=True)]
    while (spare := round(sum(shares)) - sum(found)) != 0:
        step = 1 if spare > 0 else -1
        room = [c for c, n in enumerate(found) if least[c] <= n + step <= most[c]]
        if not room:
            break
        nearest = max(room, key=lambda c: step * (shares[c] - found[c]))
        found[nearest] += step
    return tuple(found)


def balanced_ranks(problem: StageProblem, home: Sequence[int]) -> tuple[int, ...]:
    """Blocks such that the busiest rank takes least time forward and backward, each on its own devices and a block as long as all are
    on average: one after the other goes to the rank that ends first with it, to the chunk of it that has fewest, later ones
    first, as these keep fewer micro-batches. `home` is the rank of each chunk."""
    shares = {kind: count / len(problem.kinds) for kind, count in Counter(problem.kinds).items()}
    block_s, spent = [0.0] * problem.chunks, dict.fromkeys(home, 0.0)
    for chunk in range(problem.chunks):
        for passed in (Q.FORWARD, Q.BACKWARD):
            form = problem.quantity(passed, chunk).forms[0]
            block_s[chunk] += sum(form.kept[kind] * share for kind, share in shares.items())
            spent[home[chunk]] += form.fixed[chunk]
    blocks = list(problem.least)
    for chunk, rank in enumerate(home):
        spent[rank] += blocks[chunk] * block_s[chunk]
    chunks_of = {rank: [c for c, home_c in enumerate(home) if home_c == rank] for rank in spent}

    def ends(rank: int) -> Iterator[tuple[float, int, int]]:
        """When the rank ends with one more block, in each chunk that may have it."""
        return (
            (spent[rank] + block_s[c], blocks[c], -c) for c in chunks_of[rank] if blocks[c] < problem.most[c]
        )

    open_ = [min(found) for rank in chunks_of if (found := list(ends(rank)))]
    heapify(open_)
    for _ in range(len(problem.kinds) - sum(blocks)):
        if not open_:
            break
        chunk = -heappop(open_)[2]
        blocks[chunk] += 1
        spent[home[chunk]] += block_s[chunk]
        if found := list(ends(home[chunk])):
            heappush(open_, min(found))
    return tuple(blocks)


def quick_partition(problem: StageProblem) -> Partition | None:
    """An even partition, or a balanced one where blocks are unlike, with blocks recomputed, chunk by chunk in
    proportion to what a rank lacks; None if that does not fit (another partition may)."""
    tried = [problem.blocks or problem.likely or even_blocks(problem)]
    if tried[0] not in (problem.blocks, problem.likely) and len(set(problem.kinds)) > 1:
        tried.append(balanced_blocks(problem) or tried[0])
    found = _fitting(problem, tried)
    if not found and problem.blocks is None and problem.recompute and problem.recomputed is None:
        found = _fitting(problem, [balanced_blocks(problem, again=True) or tried[0]])
    return min(found, key=lambda partition: partition_value(problem, partition), default=None)


def _fitting(problem: StageProblem, tried: Sequence[tuple[int, ...]]) -> list[Partition]:
    """Partitions of these blocks that fit, with as many recomputed as that takes."""
    found = []
    for blocks in dict.fromkeys(tried):
        partition = Partition(blocks=blocks, recomputed=problem.recomputed or (0,) * problem.chunks)
        if problem.recompute and problem.recomputed is None:
            partition = recomputed_until_fit(problem, partition)
        if partition_fits(problem, partition):
            found.append(partition)
    return found


def balanced_blocks(problem: StageProblem, *, again: bool = False) -> tuple[int, ...] | None:
    """Blocks such that the longest chunk takes least time forward and backward and nothing (with `again` everything) is
    recomputed, as far as single chunks fill a rank; of equal ones the last chunks have most, as the first ones hold
    most micro-batches. None where there is no such partition."""
    passes = [problem.quantities[q].forms[0] for q in (Q.FORWARD, Q.BACKWARD)]
    each = [sum(form.kept[kind] for form in passes) for kind in problem.kinds]
    fixed = [sum(form.fixed[c] for form in passes) for c in range(problem.chunks)]
    most = _most_kept(problem, again=again)
    low, high = 0, sum(each) + sum(map(abs, fixed)) + 1
    best = _filled_from_behind(problem, each, fixed, most, high)
    while best is not None and high - low > max(high // 1000, 1):
        middle = (low + high) // 2
        found = _filled_from_behind(problem, each, fixed, most, middle)
        low, high, best = (low, middle, found) if found is not None else (middle, high, best)
    return best


def _most_kept(problem: StageProblem, *, again: bool) -> Callable[[int, int], int]:
    """The most blocks that a chunk holds without recomputing, or recomputing all (`again`), by chunk and where they end."""
    rows: dict[int, list[Row]] = {}
    for row in problem.memory:
        chunks = {chunk for _, chunk, _ in row.terms}
        if len(chunks) == 1:
            rows.setdefault(chunks.pop(), []).append(row)

    @cache
    def most(chunk: int, end: int) -> int:
        def fits(count: int) -> bool:
            here = range(end - count, end)
            return all(
                row.constant
                + sum(
                    n * piece_amount(problem, problem.quantities[q], c, here, count * again)
                    for q, c, n in row.terms
                )
                <= problem.room(row)
                for row in rows.get(chunk, ())
            )

        # From the second one on each block takes more than nothing; the first takes the place of what a chunk of few has.
        limit = min(problem.most[chunk], end)
        if limit and not fits(1):
            return 0
        found = bisect_left(range(2, limit + 1), True, key=lambda count: not fits(count)) + 1
        return problem.most[chunk] if found >= limit else found

    return most


def _filled_from_behind(
    problem: StageProblem,
    each: Sequence[int],
    fixed: Sequence[int],
    most: Callable[[int, int], int],
    longest: int,
) -> tuple[int, ...] | None:
    """Every chunk, from the last one on, with as many blocks as it keeps and as take no longer; None where some are left."""
    blocks, left, needed = [0] * problem.chunks, len(each), sum(problem.least)
    for chunk in range(problem.chunks - 1, -1, -1):
        needed -= problem.least[chunk]
        taken, spent, room = 0, fixed[chunk], min(problem.most[chunk], most(chunk, left), left - needed)
        while taken < room and spent + each[left - taken - 1] <= longest:
            spent += each[left - taken - 1]
            taken += 1
        if taken < problem.least[chunk]:
            return None
        blocks[chunk], left = taken, left - taken
    return tuple(blocks) if not left else None


def recomputed_until_fit(problem: StageProblem, partition: Partition) -> Partition:
    """Raise each chunk's number of recomputed blocks until every row over it fits, or nothing is left."""
    chunks_of = [sorted({chunk for _, chunk, _ in row.terms}) for row in problem.memory]
    most, known = list(partition.blocks), dict[tuple[int, int, int], int]()

    def fits(row: Row, partition: Partition) -> bool:
        return _weight(problem, row.terms, partition, known) + row.constant <= problem.room(row)

    for row, chunks in zip(problem.memory, chunks_of, strict=True):
        if fits(row, partition):
            continue
        low, high = 1, sum(most[c] - partition.recomputed[c] for c in chunks)
        while (
            low < high
        ):  # the fewest further blocks, divided round the row's chunks, with which the row fits
            middle = (low + high) // 2
            if fits(row, _with_more(partition, chunks, middle)):
                high = middle
            else:
                low = middle + 1
        partition = _with_more(partition, chunks, low)
    return partition


def _with_more(partition: Partition, chunks: list[int], more: int) -> Partition:
    recomputed = list(partition.recomputed)
    while more:
        for chunk in chunks:
            if more and recomputed[chunk] < partition.blocks[chunk]:
                recomputed[chunk] += 1
                more -= 1
        if all(recomputed[c] == partition.blocks[c] for c in chunks):
            break
    return replace(partition, recomputed=tuple(recomputed))


def _weight(
    problem: StageProblem,
    terms: tuple[tuple[int, int, int], ...],
    partition: Partition,
    known: dict[tuple[int, int, int], int],
) -> int:
    """A row's sum; `known` has what was added up before, by quantity, chunk and its recomputed blocks."""
    total = 0
    for q, c, factor in terms:
        key = (q, c, partition.recomputed[c])
        if key not in known:
            known[key] = chunk_amount(problem, problem.quantities[q], partition, c)
        total += factor * known[key]
    return total
