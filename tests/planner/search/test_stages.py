"""The stage problem: each constraint just fits and just does not, and brute force finds no better partition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel.planner.search.improve.partitions import moves
from autoparallel.planner.search.partition import enumeration
from autoparallel.planner.search.partition.peaks import last_kinds
from autoparallel.planner.search.partition.problem import (
    Form,
    Partition,
    Quantity,
    Row,
    StageProblem,
    partition_fits,
    partition_value,
    row_values,
    with_less_room,
    without_needless_recomputation,
)
from autoparallel.planner.search.partition.quick import balanced_blocks, balanced_ranks
from autoparallel.planner.search.partition.smallest import smallest_partition
from autoparallel.planner.search.partition.solve import solve_stages

SECONDS, BYTES = 0, 1


def problem_of(
    kinds: tuple[int, ...], chunks: int, *, capacity: int = 10**9, recompute: bool = True, ends: int = 1
) -> StageProblem:
    """Every chunk on its own rank, weighed like a pipeline: earlier chunks keep more micro-batches."""
    sides = (3, *(0,) * (chunks - 2), 9) if chunks > 1 else (12,)
    computing = Form(kept=(10, 17), recomputed=(14, 22), fixed=sides)
    sending = Form(
        kept=(12, 12),
        recomputed=(12, 12),
        fixed=(5,) * chunks,
        when_none=(-4,) * chunks,
        when_few=2,
        last=(0, 3),
        after=tuple(3 * n % 5 for n in range(len(kinds) + 1)),
    )
    seconds = Quantity(forms=(computing, sending))
    bytes_ = Quantity(
        forms=(
            Form(kept=(8, 5), recomputed=(2, 1), fixed=(1,) * chunks, when_all=3, when_few=-4),
            Form(kept=(7, 2), recomputed=(3, 1), fixed=(0,) * chunks, last=(1, 9)),
        )
    )
    return StageProblem(
        kinds=kinds, chunks=chunks, quantities=(seconds, bytes_), capacity_bytes=capacity, recompute=recompute,
        least=(ends, *(1,) * (chunks - 2), ends) if chunks > 1 else (1,),
        most=(len(kinds),) * chunks,
        paths=tuple(
            Row(terms=(*((SECONDS, b, 1) for b in range(c)), (SECONDS, c, 4)), constant=c) for c in range(chunks)
        ),
        memory=tuple(Row(terms=((BYTES, c, chunks - c),), constant=2) for c in range(chunks)),
    )  # fmt: skip


def partitions(problem: StageProblem) -> Iterator[Partition]:
    n = len(problem.kinds)
    for blocks in product(range(n + 1), repeat=problem.chunks):
        if sum(blocks) == n:
            for recomputed in product(*(range(b + 1) for b in blocks)):
                partition = Partition(blocks=blocks, recomputed=recomputed)
                if partition_fits(problem, partition):
                    yield partition


@settings(max_examples=60)
@given(
    kinds=st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple),
    chunks=st.integers(1, 3), capacity=st.one_of(st.integers(4, 120), st.just(1000)), recompute=st.booleans(),
    one_kind=st.booleans(), ends=st.integers(0, 1), by_cp_sat=st.booleans(), faster=st.booleans(),
)  # fmt: skip
def test_no_partition_is_better_than_the_solvers(
    kinds: tuple[int, ...],
    chunks: int,
    capacity: int,
    recompute: bool,
    one_kind: bool,
    ends: int,
    by_cp_sat: bool,
    faster: bool,
) -> None:
    """Either solver; with recomputation that takes time and that saves some."""
    kinds = (0,) * len(kinds) if one_kind else kinds
    problem = problem_of(kinds, min(chunks, len(kinds)), capacity=capacity, recompute=recompute, ends=ends)
    if faster:
        seconds, bytes_ = problem.quantities
        forms = (replace(seconds.forms[0], recomputed=(9, 18)), *seconds.forms[1:])
        problem = replace(problem, quantities=(replace(seconds, forms=forms), bytes_))
    best = min((partition_value(problem, partition) for partition in partitions(problem)), default=None)
    with patch.object(enumeration, "MOST_PIECES", 0 if by_cp_sat else enumeration.MOST_PIECES):
        answer = solve_stages(problem)
    if best is None:
        assert answer is None, answer
    else:
        assert answer is not None
        assert answer.bound <= best, problem
        if by_cp_sat or not faster:  # a look asks for some cuts at most
            assert answer.partition is not None
            assert (answer.value, answer.bound) == (best, best), problem
        if answer.partition is None:
            return
        assert partition_fits(problem, answer.partition)


def test_nothing_is_recomputed_where_every_partition_fits_and_it_takes_time() -> None:
    roomy, tight = problem_of((0, 0, 0, 0), 2, capacity=1000), problem_of((0, 0, 0, 0), 2, capacity=60)
    assert not without_needless_recomputation(roomy).recompute
    assert without_needless_recomputation(tight) == tight
    (seconds, bytes_) = roomy.quantities
    free = replace(seconds.forms[0], recomputed=(9, 17))
    shorter = replace(roomy, quantities=(replace(seconds, forms=(free,)), bytes_))
    assert without_needless_recomputation(shorter) == shorter
    named = replace(roomy, recomputed=(1, 1))
    assert without_needless_recomputation(named) == named


def test_memory_that_just_fits_is_used_and_one_byte_less_is_not() -> None:
    problem = problem_of((0, 0, 0, 0), 2, recompute=False)
    answer = solve_stages(problem)
    assert answer is not None
    need = max(2 + (2 - c) * (1 + 8 * answer.partition.blocks[c]) for c in range(2))
    assert solve_stages(replace(problem, capacity_bytes=need)) == answer
    tighter = solve_stages(replace(problem, capacity_bytes=need - 1))
    assert tighter is None or tighter.partition != answer.partition


def test_less_memory_recomputes_blocks_and_too_little_is_no_answer() -> None:
    problem = problem_of((0, 0, 0, 0), 2)
    free, tight = solve_stages(problem), solve_stages(replace(problem, capacity_bytes=20))
    assert free is not None
    assert sum(free.partition.recomputed) == 0
    assert tight is not None
    assert sum(tight.partition.recomputed) > 0
    assert solve_stages(replace(problem, capacity_bytes=10)) is None


def test_what_the_user_fixes_stays() -> None:
    problem = replace(problem_of((0, 0, 0, 0), 2), blocks=(3, 1))
    answer = solve_stages(problem)
    assert answer is not None
    assert answer.partition.blocks == (3, 1)
    fixed = solve_stages(replace(problem, recomputed=(2, 0)))
    assert fixed is not None
    assert fixed.partition == Partition(blocks=(3, 1), recomputed=(2, 0))


def test_an_excluded_partition_does_not_come_back_and_all_are_found_best_first() -> None:
    problem = problem_of((0, 1, 0, 1), 2, capacity=40)
    expected = sorted(partition_value(problem, partition) for partition in partitions(problem))
    found: list[Partition] = []
    values = []
    while (answer := solve_stages(problem, excluded=found)) is not None:
        found.append(answer.partition)
        values.append(answer.value)
    assert values == expected
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("slack", [0, 1])
def test_only_partitions_below_the_incumbent_are_found(slack: int) -> None:
    problem = problem_of((0, 0, 0), 2)
    best = solve_stages(problem)
    assert best is not None
    again = solve_stages(problem, below=best.value + slack)
    assert again == (best if slack else None)


UNLIKE = st.lists(st.integers(0, 1), min_size=2, max_size=6).map(tuple)


@settings(max_examples=60)
@given(kinds=UNLIKE, sizes=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=4))
def test_a_chunk_ends_with_one_of_the_kinds_that_it_can_end_with(
    kinds: tuple[int, ...], sizes: list[tuple[int, int]]
) -> None:
    least, most = [a for a, _ in sizes], [a + b for a, b in sizes]
    ends: list[set[int]] = [set() for _ in sizes]
    for blocks in product(*(range(a, b + 1) for a, b in zip(least, most, strict=True))):
        if sum(blocks) == len(kinds):
            for c, n in enumerate(blocks):
                ends[c] |= {kinds[sum(blocks[: c + 1]) - 1]} if n else set()
    assert all(one <= set(found) for one, found in zip(ends, last_kinds(kinds, least, most), strict=True))


@given(kinds=UNLIKE, chunks=st.integers(2, 3), capacity=st.integers(8, 200), ends=st.integers(0, 1))
def test_the_longest_chunk_of_a_balanced_partition_is_as_short_as_it_can_be(
    kinds: tuple[int, ...], chunks: int, capacity: int, ends: int
) -> None:
    """Of the partitions that recompute nothing: one row of memory for each chunk, and seconds and bytes added up as passes."""
    problem = problem_of(kinds, min(chunks, len(kinds)), capacity=capacity, ends=ends)
    forms = [quantity.forms[0] for quantity in problem.quantities]

    def longest(blocks: tuple[int, ...]) -> int:
        starts = [sum(blocks[:c]) for c in range(len(blocks))]
        return max(
            sum(form.fixed[c] + sum(form.kept[k] for k in kinds[a : a + n]) for form in forms)
            for c, (a, n) in enumerate(zip(starts, blocks, strict=True))
        )

    kept = [partition.blocks for partition in partitions(problem) if not any(partition.recomputed)]
    found = balanced_blocks(problem)
    assert (found is not None) == bool(kept)
    if found is not None:
        assert longest(found) <= min(map(longest, kept)) * 1.001 + 1


def test_where_memory_is_short_nearly_every_problem_that_can_be_partitioned_is() -> None:
    can, found = 0, 0
    for kinds, chunks, recompute in product(product((0, 1), repeat=5), (2, 3), (False, True)):
        every = problem_of(kinds, chunks, capacity=10**9, recompute=recompute)
        peaks = sorted({max(row_values(every, every.memory, one)) for one in partitions(every)})
        for capacity in (*peaks[:6], peaks[0] - 1):
            problem = replace(every, capacity_bytes=capacity)
            partition = smallest_partition(problem, lambda _: None)
            can += capacity >= peaks[0]
            found += partition is not None
            assert partition is None or partition_fits(problem, partition)
    assert found > 0.9 * can, (found, can)


@given(kinds=UNLIKE, capacity=st.integers(20, 200), lacking=st.tuples(st.integers(-9, 9), st.integers(-9, 9)))
def test_a_rank_that_lacks_bytes_has_as_many_less(
    kinds: tuple[int, ...], capacity: int, lacking: tuple[int, int]
) -> None:
    problem = problem_of(kinds, 2, capacity=capacity)
    less = with_less_room(problem, (0, 1), lacking)
    partition = Partition(blocks=(1, len(kinds) - 1), recomputed=(0, 0))
    before = list(row_values(problem, problem.memory, partition))
    after = list(row_values(less, less.memory, partition))
    assert [b - a for a, b in zip(before, after, strict=True)] == [max(n, 0) for n in lacking]


@settings(max_examples=40)
@given(
    kinds=st.lists(st.integers(0, 1), min_size=3, max_size=6).map(tuple),
    chunks=st.integers(2, 3), capacity=st.integers(30, 200), path=st.integers(0, 2),
)  # fmt: skip
def test_moves_take_one_block_off_what_decides(
    kinds: tuple[int, ...], chunks: int, capacity: int, path: int
) -> None:
    problem = problem_of(kinds, chunks, capacity=capacity)
    row = problem.paths[path % chunks]
    weight = {chunk: factor for _, chunk, factor in row.terms}
    for partition in partitions(problem):
        found = [one for one in moves(problem, partition, row) if one.blocks != partition.blocks]
        gains = []
        for moved in found:
            assert partition_fits(problem, moved)
            changed = [b - a for a, b in zip(partition.blocks, moved.blocks, strict=True)]
            off, to = changed.index(-1), changed.index(1)
            assert sum(map(abs, changed)) == 2
            gains.append(weight.get(off, 0) - weight.get(to, 0))
        assert all(gain > 0 for gain in gains)
        assert gains == sorted(gains, reverse=True)


def test_what_the_user_partitions_is_not_moved() -> None:
    problem = replace(problem_of((0, 0, 0, 0), 2), blocks=(3, 1))
    assert not list(moves(problem, Partition(blocks=(3, 1), recomputed=(0, 0)), problem.paths[0]))


@settings(max_examples=60)
@given(
    layers=st.integers(1, 8), shape=st.sampled_from([(0, 1), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2)]),
    block_s=st.lists(st.integers(1, 9), min_size=2, max_size=2), fixed=st.lists(st.integers(0, 20), min_size=4, max_size=4),
    fast=st.sampled_from([(0, 1, 1), (1, 0, 0), (0, 0, 1)]),
)  # fmt: skip
def test_no_division_among_unlike_ranks_has_a_busiest_rank_that_ends_sooner(
    layers: int, shape: tuple[int, ...], block_s: list[int], fixed: list[int], fast: tuple[int, ...]
) -> None:
    chunks, device_of = len(shape), tuple(fast[rank] for rank in shape)

    def on(seconds: int) -> tuple[Quantity, Quantity]:
        there = tuple(fixed[:chunks])
        return (
            Quantity(forms=(Form(kept=(seconds,), recomputed=(0,), fixed=there),)),
            Quantity(forms=(Form(kept=(2 * seconds,), recomputed=(0,), fixed=(0,) * chunks),)),
        )

    problem = StageProblem(
        kinds=(0,) * layers, chunks=chunks, quantities=tuple(q for seconds in block_s for q in on(seconds)),
        paths=(), memory=(), capacity_bytes=1, recompute=False, least=(0,) * chunks, most=(layers,) * chunks,
        device_of=device_of,
    )  # fmt: skip

    def busiest(blocks: tuple[int, ...]) -> float:
        ranks = dict.fromkeys(shape, 0.0)
        for chunk, rank in enumerate(shape):
            ranks[rank] += fixed[chunk] + 3 * block_s[device_of[chunk]] * blocks[chunk]
        return max(ranks.values())

    found = balanced_ranks(problem, shape)
    every = (blocks for blocks in product(range(layers + 1), repeat=chunks) if sum(blocks) == layers)
    assert sum(found) == layers
    assert busiest(found) == pytest.approx(min(map(busiest, every)))
