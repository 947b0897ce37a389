"""What less memory and fewer devices cost."""

from __future__ import annotations

from autoparallel.planner.outcome import GIB
from autoparallel.planner.plan import plan
from autoparallel.planner.problem import Problem
from autoparallel.profiles.load import load_cluster
from tests.toy_graphs import toy_transformer

GRAPH = toy_transformer(layers=4, hidden=512, heads=4, seq=128, vocab=512)
PROBLEM = Problem(graph=GRAPH, cluster=load_cluster("h100-sxm:1x4"), global_batch=8)


def test_no_point_of_the_frontier_is_beaten_in_everything() -> None:
    result = plan(PROBLEM, explain=True)
    points = [(p.step_time_s, p.peak_memory_gib, p.device_cost) for p in result.tradeoffs]
    assert len(points) > 1, points
    for a in points:
        assert not any(b != a and all(x <= y for x, y in zip(b, a, strict=True)) for b in points), points
    assert points == sorted(points)
    assert any(p.peak_memory_gib * GIB < result.prediction.peak_bytes for p in result.tradeoffs)
    assert any(p.devices < 4 for p in result.tradeoffs), result.tradeoffs


def test_without_an_explanation_there_is_none() -> None:
    assert plan(PROBLEM).tradeoffs == ()
