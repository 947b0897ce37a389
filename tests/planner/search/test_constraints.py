"""What each constraint costs is what planning without it gains."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from autoparallel.planner.explain.constraints import ALL, chosen_by_user, constraint_costs
from autoparallel.planner.outcome import PlanResult
from autoparallel.planner.problem import Objective, Problem
from autoparallel.planner.search.bounds.outer import outer_of
from autoparallel.planner.search.evaluate import evaluate
from autoparallel.profiles.load import load_cluster
from tests.planned import plan
from tests.planner.search.force import with_memory
from tests.toy_graphs import toy_transformer

GRAPH = toy_transformer(layers=2, hidden=512, heads=4, seq=128, vocab=512)
FREE = Problem(graph=GRAPH, cluster=load_cluster("h100-sxm:1x2"), global_batch=8)


def with_(problem: Problem, **constraints: object) -> Problem:
    fixed = {key.replace("__", "."): value for key, value in constraints.items()}
    return replace(problem, constraints={**problem.constraints, **fixed})


@cache
def unconstrained(objective: Objective) -> PlanResult:
    return plan(replace(FREE, objective=objective))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("objective", "key", "value"),
    [
        (Objective.TIME, "mesh__tp", 2),
        (Objective.TIME, "recompute__mode", "full"),
        (Objective.TIME, "mesh__pp", 2),
        (Objective.MEMORY, "mesh__tp", 2),
    ],
)
def test_a_constraint_costs_what_the_plan_without_it_gains(
    objective: Objective, key: str, value: object
) -> None:
    problem = replace(FREE, objective=objective)
    free, held = unconstrained(objective).prediction, plan(with_(problem, **{key: value}), explain=True)
    (cost,) = held.constraints
    assert cost.key == key.replace("__", ".")
    assert cost.value == value
    if objective is Objective.TIME:
        gain = held.prediction.step_time_s / free.step_time_s - 1
    else:
        gain = held.prediction.peak_bytes / free.peak_bytes - 1
    if cost.proved:
        assert cost.cost == pytest.approx(gain, abs=1e-5)
    assert cost.cost <= gain + 1e-5 <= cost.at_most + 2e-5
    if cost.cost > 0:
        assert cost.instead != value or cost.instead is None


def test_together_they_cost_no_less_than_any_alone() -> None:
    found = plan(with_(FREE, mesh__tp=2, batch__micro=1, recompute__mode="full"), explain=True).constraints
    assert [c.key for c in found] == ["mesh.tp", "batch.micro", "recompute.mode", ALL]
    assert found[-1].cost >= max(c.cost for c in found[:-1])
    assert found[-1].value is None


def test_inputs_are_not_constraints_on_what_is_chosen() -> None:
    assert chosen_by_user({"batch.global": 8, "execution.dtype": "bf16", "mesh.tp": 2}) == ("mesh.tp",)
    assert plan(with_(FREE, batch__global=8), explain=True).constraints == ()


def test_the_plan_is_the_same_with_an_explanation() -> None:
    assert plan(FREE, explain=True, rivals=True).strategy == unconstrained(Objective.TIME).strategy


@pytest.mark.sweep(2)
@pytest.mark.parametrize("work", [1.0, 5.0, 11.0, 400.0])
def test_what_a_constraint_costs_at_most_counts_further_points_of_tensor_plans(work: float) -> None:
    """Also where the search without it stops before its end: here another tensor plan is the best one."""
    wide = toy_transformer(layers=2, hidden=1024, heads=2, seq=512, vocab=4096)
    cluster = with_memory(load_cluster("h100-sxm:1x2"), 400 * (1 << 20))
    free = with_(
        Problem(graph=wide, cluster=cluster, global_batch=4),
        mesh__tp=2, shard__sequence_parallel=False, offload__optimizer=0.0, offload__activations=0.0,
    )  # fmt: skip
    problem = with_(free, batch__micro=1)
    outer, best = outer_of(problem), plan(problem)
    assert outer is not None
    found = constraint_costs(outer, evaluate(outer.book.expander, best.strategy), work=work)
    gain = best.prediction.step_time_s / plan(free).prediction.step_time_s - 1
    at_most = next(cost.at_most for cost in found if cost.key == "batch.micro")
    assert gain <= at_most + 1e-5, (gain, at_most)
