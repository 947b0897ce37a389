"""The search against brute force over `score`, its limits, its constraints and its determinism."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel.costmodel.graph import ModelGraph, ModuleCall
from autoparallel.costmodel.prediction import Prediction
from autoparallel.errors import UserError
from autoparallel.planner.check import plan_problems
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.outcome import InfeasiblePlan, PlanResult, Progress, SearchTimeout
from autoparallel.planner.problem import Objective, Problem, objective_value
from autoparallel.planner.score import score
from autoparallel.planner.strategy.types import Execution, Strategy
from autoparallel.profiles.hardware import Cluster
from autoparallel.profiles.load import load_cluster
from tests.planned import plan
from tests.planner.search.force import best_by_force, smallest, with_hosts, with_memory
from tests.toy_graphs import toy_mlp, toy_transformer

GRAPHS = (
    toy_transformer(layers=2, hidden=64, heads=4, seq=32, vocab=256),
    toy_transformer(layers=3, hidden=512, heads=4, seq=128, vocab=512, tied=True),
    toy_transformer(layers=2, hidden=1024, heads=2, seq=512, vocab=4096, ffns=(2048, 8192)),
    toy_mlp(layers=3, width=512),
)
CLUSTERS = ("h100-sxm:1x2", "a100-pcie-80gb:2x1", "a100-pcie-80gb:2x2", "cpu-gloo:1x4")


def small_problem(graph: int, cluster: int, batch: int, **more: Any) -> Problem:
    return Problem(
        graph=GRAPHS[graph], cluster=load_cluster(CLUSTERS[cluster]), global_batch=batch,
        execution=Execution(dtype="fp32" if cluster == 3 else "bf16", kernels="eager" if graph % 2 else "fused"),
        **more,
    )  # fmt: skip


def on_hosts(problem: Problem) -> float:
    """What the strategy with the least memory on the devices has on a host."""
    away: dict[str, object] = {"offload.optimizer": 1.0, "offload.activations": 1.0}
    roomy = with_hosts(problem.cluster, 1e15)
    return float(smallest(replace(problem, cluster=roomy, constraints=away)).host_bytes)


@settings(max_examples=3)
@given(
    graph=st.integers(0, 3), cluster=st.sampled_from([0, 0, 1, 1, 3]), batch=st.sampled_from([2, 4]),
    objective=st.sampled_from(list(Objective)), room=st.sampled_from([1.0, 1.02, 1.3, 100.0]),
    constraint=st.sampled_from(["", "", "recompute.mode", "shard.zero", "mesh.order"]),
    lossy=st.booleans(), hosts=st.sampled_from([0.0, 0.0, 0.6, 100.0]),
)  # fmt: skip
def test_brute_force_never_beats_an_optimal_plan(
    graph: int, cluster: int, batch: int, objective: Objective, room: float, constraint: str, lossy: bool,
    hosts: float,
) -> None:  # fmt: skip
    """`room` times the least memory that any strategy needs on the devices, and `hosts` times what that has on hosts."""
    fixed: dict[str, object] = {
        "recompute.mode": "none", "shard.zero": 1,
        "mesh.order": ("dp_replicate", "dp_shard", "cp", "tp", "pp"),
    }  # fmt: skip
    constraints: dict[str, object] = {"batch.micro": 1}  # there is enough to try
    constraints |= {constraint: fixed[constraint]} if constraint else {}
    problem = small_problem(graph, cluster, batch, constraints=constraints, allow_lossy=lossy)
    room_on_hosts = hosts * on_hosts(problem) if hosts else 0.0
    problem = replace(problem, cluster=with_hosts(problem.cluster, room_on_hosts))
    try:
        least = smallest(problem).peak_bytes
    except ValueError:
        return  # the constraint leaves nothing; what is said then is tested elsewhere
    tight = replace(problem, cluster=with_memory(problem.cluster, least * room), objective=objective)
    result = plan(tight)
    expander = Expander(graph=tight.graph, cluster=tight.cluster)
    best, count = best_by_force(tight, expander, points=True)
    found = objective_value(tight, result.prediction)
    shown = f"{result.strategy}\nfound {found}, best of {count} is {best}, bound {result.lower_bound_s}"
    assert not plan_problems(tight, result.strategy, result.prediction)
    if result.status == "optimal":
        assert found[0] <= best[0] * (1 + 2e-6), shown
    if objective == Objective.TIME:
        assert result.lower_bound_s <= best[0] * (1 + 1e-9), shown
        assert result.gap == pytest.approx(1 - result.lower_bound_s / found[0], abs=2e-6), shown


def test_small_problems_are_proved() -> None:
    for graph, cluster in ((0, 2), (1, 0), (3, 3)):
        result = plan(small_problem(graph, cluster, 4))
        assert (result.status, result.gap) == ("optimal", 0.0), result


FIXED: tuple[dict[str, object], ...] = (
    {"mesh.tp": 2},
    {"mesh.pp": 2, "pipeline.schedule": "gpipe"},
    {"mesh.pp": 2, "pipeline.stage_blocks": (1, 2), "recompute.per_stage": (1, 0)},
    {"mesh.pp": 2, "mesh.dp_replicate": 1, "mesh.dp_shard": 1, "mesh.tp": 1},
    {"shard.zero": 3, "mesh.dp_shard": 4},
    {"batch.micro": 2, "recompute.mode": "full"},
    {"grad_sync.compression": ("bf16", "bf16"), "grad_sync.bucket_mib": 5.0, "mesh.dp_replicate": 2},
    {"pipeline.schedule": "zb1p", "mesh.pp": 2},
)


@cache
def unconstrained() -> PlanResult:
    return plan(small_problem(1, 2, 8))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("constraints", FIXED, ids=lambda c: ", ".join(c))
def test_what_the_user_fixes_stays_fixed(constraints: dict[str, object]) -> None:
    problem = small_problem(1, 2, 8, constraints=constraints)
    result = plan(problem)
    assert not plan_problems(problem, result.strategy, result.prediction)
    free = unconstrained()
    if result.status == free.status == "optimal" and result.prediction.devices == free.prediction.devices:
        known = set(constraints) <= {"mesh.tp", "mesh.pp", "pipeline.schedule", "shard.zero", "mesh.dp_shard"}
        if known and "zb1p" not in constraints.values():
            assert free.prediction.step_time_s <= result.prediction.step_time_s * (1 + 1e-6)


RIVALLED = small_problem(2, 2, 8, constraints={"batch.micro": 2})


@cache
def rivalled() -> PlanResult:
    return plan(RIVALLED, rivals=True)


def test_equal_problems_give_equal_plans() -> None:
    again = plan(RIVALLED, rivals=True)
    assert repr(replace(rivalled(), seconds=0.0)) == repr(replace(again, seconds=0.0))


def test_lossy_compression_is_only_chosen_where_it_is_allowed() -> None:
    problem = small_problem(2, 2, 4, constraints={"mesh.tp": 1, "mesh.pp": 1})
    careful, free = plan(problem), plan(replace(problem, allow_lossy=True))
    assert not any(m != "none" for m in careful.strategy.grad_sync.compression)
    assert free.prediction.step_time_s <= careful.prediction.step_time_s


def slower(cluster: Cluster, share: float) -> Cluster:
    """The cluster with so much of the bandwidth of its outermost level."""
    *inner, outer = cluster.levels
    return replace(cluster, levels=(*inner, replace(outer, bytes_per_s=outer.bytes_per_s * share)))


def test_cost_may_leave_devices_idle_and_time_may_where_their_network_slows_the_step() -> None:
    problem = small_problem(0, 2, 4, constraints={"recompute.mode": "none", "batch.micro": 1, "mesh.tp": 1})
    fast, cheap = plan(problem), plan(replace(problem, objective=Objective.COST))
    every = plan(replace(problem, all_devices=True))
    assert every.prediction.devices == problem.cluster.devices
    assert fast.prediction.step_time_s <= every.prediction.step_time_s * (1 + 2e-6)
    slow = replace(problem, cluster=slower(problem.cluster, 1e-3))
    alone = plan(slow).prediction
    assert alone.devices <= 4
    assert alone.step_time_s < plan(replace(slow, all_devices=True)).prediction.step_time_s

    def spent(result: PlanResult) -> float:
        return result.prediction.step_time_s * result.prediction.devices

    assert spent(cheap) <= spent(fast) * (1 + 1e-9)


def test_less_memory_never_makes_a_step_faster() -> None:
    problem = small_problem(1, 2, 4, constraints={"batch.micro": 1, "mesh.cp": 1})
    least = smallest(problem).peak_bytes
    times = [
        plan(replace(problem, cluster=with_memory(problem.cluster, least * room))).prediction.step_time_s
        for room in (1.0, 1.2, 10.0)
    ]
    assert all(a >= b * (1 - 2e-6) for a, b in pairwise(times)), times


def test_no_time_at_all_is_a_timeout() -> None:
    with pytest.raises(SearchTimeout, match="allow more time"):
        plan(small_problem(0, 2, 4), time_limit_s=0.0)


@pytest.mark.parametrize("fixed", [{"mesh.tp": 1}, {}])
def test_an_interrupt_returns_the_best_so_far_with_its_gap(
    monkeypatch: pytest.MonkeyPatch, fixed: dict[str, object]
) -> None:
    import autoparallel.planner.search.simulations as search

    real, calls = search.evaluate, []

    def interrupted(expander: Expander, strategy: Strategy, paths: Any = None) -> Any:
        calls.append(strategy)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(expander, strategy, paths)

    monkeypatch.setattr(search, "evaluate", interrupted)
    problem = small_problem(1, 2, 4, constraints={"mesh.pp": 2, **fixed})
    result = plan(problem)
    assert result.status == "feasible"
    assert 0.0 <= result.gap < 1.0
    assert result.lower_bound_s <= result.prediction.step_time_s
    monkeypatch.undo()
    assert result.lower_bound_s <= plan(problem).prediction.step_time_s * (1 + 1e-9)


def test_progress_tells_of_an_incumbent_above_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    import autoparallel.planner.plan as search

    monkeypatch.setattr(search, "REPORT_EVERY_S", 0.0)
    told: list[Progress] = []
    plan(small_problem(1, 2, 8), progress=told.append)
    assert told
    assert all(p.incumbent is None or p.bound is None or p.incumbent > 0 for p in told)
    assert told[-1].candidates >= told[-1].solved


def feasible_alternatives(result: PlanResult) -> list[Prediction]:
    return [a for a in result.alternatives if a.feasible]  # type: ignore[misc]


def test_alternatives_are_of_other_kinds_never_better_and_say_why() -> None:
    problem, result = RIVALLED, rivalled()
    assert result.alternatives
    for alternative in result.alternatives:
        prediction = score(problem.graph, problem.cluster, alternative.strategy)
        assert prediction.step_time_s == pytest.approx(alternative.step_time_s)
        assert prediction.feasible == alternative.feasible
        assert alternative.reason
        if alternative.feasible and result.status == "optimal":
            assert alternative.step_time_s >= result.prediction.step_time_s * (1 - 2e-6), alternative


def test_a_model_without_repeated_blocks_is_planned() -> None:
    graph = GRAPHS[0]
    chain = tuple(replace(link, repeated=False) for link in graph.chain)
    single: ModelGraph = replace(graph, chain=chain)
    result = plan(Problem(graph=single, cluster=load_cluster("h100-sxm:1x2"), global_batch=4))
    assert result.strategy.mesh.pp == 1


def test_too_large_a_model_is_infeasible() -> None:
    problem = small_problem(1, 1, 4)
    with pytest.raises(InfeasiblePlan, match="GiB too few"):
        plan(replace(problem, cluster=with_memory(problem.cluster, 1e5)))


def test_a_degree_without_a_legal_plan_is_left_out_and_said_where_it_is_asked_for() -> None:
    graph = GRAPHS[0]
    glue = graph.blocks[0]  # its output is handed on by code of no module, where nothing can be pinned
    whole = tuple(replace(op, shardings=()) for op in glue.operators)
    stuck = replace(glue, operators=whole, calls=(ModuleCall(module="elsewhere"),))
    problem = Problem(
        graph=replace(graph, blocks=(stuck, *graph.blocks[1:])),
        cluster=load_cluster("h100-sxm:1x2"),
        global_batch=2,
    )
    assert plan(problem).status == "optimal"
    asked = replace(problem, constraints={"mesh.tp": 2, "shard.sequence_parallel": True})
    with pytest.raises(
        UserError, match=r"no legal tensor-parallel plan; use shard\.sequence_parallel = false"
    ):
        plan(asked)
