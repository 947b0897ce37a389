from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.costmodel.streams import Interference, Segment, run_streams

FREE = Interference()


def test_the_first_gather_is_waited_for_and_the_next_hides_behind_computation() -> None:
    times = run_streams([Segment(10.0, 4.0), Segment(10.0, 4.0), Segment(10.0, 13.0)], FREE)
    assert times.end_s == pytest.approx(4 + 10 + 10 + 3 + 10)
    assert times.exposed_s == pytest.approx(4 + 3)
    assert times.tail_s == 0.0


def test_a_gather_is_fetched_only_one_segment_ahead() -> None:
    times = run_streams([Segment(100.0), Segment(1.0), Segment(1.0, 50.0)], FREE)
    assert times.end_s == pytest.approx(100 + 1 + 49 + 1)


def test_reductions_run_beside_later_computation_and_the_last_is_left() -> None:
    segments = [Segment(10.0, 0.0, ((1.0, 4.0),)), Segment(10.0, 0.0, ((1.0, 4.0),))]
    times = run_streams(segments, FREE)
    assert (times.end_s, times.tail_s) == pytest.approx((20.0, 4.0))


def test_a_reduction_may_start_inside_a_segment() -> None:
    times = run_streams([Segment(10.0, 0.0, ((0.5, 4.0), (1.0, 4.0)))], FREE)
    assert (times.end_s, times.tail_s) == pytest.approx((10.0, 4.0))


def test_each_stream_slows_the_other_down_while_both_are_busy() -> None:
    """4 s of reduction take 4 * 1.25 = 5 s beside computation, of which 5 / 1.5 s get done; 10 - 10/3 s remain."""
    both = Interference(compute_slowdown=0.5, comm_slowdown=0.25)
    times = run_streams([Segment(1.0, 0.0, ((1.0, 4.0),)), Segment(10.0)], both)
    assert times.end_s == pytest.approx(1 + 5 + (10 - 5 / 1.5))
    assert times.tail_s == 0.0


SECONDS = st.floats(0.0, 10.0)
SEGMENTS = st.lists(
    st.builds(
        Segment, SECONDS, SECONDS, st.lists(SECONDS, max_size=2).map(lambda s: tuple((1.0, x) for x in s))
    ),
    max_size=6,
)
INTERFERENCE = st.builds(
    Interference, compute_slowdown=st.floats(0.0, 1.0), comm_slowdown=st.floats(0.0, 1.0)
)


@given(SEGMENTS, INTERFERENCE)
def test_time_lies_between_the_longer_stream_and_their_sum(
    segments: list[Segment], both: Interference
) -> None:
    times = run_streams(segments, both)
    compute_s = sum(segment.compute_s for segment in segments)
    comm_s = sum(segment.gather_s + sum(s for _, s in segment.reductions) for segment in segments)
    whole_s = times.end_s + times.tail_s
    assert whole_s >= max(compute_s, comm_s) * (1 - 1e-9)
    slow = 1.0 + max(both.compute_slowdown, both.comm_slowdown)
    assert whole_s <= (compute_s + comm_s) * slow * (1 + 1e-9)
    assert times.exposed_s == pytest.approx(times.end_s - compute_s, abs=1e-9)


@given(SEGMENTS, INTERFERENCE, st.floats(0.0, 1.0))
def test_faster_communication_never_costs_time(
    segments: list[Segment], both: Interference, share: float
) -> None:
    faster = [
        Segment(s.compute_s, s.gather_s * share, tuple((f, r * share) for f, r in s.reductions))
        for s in segments
    ]
    slow, fast = run_streams(segments, both), run_streams(faster, both)
    assert fast.end_s <= slow.end_s * (1 + 1e-9)
    assert fast.end_s + fast.tail_s <= (slow.end_s + slow.tail_s) * (1 + 1e-9)
