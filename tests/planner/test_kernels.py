"""Kernels by price: the better of two searches, compiling counted over the run's steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoparallel.errors import UserError
from autoparallel.planner.kernels import KEY, compile_s
from autoparallel.planner.problem import Problem
from autoparallel.planner.strategy.types import Execution
from autoparallel.profiles import load_cluster
from tests.planned import plan
from tests.toy_graphs import toy_transformer

GRAPH = toy_transformer(layers=4, hidden=256, heads=4, seq=256, vocab=512)
BOTH: dict[str, dict[str, object]] = {"eager": {}, "compiled": {"mesh.tp": 1}}


def _problem(steps: int | None = None, **constraints: object) -> Problem:
    return Problem(
        graph=GRAPH, cluster=load_cluster("h100-sxm:1x2"), global_batch=8, kernels=BOTH, steps=steps,
        execution=Execution(kernels="eager"),
        constraints={"mesh.pp": 1, **{key.replace("__", "."): value for key, value in constraints.items()}},
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> dict[str, float]:
    """Seconds of a step of the best plan with each kind of kernels."""
    found = {}
    for kernels in BOTH:
        own = Problem(
            graph=GRAPH, cluster=load_cluster("h100-sxm:1x2"), global_batch=8,
            execution=Execution(kernels=kernels), constraints={"mesh.pp": 1},
        )  # fmt: skip
        found[kernels] = plan(own, advise=False).prediction.step_time_s
    return found


def test_the_better_kernels_are_chosen_with_compiling_counted_over_the_steps(alone: dict[str, float]) -> None:
    gains_s = alone["eager"] - alone["compiled"]
    assert gains_s > 0
    pays_back = compile_s(GRAPH) / gains_s
    for steps, chosen in (
        (None, "compiled"),
        (int(pays_back / 2), "eager"),
        (int(pays_back * 2), "compiled"),
    ):
        found = plan(_problem(steps), advise=False)
        (other,) = [one for one in found.alternatives if one.kind.endswith("kernels")]
        assert found.strategy.execution.kernels == chosen, steps
        assert other.strategy.execution.kernels != chosen
        assert found.prediction.step_time_s == pytest.approx(alone[chosen], rel=1e-4)
        assert next(one.how for one in found.space if one.key == KEY) == "searched"
        assert found.lower_bound_s <= min(alone.values()) * (1 + 1e-9)


def test_kernels_whose_needs_contradict_the_user_are_left_out() -> None:
    found = plan(_problem(mesh__tp=2), advise=False)
    assert found.strategy.execution.kernels == "eager"
    assert found.strategy.mesh.tp == 2
    assert not any(one.kind.endswith("kernels") for one in found.alternatives)


def test_where_neither_can_be_planned_the_first_refusal_is_heard() -> None:
    with pytest.raises(UserError):
        plan(_problem(mesh__dp_replicate=3), advise=False)


def test_kernels_without_a_plan_leave_a_proof_and_are_not_advised_upon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = replace(
        _problem(mesh__tp=1, mesh__dp_shard=1),
        refuses=lambda s: "not compiled" if s.execution.kernels == "compiled" else None,
    )
    monkeypatch.setattr("autoparallel.planner.plan.explain_infeasible", None)  # nobody asks
    found = plan(problem, within=0.0)
    assert (found.strategy.execution.kernels, found.status) == ("eager", "optimal")
