"""Why not that: the best of each kind is what planning within the kind finds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoparallel.planner.explain.alternatives import kinds_besides
from autoparallel.planner.outcome import PlanResult
from autoparallel.planner.plan import plan
from autoparallel.planner.problem import Objective, Problem
from autoparallel.profiles.load import load_cluster
from tests.toy_graphs import toy_transformer

GRAPH = toy_transformer(layers=4, hidden=512, heads=4, seq=128, vocab=512)
PROBLEM = Problem(graph=GRAPH, cluster=load_cluster("h100-sxm:1x4"), global_batch=8)


@pytest.fixture(scope="module")
def explained() -> PlanResult:
    return plan(PROBLEM, explain=True)


def told(result: PlanResult) -> str:
    return "\n".join(f"{a.kind}: {a.step_time_s} {a.proved} {a.reason}" for a in result.alternatives)


@pytest.mark.parametrize(
    ("kind", "constraints"),
    [
        ("no pipeline", {"mesh.pp": 1}),
        ("no tensor parallelism", {"mesh.tp": 1}),
        ("full recomputation", {"recompute.mode": "full"}),
        ("data parallelism alone", {"mesh.pp": 1, "mesh.tp": 1, "mesh.dp_replicate": 4}),
    ],
)
def test_the_best_of_a_kind_is_what_a_plan_within_it_finds(
    explained: PlanResult, kind: str, constraints: dict[str, object]
) -> None:
    others = [a for a in explained.alternatives if kind in a.kind.split("; ")]
    if kind not in [k.name for k in kinds_besides(explained.strategy)]:
        assert not others
        return
    within = plan(replace(PROBLEM, constraints=constraints)).prediction
    assert others, told(explained)
    assert others[0].step_time_s >= within.step_time_s * (1 - 2e-6), told(explained)
    if others[0].proved:
        assert others[0].step_time_s == pytest.approx(within.step_time_s, rel=1e-5), told(explained)


def test_each_alternative_is_another_strategy(explained: PlanResult) -> None:
    strategies = [a.strategy for a in explained.alternatives]
    assert len(set(strategies)) == len(strategies)
    assert explained.strategy not in strategies


def test_alternatives_stand_in_the_order_of_the_objective() -> None:
    result = plan(replace(PROBLEM, objective=Objective.MEMORY))
    fitting = [a for a in result.alternatives if a.feasible]
    assert [a.peak_memory_gib for a in fitting] == sorted(a.peak_memory_gib for a in fitting)
    assert all("memory" in a.reason for a in fitting)
