"""Two processes give what one gives."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel.planner.problem import Problem
from autoparallel.planner.search.bounds.outer import outer_of
from autoparallel.planner.side_by_side import side_by_side
from autoparallel.profiles import load_cluster
from tests.toy_graphs import toy_transformer


def _square(n: int) -> int:
    return n * n


def _fail() -> int:
    raise ValueError("of a piece")


@settings(deadline=None)
@given(weights=st.lists(st.floats(0.0, 10.0), max_size=6), processes=st.integers(1, 2))
def test_results_come_back_in_order(weights: list[float], processes: int) -> None:
    pieces = [partial(_square, n) for n in range(len(weights))]
    assert side_by_side(pieces, weights, processes) == [n * n for n in range(len(weights))]


def test_what_a_piece_raises_is_raised() -> None:
    with pytest.raises(ValueError, match="of a piece"):
        side_by_side([partial(_square, 2), _fail], [2.0, 1.0], 2)


def test_pieces_of_a_process_that_dies_are_done_in_the_first() -> None:
    first = os.getpid()

    def die_elsewhere(n: int) -> int:
        if os.getpid() != first:
            os.kill(os.getpid(), signal.SIGKILL)
        return n

    pieces: list[Callable[[], int]] = [partial(die_elsewhere, n) for n in range(4)]
    assert side_by_side(pieces, [1.0] * 4, 2) == [0, 1, 2, 3]


def test_pieces_of_a_process_that_is_not_heard_of_are_done_in_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autoparallel.planner.side_by_side.PATIENCE_S", 0.2)
    first = os.getpid()

    def hang_elsewhere(n: int) -> int:
        if os.getpid() != first:
            time.sleep(60.0)
        return n

    assert side_by_side([partial(hang_elsewhere, n) for n in range(4)], [1.0] * 4, 2) == [0, 1, 2, 3]


def test_prices_made_in_two_processes_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoparallel.planner.search.bounds.settings.FEW", 0)
    problem = Problem(
        graph=toy_transformer(layers=4, hidden=512, heads=8, seq=512, vocab=4096),
        cluster=load_cluster("h100-sxm:2x8"),
        global_batch=32,
    )
    one, two = outer_of(problem), outer_of(problem, processes=2)
    assert one is not None
    assert two is not None
    assert np.array_equal(one.prices.rows, two.prices.rows)
    assert one.book.expander.works.plans.keys() == two.book.expander.works.plans.keys()
    for request, plan in one.book.expander.works.plans.items():
        assert two.book.expander.works.plans[request].rules == plan.rules
