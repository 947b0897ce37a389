"""A batch that nobody asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoparallel.planner.default_batch import WORTH, better_batch
from autoparallel.planner.problem import Problem
from autoparallel.profiles import load_cluster
from tests.planned import plan
from tests.toy_graphs import toy_transformer

GRAPH = toy_transformer(layers=4, hidden=1024, heads=8, seq=1024, vocab=4096)
FEW: dict[str, object] = {"recompute.mode": "none", "mesh.cp": 1}  # what is left takes little time


def test_a_batch_that_divides_badly_is_named_with_one_that_serves_better() -> None:
    problem = Problem(graph=GRAPH, cluster=load_cluster("a100-sxm-80gb:7x1"), global_batch=7, constraints=FEW)
    found = plan(problem, advise=False)
    better = better_batch(problem, found)
    assert better is not None
    assert better.global_batch == 8
    other = plan(replace(problem, global_batch=8), advise=False)
    assert better.step_time_s >= other.prediction.step_time_s * (1 - 1e-9)
    less = 1 - better.step_time_s / 8 / (found.prediction.step_time_s / 7)
    assert better.less == pytest.approx(less)
    assert less >= WORTH


def test_a_power_of_two_is_left_alone() -> None:
    problem = Problem(graph=GRAPH, cluster=load_cluster("a100-sxm-80gb:4x1"), global_batch=4)
    assert better_batch(problem, plan(problem, advise=False)) is None
