"""What is said where there is no strategy: the constraint, by how much, and what would do."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from autoparallel.costmodel.prediction import Prediction
from autoparallel.errors import UserError
from autoparallel.planner.explain.infeasible import explain_infeasible
from autoparallel.planner.explain.relaxations import state_of_model_bytes
from autoparallel.planner.outcome import GIB, InfeasiblePlan
from autoparallel.planner.problem import Objective, Problem
from autoparallel.planner.search.bounds.outer import outer_of
from autoparallel.planner.search.driver import Stopped
from autoparallel.profiles.load import load_cluster
from tests.planned import plan
from tests.planner.search.force import with_hosts
from tests.toy_graphs import toy_transformer

GRAPH = toy_transformer(layers=2, hidden=512, heads=4, seq=128, vocab=512)


def problem_of(capacity_bytes: float, cluster: str = "h100-sxm:1x4", **constraints: object) -> Problem:
    usual = with_hosts(load_cluster(cluster), 0.0)
    groups = tuple(
        replace(g, device=replace(g.device, memory_bytes=capacity_bytes + 1e6, reserve_bytes=1e6))
        for g in usual.groups
    )
    fixed = {key.replace("__", "."): value for key, value in constraints.items()}
    return Problem(graph=GRAPH, cluster=replace(usual, groups=groups), global_batch=8, constraints=fixed)


@cache
def smallest(**constraints: object) -> Prediction:
    return plan(replace(problem_of(1e12, **constraints), objective=Objective.MEMORY)).prediction


def reason(problem: Problem) -> InfeasiblePlan:
    """Why nothing fits, without advice."""

    def stopped() -> None:
        raise Stopped

    outer = outer_of(problem)
    assert outer is not None
    return explain_infeasible(outer, stopped)


def infeasible(problem: Problem) -> InfeasiblePlan:
    with pytest.raises(InfeasiblePlan) as caught:
        plan(problem)
    return caught.value


def test_the_excess_is_what_the_smallest_strategy_lacks() -> None:
    peak = smallest().peak_bytes
    error = infeasible(problem_of(peak * 0.5))
    assert 0.4 * peak <= error.excess_gib * GIB <= 0.7 * peak, str(error)
    assert "GiB too few" in str(error)
    assert "h100-sxm" in error.constraint


def test_one_byte_more_than_the_smallest_fits() -> None:
    peak = smallest().peak_bytes
    assert plan(problem_of(peak + 1)).prediction.peak_bytes <= peak + 1


@pytest.mark.sweep(1)
@pytest.mark.parametrize("fixed", [{}, {"offload__optimizer": 1.0}, {"shard__zero": 0}])
def test_no_strategy_holds_less_than_the_state_of_the_model(fixed: dict[str, object]) -> None:
    held = smallest(**fixed)
    assert 0 < state_of_model_bytes(problem_of(1e12, **fixed)) <= held.peak_bytes * held.devices


def test_what_the_hosts_may_hold_is_no_state_of_the_devices() -> None:
    bare = problem_of(1e12)
    hosted = replace(bare, cluster=with_hosts(bare.cluster, 1e12))
    fixed = replace(hosted, constraints={"offload.optimizer": 0.0})
    assert state_of_model_bytes(hosted) < state_of_model_bytes(fixed) == state_of_model_bytes(bare)


def test_what_is_too_much_for_the_hosts_is_told_of_the_hosts() -> None:
    asked = problem_of(1e12, offload__optimizer=1.0)
    error = reason(replace(asked, cluster=with_hosts(asked.cluster, 1e3)))
    assert error.constraint.startswith("memory of the hosts with offload.optimizer = 1.0")


def test_hosts_too_small_to_offload_do_not_hide_what_the_devices_need() -> None:
    bare = problem_of(smallest().peak_bytes * 0.5)
    error = reason(replace(bare, cluster=with_hosts(bare.cluster, 1e3)))
    assert error.constraint.startswith("memory of h100-sxm: the smallest strategy")
    assert 0 < error.excess_gib < 1


def test_a_model_far_too_large_is_told_how_many_devices_its_state_fills_and_how_many_would_do() -> None:
    error = infeasible(problem_of(state_of_model_bytes(problem_of(1e12)) / 9.5))
    assert "alone fill 10 such devices" in error.constraint
    (offered,) = [r for r in error.relaxations if "devices instead of 4" in r.change]
    assert int(offered.change.split()[0]) in (16, 32, 64, 128), str(error)


def test_without_time_the_advice_is_left_out_and_the_reason_is_not() -> None:
    error = reason(problem_of(smallest().peak_bytes * 0.5))
    assert error.relaxations == ()
    assert "GiB too few" in str(error)


def test_more_devices_are_offered_with_what_they_give() -> None:
    error = infeasible(problem_of(smallest().peak_bytes * 0.7))
    offered = [r for r in error.relaxations if "devices instead of 4" in r.change]
    assert offered, str(error)
    assert all(r.peak_memory_gib * GIB <= smallest().peak_bytes * 0.7 for r in offered)
    assert all(r.step_time_s > 0 for r in offered)


@pytest.mark.parametrize(
    ("key", "value", "other"),
    [
        ("shard__zero", 0, "shard.zero = 0"), ("recompute__mode", "none", ""),
        ("mesh__dp_replicate", 4, "mesh.dp_replicate = 4"),
    ],
)  # fmt: skip
def test_the_constraint_that_binds_is_named_with_the_value_that_would_fit(
    key: str, value: object, other: str
) -> None:
    needed, free = smallest(**{key: value}).peak_bytes, smallest().peak_bytes
    if needed < free * 1.2:
        return  # recomputing block by block does as well as the mode
    error = infeasible(problem_of((needed + free) / 2, **{key: value}))
    name = key.replace("__", ".")
    assert name in error.constraint
    assert any(r.change.startswith(f"{name} = ") and r.change.endswith(f"instead of {value}")
               for r in error.relaxations), str(error)  # fmt: skip
    assert other in error.constraint


IMPOSSIBLE: list[tuple[dict[str, object], str]] = [
    ({"mesh.tp": 3}, "mesh.tp may be 1, 2, 4"),
    ({"batch.micro": 3}, "batch.micro may be 1, 2, 4, 8"),
    ({"mesh.pp": 8}, "mesh.pp may be 1, 2, 4"),
    ({"mesh.pp": 1, "pipeline.schedule": "interleaved-1f1b"}, "mesh.pp may be"),
    ({"mesh.dp_replicate": 4, "shard.zero": 3}, "may be"),
]


@pytest.mark.parametrize(("constraints", "words"), IMPOSSIBLE)
def test_constraints_that_leave_nothing_legal_are_the_users_mistake(
    constraints: dict[str, object], words: str
) -> None:
    deeper = toy_transformer(layers=4, hidden=512, heads=4, seq=128, vocab=512)
    with pytest.raises(UserError, match=words):
        plan(replace(problem_of(1e12), graph=deeper, constraints=constraints))


def test_constraints_that_only_together_leave_nothing_are_named_together() -> None:
    constraints: dict[str, object] = {"mesh.tp": 3, "batch.micro": 3}
    with pytest.raises(UserError, match="together; drop some"):
        plan(replace(problem_of(1e12), constraints=constraints))


def test_a_batch_that_no_mesh_of_all_devices_divides_is_planned_for_fewer() -> None:
    usual = load_cluster("h100-sxm:1x7")
    result = plan(Problem(graph=GRAPH, cluster=usual, global_batch=6))
    assert 3 < result.prediction.devices < 7
    alone = Problem(graph=GRAPH, cluster=usual, global_batch=6, constraints={"mesh.dp_replicate": 6})
    assert plan(alone).prediction.step_time_s >= result.prediction.step_time_s * (1 - 1e-6)


def test_state_on_the_host_is_offered_where_nobody_knows_the_memory_of_hosts() -> None:
    needed = smallest(shard__zero=0, mesh__tp=1, mesh__pp=1).peak_bytes
    on_host = smallest(shard__zero=0, mesh__tp=1, mesh__pp=1, offload__optimizer=1.0).peak_bytes
    assert on_host < needed
    error = infeasible(problem_of((needed + on_host) / 2, shard__zero=0, mesh__tp=1, mesh__pp=1))
    (offered,) = [r for r in error.relaxations if r.change.startswith("offload.optimizer = 1")]
    assert offered.peak_memory_gib * GIB <= (needed + on_host) / 2
    changes = [r.change for r in error.relaxations]
    assert len(set(changes)) == len(changes)
