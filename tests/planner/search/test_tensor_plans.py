"""Further points of the tensor plans in the search: asked for where memory binds, searched to the end, and said in the
strategy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoparallel.planner.check import plan_problems
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.outcome import InfeasiblePlan
from autoparallel.planner.problem import Objective, Problem
from autoparallel.planner.score import score
from autoparallel.planner.search.bounds.outer import outer_of
from autoparallel.planner.search.driver import Search
from autoparallel.planner.search.tensor_plans import search_tensor_plans
from autoparallel.profiles import load_cluster
from tests.planned import plan
from tests.planner.search.force import best_by_force, points_asked, with_memory
from tests.toy_graphs import toy_transformer

MIB = 1 << 20
WIDE = Problem(
    graph=toy_transformer(layers=2, hidden=1024, heads=2, seq=512, vocab=4096),
    cluster=load_cluster("h100-sxm:1x2"), global_batch=4,
    constraints={"mesh.tp": 2, "shard.sequence_parallel": False},
)  # fmt: skip


def tight(problem: Problem, capacity_bytes: float) -> Problem:
    return replace(problem, cluster=with_memory(problem.cluster, capacity_bytes))


def searched(problem: Problem) -> Search:
    """A search without further plans."""
    outer = outer_of(problem)
    assert outer is not None
    search = Search(outer=outer, check=lambda _: None)
    search.run()
    return search


@pytest.mark.parametrize("capacity_mib", [310, 350, 400])
def test_where_memory_binds_another_point_wins(capacity_mib: int) -> None:
    problem = tight(WIDE, capacity_mib * MIB)
    before = searched(problem)
    found = plan(problem)
    assert found.status == "optimal"
    assert found.prediction.step_time_s < 0.95 * before.value[0]
    first = Expander(problem.graph, problem.cluster).tensor_plan(replace(found.strategy, tensor=()))
    assert found.strategy.tensor != first.rules
    fresh = score(problem.graph, problem.cluster, found.strategy)
    assert (fresh.step_time_s, fresh.peak_bytes) == (
        found.prediction.step_time_s,
        found.prediction.peak_bytes,
    )
    assert not plan_problems(problem, found.strategy, found.prediction)


@pytest.mark.parametrize("capacity_mib", [350, 400, 1000])
def test_brute_force_over_the_points_asked_for_never_beats_the_plan(capacity_mib: int) -> None:
    few = {"batch.micro": 2, "recompute.mode": "none"}
    problem = tight(replace(WIDE, constraints={**WIDE.constraints, **few}), capacity_mib * MIB)
    assert points_asked(problem)
    found, expander = plan(problem), Expander(graph=problem.graph, cluster=problem.cluster)
    best, _ = best_by_force(problem, expander, points=True)
    assert found.status == "optimal"
    assert found.prediction.step_time_s == pytest.approx(best[0], rel=2e-6)
    assert found.lower_bound_s <= best[0]


def test_a_model_fits_that_would_not_with_the_first_point() -> None:
    least = plan(replace(WIDE, objective=Objective.MEMORY)).prediction.peak_bytes
    problem = tight(WIDE, least)
    assert searched(problem).incumbent is None
    assert plan(problem).prediction.peak_bytes <= least
    with pytest.raises(InfeasiblePlan):
        plan(tight(WIDE, 0.9 * least))


def test_nothing_is_asked_for_where_tensor_parallelism_could_not_win() -> None:
    search = searched(replace(WIDE, constraints={}, global_batch=16))
    assert search.incumbent is not None
    assert search.incumbent.strategy.mesh.tp == 1
    search_tensor_plans(search, lambda _: None)
    assert not search.taken


@pytest.mark.parametrize("capacity_mib", [330, 350, 360])
def test_a_plan_is_no_slower_than_one_that_must_recompute(capacity_mib: int) -> None:
    """Also where the first plans fit only with state on the host: a leaner tensor plan needs no copies."""
    problem = tight(WIDE, capacity_mib * MIB)
    held = plan(replace(problem, constraints={**problem.constraints, "recompute.mode": "full"}))
    free = plan(problem)
    assert free.prediction.step_time_s <= held.prediction.step_time_s * (1 + 1e-6), free.strategy
