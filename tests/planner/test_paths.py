"""Longest paths: closed forms of known schedules, and every path is a lower bound for all stage times."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel.planner.paths import build_dag, longest_path, path_length
from autoparallel.planner.schedules import compute_order

CASES = [
    ("gpipe", 3, 1, 4), ("1f1b", 3, 1, 5), ("1f1b", 4, 1, 2), ("interleaved-1f1b", 2, 2, 4), ("zb1p", 3, 1, 4),
    ("zbv", 2, 2, 4),
]  # fmt: skip


@pytest.mark.parametrize("micros", [4, 8])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2)])
def test_equal_stages_take_the_published_time(name: str, chunks: int, ranks: int, micros: int) -> None:
    """(m + (p - 1) / v) (f + b) for GPipe, 1F1B and interleaved 1F1B (arXiv:2104.04473, section 2.2)."""
    stages = ranks * chunks
    dag = build_dag(compute_order(name, ranks, chunks, micros), stages)
    times = [[1.0 / chunks] * stages, [2.0 / chunks] * stages, [0.0] * stages, [0.0] * stages]
    none = [0.0] * stages
    found, _ = longest_path(dag, times, none, none, [0.0] * ranks)
    assert found == pytest.approx(3 * (micros + (ranks - 1) / chunks))


@settings(max_examples=60, deadline=None)
@given(case=st.sampled_from(CASES), data=st.data())
def test_a_path_is_as_long_as_the_step_and_never_longer_for_other_times(
    case: tuple[str, int, int, int], data: st.DataObject
) -> None:
    name, ranks, chunks, micros = case
    stages = ranks * chunks
    dag = build_dag(compute_order(name, ranks, chunks, micros), stages)
    numbers = st.floats(0.01, 1.0)
    line = st.lists(numbers, min_size=stages, max_size=stages)

    def draw() -> tuple[list[list[float]], list[float], list[float], list[float]]:
        times = [data.draw(line) for _ in range(4)]
        return times, data.draw(line), data.draw(line), data.draw(line)[:ranks]

    mine, other = draw(), draw()
    length, path = longest_path(dag, *mine)
    assert path_length(path, *mine) == pytest.approx(length)
    assert path_length(path, *other) <= longest_path(dag, *other)[0] * (1 + 1e-9)
