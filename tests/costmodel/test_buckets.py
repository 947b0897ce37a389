from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.costmodel.buckets import fill_buckets
from autoparallel.costmodel.program import Collective, CollectiveOp


def reduction(size: int, axis: str = "dp_shard") -> Collective:
    return Collective(op=CollectiveOp.REDUCE_SCATTER, axes=(axis,), size_bytes=size, label="dp")


def sizes(reductions: list[tuple[Collective, ...]], bucket_bytes: int) -> list[tuple[int, float, list[int]]]:
    return [
        (bucket.link, bucket.fraction, [collective.size_bytes for collective in bucket.collectives])
        for bucket in fill_buckets(reductions, bucket_bytes)
    ]


def test_without_a_bucket_size_every_link_goes_by_itself() -> None:
    assert sizes([(reduction(7),), (), (reduction(5),)], 0) == [(0, 1.0, [7]), (2, 1.0, [5])]


def test_a_bucket_goes_when_it_is_full_and_the_last_one_at_the_end() -> None:
    assert sizes([(reduction(10),), (reduction(10),), (reduction(10),)], 15) == [
        (1, 0.5, [15]),
        (2, 1.0, [15]),
    ]
    assert sizes([(reduction(10),), (reduction(10),)], 100) == [(1, 1.0, [20])]


def test_a_large_link_fills_several_buckets_on_the_way() -> None:
    assert sizes([(reduction(40),)], 10) == [(0, 0.25, [10]), (0, 0.5, [10]), (0, 0.75, [10]), (0, 1.0, [10])]


def test_collectives_of_different_axes_stay_apart_and_keep_their_order() -> None:
    chain = (reduction(40), reduction(5, "dp_replicate"))
    assert sizes([chain, chain], 40) == [(0, 1.0, [40, 5]), (1, 1.0, [40, 5])]


@given(st.lists(st.integers(0, 10**9), max_size=12), st.integers(0, 10**9))
def test_every_byte_is_reduced_once_in_order(links: list[int], bucket_bytes: int) -> None:
    bucket_bytes = bucket_bytes and max(bucket_bytes, 10**6)
    found = sizes([(reduction(size),) if size else () for size in links], bucket_bytes)
    assert sum(sum(held) for _, _, held in found) == pytest.approx(sum(links), abs=len(found))
    assert [(link, fraction) for link, fraction, _ in found] == sorted((link, f) for link, f, _ in found)
