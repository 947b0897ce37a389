"""Of strategies that are equally good the simplest wins; of those nearly as good it is named."""

from __future__ import annotations

import pytest

from autoparallel.planner.problem import Objective, Problem
from autoparallel.planner.score import score
from autoparallel.planner.strategy.complexity import complexity
from autoparallel.planner.strategy.types import Batch, Mesh, Recompute, Shard, Strategy
from autoparallel.profiles.load import load_cluster
from autoparallel.report.words import simpler_words
from tests.planned import plan
from tests.toy_graphs import toy_transformer

GRAPH = toy_transformer(layers=2, hidden=64, heads=4, seq=32, vocab=64)
CLUSTER = load_cluster("h100-sxm:1x4")


def test_what_changes_nothing_is_not_in_a_plan() -> None:
    found = plan(Problem(graph=GRAPH, cluster=CLUSTER, global_batch=4)).strategy
    assert found.recompute == Recompute()
    assert found.shard.zero <= 1 or _time(found, zero=found.shard.zero - 1) > _time(found) * (1 + 1e-6)


def _time(strategy: Strategy, **shard: int) -> float:
    changed = Strategy(
        batch=strategy.batch, mesh=strategy.mesh, pipeline=strategy.pipeline, recompute=strategy.recompute,
        shard=Shard(zero=shard.get("zero", strategy.shard.zero)), grad_sync=strategy.grad_sync,
    )  # fmt: skip
    return score(GRAPH, CLUSTER, changed).step_time_s


@pytest.mark.parametrize("objective", Objective)
def test_ranks_that_all_do_the_same_work_are_left_out(objective: Objective) -> None:
    problem = Problem(graph=GRAPH, cluster=CLUSTER, global_batch=1, objective=objective)
    found = plan(problem).strategy
    assert found.mesh.tp == 1 or found.tensor, found.mesh


def test_what_the_user_fixed_is_not_simplified_away() -> None:
    fixed = {"shard.zero": 2, "mesh.dp_shard": 4, "recompute.mode": "selective"}
    problem = Problem(graph=GRAPH, cluster=CLUSTER, global_batch=4, constraints=fixed)
    found = plan(problem).strategy
    assert (found.shard.zero, found.mesh.dp_shard, found.recompute.mode) == (2, 4, "selective")


def test_fewer_axes_are_simpler_then_less_recomputation_then_a_lower_zero_level() -> None:
    def of(mesh: Mesh, recompute: str = "none", zero: int = 0) -> Strategy:
        return Strategy(
            batch=Batch(global_=8, micro=1),
            mesh=mesh,
            recompute=Recompute(mode=recompute),
            shard=Shard(zero=zero),
        )

    ordered = [
        of(Mesh()), of(Mesh(dp_shard=4), zero=1), of(Mesh(dp_shard=4), zero=3), of(Mesh(dp_shard=4), "full", 1),
        of(Mesh(tp=4)), of(Mesh(dp_shard=4, tp=2), zero=1),
    ]  # fmt: skip
    assert [complexity(s) for s in ordered] == sorted({complexity(s) for s in ordered})


def test_a_simpler_strategy_that_is_nearly_as_fast_is_named() -> None:
    def other(slower: float, **changes: object) -> dict[str, object]:
        return {
            "label": "dp_shard 8", "step_time_s": 2.0 * (1 + slower), "peak_memory_gib": 3.0, "feasible": True,
            "simpler": True, **changes,
        }  # fmt: skip

    assert simpler_words({"alternatives": [other(0.005)]}, 2.0) == "dp_shard 8: 0.5 % slower, 3.00 GiB"
    assert simpler_words({"alternatives": [other(0.02)]}, 2.0) == ""
    assert simpler_words({"alternatives": [other(0.005, simpler=False)]}, 2.0) == ""
    assert simpler_words({}, 2.0) == ""
