"""Why not that: the best of each kind is what planning within the kind finds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoparallel.planner.explain.alternatives import kinds_besides
from autoparallel.planner.outcome import Alternative, PlanResult
from autoparallel.planner.plan import plan
from autoparallel.planner.problem import Objective, Problem
from autoparallel.planner.search.space.build import build_space
from autoparallel.profiles.load import load_cluster
from tests.toy_graphs import toy_transformer

GRAPH = toy_transformer(layers=4, hidden=512, heads=4, seq=128, vocab=512)
WORK = 100.0  # too little for a proof with a large cluster
PROBLEM = Problem(graph=GRAPH, cluster=load_cluster("h100-sxm:1x4"), global_batch=8)


@pytest.fixture(scope="module")
def explained() -> PlanResult:
    return plan(PROBLEM, explain=True)


def told(result: PlanResult) -> str:
    return "\n".join(f"{a.kind}: {a.step_time_s} {a.proved} {a.reason}" for a in result.alternatives)


@pytest.mark.sweep(2)
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
    if kind not in [k.name for k in kinds_besides(explained.strategy, build_space(PROBLEM))]:
        assert not others
        return
    assert others, told(explained)
    _is_what_a_plan_finds(others[0], replace(PROBLEM, constraints=constraints))


def _is_what_a_plan_finds(other: Alternative, within: Problem) -> None:
    found_s = plan(within).prediction.step_time_s
    assert other.step_time_s >= found_s * (1 - 2e-6), other
    if other.proved:
        assert other.step_time_s == pytest.approx(found_s, rel=1e-5), other


def test_schedules_compression_and_second_copies_are_kinds_too() -> None:
    slow = replace(load_cluster("h100-sxm:2x2"), name="slow")
    slow = replace(slow, levels=(slow.levels[0], replace(slow.levels[1], bytes_per_s=1e9)))
    problem = replace(PROBLEM, cluster=slow, allow_lossy=True, constraints={"mesh.dp_replicate": 4})
    result = plan(problem, within=0.0)
    kinds = {kind: a for a in result.alternatives for kind in a.kind.split("; ")}
    assert any(method != "none" for method in result.strategy.grad_sync.compression), result.strategy
    _is_what_a_plan_finds(kinds["without compressed gradients"], replace(problem, allow_lossy=False))
    assert not any(m != "none" for m in kinds["without compressed gradients"].strategy.grad_sync.compression)
    piped = plan(replace(PROBLEM, constraints={"mesh.pp": 4}), within=0.0)
    own = piped.strategy.pipeline.schedule
    kinds = {kind: a for a in piped.alternatives for kind in a.kind.split("; ")}
    assert kinds[f"another schedule than {own}"].strategy.pipeline.schedule != own


def test_the_best_of_a_kind_is_looked_for_where_the_search_ended_without_a_proof() -> None:
    """Not merely what the search happened to simulate."""
    graph = toy_transformer(layers=16, hidden=2048, heads=16, seq=1024, vocab=512)
    problem = replace(PROBLEM, graph=graph, cluster=load_cluster("a100-pcie-80gb:4x4"), global_batch=64)
    result = plan(problem, most_work=WORK, within=0.0)
    assert result.status == "feasible"
    full = next(a for a in result.alternatives if "full recomputation" in a.kind.split("; "))
    within = plan(replace(problem, constraints={"recompute.mode": "full"}), most_work=WORK)
    assert full.step_time_s <= within.prediction.step_time_s * 1.25


def test_each_alternative_is_another_strategy(explained: PlanResult) -> None:
    strategies = [a.strategy for a in explained.alternatives]
    assert len(set(strategies)) == len(strategies)
    assert explained.strategy not in strategies


def test_alternatives_stand_in_the_order_of_the_objective() -> None:
    result = plan(replace(PROBLEM, cluster=load_cluster("h100-sxm:1x2"), objective=Objective.MEMORY))
    fitting = [a for a in result.alternatives if a.feasible]
    assert [a.peak_memory_gib for a in fitting] == sorted(a.peak_memory_gib for a in fitting)
    assert all("memory" in a.reason for a in fitting)
