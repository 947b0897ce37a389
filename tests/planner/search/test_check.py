"""The checker finds what is wrong with a plan, without a solver."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from autoparallel.planner.check import check_plan, constraint_problems, plan_problems
from autoparallel.planner.outcome import PlanResult
from autoparallel.planner.problem import Problem
from autoparallel.planner.score import score
from autoparallel.planner.strategy.types import GradSync, Pipeline, Shard
from autoparallel.profiles.load import load_cluster
from tests.planned import plan
from tests.toy_graphs import toy_transformer

PROBLEM = Problem(
    graph=toy_transformer(layers=4), cluster=load_cluster("h100-sxm:1x4"), global_batch=8,
    constraints={"mesh.pp": 2, "batch.micro": 1, "pipeline.schedule": "1f1b"},
)  # fmt: skip


@cache
def planned() -> PlanResult:
    return plan(PROBLEM)


def test_a_plan_of_the_planner_passes() -> None:
    assert plan_problems(PROBLEM, planned().strategy, planned().prediction) == []
    check_plan(PROBLEM, planned().strategy, planned().prediction)


def test_an_ignored_constraint_is_named() -> None:
    other = replace(PROBLEM, constraints={**PROBLEM.constraints, "batch.micro": 2})
    assert constraint_problems(other, planned().strategy) == ["batch.micro = 1, but 2 was asked for"]
    bigger = replace(PROBLEM, global_batch=16)
    assert "batch.global" in constraint_problems(bigger, planned().strategy)[0]


def test_an_illegal_strategy_is_named() -> None:
    broken = replace(planned().strategy, pipeline=Pipeline(schedule="1f1b", stage_blocks=(1, 1)))
    assert "sums to 2" in plan_problems(PROBLEM, broken, planned().prediction)[0]
    unsharded = replace(
        planned().strategy, mesh=replace(planned().strategy.mesh, dp_shard=2), shard=Shard(zero=0)
    )
    assert plan_problems(PROBLEM, unsharded, planned().prediction)


def test_compressed_gathers_that_nobody_allowed_are_named() -> None:
    coded = replace(planned().strategy, grad_sync=replace(planned().strategy.grad_sync, weights="int8"))
    assert "parameters gathered as int8, which nobody allowed" in list(constraint_problems(PROBLEM, coded))
    allowed = replace(PROBLEM, allow_lossy=True, lossy=("bf16",))
    assert "parameters gathered as int8, but bf16 was allowed" in list(constraint_problems(allowed, coded))
    assert not any(
        "gathered" in one for one in constraint_problems(replace(PROBLEM, allow_lossy=True), coded)
    )


def test_lossy_compression_that_nobody_allowed_is_named() -> None:
    lossy = replace(planned().strategy, grad_sync=GradSync(compression=("bf16", "bf16")))
    assert "lossy" in constraint_problems(PROBLEM, lossy)[0]


def test_a_wrong_price_is_found() -> None:
    wrong = replace(planned().prediction, step_time_s=planned().prediction.step_time_s * 1.001)
    assert "a step of" in plan_problems(PROBLEM, planned().strategy, wrong)[0]
    with pytest.raises(AssertionError, match="not what it claims"):
        check_plan(PROBLEM, planned().strategy, wrong)


def test_what_does_not_fit_is_found() -> None:
    groups = tuple(
        replace(g, device=replace(g.device, memory_bytes=g.device.reserve_bytes + 1))
        for g in PROBLEM.cluster.groups
    )
    small = replace(PROBLEM, cluster=replace(PROBLEM.cluster, groups=groups))
    prediction = score(small.graph, small.cluster, planned().strategy)
    assert "do not fit" in plan_problems(small, planned().strategy, prediction)[-1]
