"""Rounding a stage problem: everything stays feasible, nothing becomes dearer, and the numbers are small."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel.planner.search.partition.problem import (
    Form,
    Partition,
    Quantity,
    Row,
    StageProblem,
    partition_fits,
    partition_value,
)
from autoparallel.planner.search.partition.small_numbers import LARGEST, in_small_numbers


def pipeline(blocks: int, chunks: int, rate: int, saved: int, capacity: int, micro: int) -> StageProblem:
    """Equal blocks on a chain of ranks, in picoseconds and bytes."""
    seconds = Form(
        kept=(rate,), recomputed=(rate + rate // 3,), fixed=(rate // 7,) * chunks, when_all=rate // 5
    )
    bytes_ = Form(
        kept=(saved,), recomputed=(saved // 9,), fixed=(saved // 2,) * chunks, when_few=-(saved // 3)
    )
    return StageProblem(
        kinds=(0,) * blocks, chunks=chunks, quantities=(Quantity(forms=(seconds,)), Quantity(forms=(bytes_,))),
        paths=tuple(
            Row(terms=(*((0, c, 1) for c in range(rank)), (0, rank, micro)), constant=rate) for rank in range(chunks)
        ),
        memory=tuple(Row(terms=((1, c, chunks - c),)) for c in range(chunks)),
        capacity_bytes=capacity, recompute=True, least=(1,) * chunks, most=(blocks,) * chunks,
    )  # fmt: skip


@settings(max_examples=100)
@given(
    blocks=st.integers(2, 40),
    rate=st.integers(1, 10**13),
    saved=st.integers(0, 10**11),
    capacity=st.integers(10**6, 10**12),
    micro=st.integers(1, 512),
    share=st.integers(0, 100),
)
def test_a_partition_still_fits_and_is_worth_no_more(
    blocks: int, rate: int, saved: int, capacity: int, micro: int, share: int
) -> None:
    problem = pipeline(blocks, 2, rate, saved, capacity, micro)
    small, unit = in_small_numbers(problem)
    first = 1 + share * (blocks - 2) // 100
    partition = Partition(blocks=(first, blocks - first), recomputed=(share * first // 100, 0))
    assert partition_value(small, partition) * unit <= partition_value(problem, partition)
    assert partition_fits(small, partition) or not partition_fits(problem, partition)
    assert partition_value(small, partition) <= 2 * LARGEST, (small, unit)
    # What rounding loses is below what counts: one unit per number that a row adds up.
    assert partition_value(problem, partition) - partition_value(small, partition) * unit <= unit * 4 * (
        blocks + 3
    ) * (micro + 2)
