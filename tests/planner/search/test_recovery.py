"""The way to recover is searched with the strategy: nothing that another search finds survives failures better."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autoparallel.errors import UserError
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.outcome import PlanResult
from autoparallel.planner.problem import Problem
from autoparallel.planner.recovery import plan_recovery
from autoparallel.planner.strategy.file import read_strategy_file, strategy_from_constraints
from autoparallel.planner.strategy.types import RecoveryRule
from autoparallel.planner.strategy.write import write_strategy
from autoparallel.profiles.hardware import Cluster, Failures
from autoparallel.profiles.load import load_cluster
from tests.planned import plan
from tests.toy_graphs import toy_transformer

GRAPH = toy_transformer(layers=4, hidden=1024, heads=8, seq=512, vocab=4096)
CLUSTER = load_cluster("a100-pcie-80gb:6x2")
# What is held fixed leaves a space that takes no time: what is asked here is asked of every space.
FIXED = {
    "mesh.tp": 1, "mesh.pp": 1, "mesh.cp": 1, "batch.micro": 1, "recompute.mode": "none", "offload.activations": 0.0,
    "offload.optimizer": 0.0,
}  # fmt: skip


def failing(hours: float, replace_s: float, storage: float = 1e8) -> Cluster:
    """The cluster, each of its devices failing once in so many hours."""
    return replace(
        CLUSTER,
        failures=Failures(mtbf_hours_per_device=hours, storage_bytes_per_s=storage, replace_s=replace_s),
    )


def problem(cluster: Cluster, **constraints: object) -> Problem:
    return Problem(graph=GRAPH, cluster=cluster, global_batch=60, constraints={**FIXED, **constraints})


def kept(of: Problem, result: PlanResult) -> float:
    """Steps a second that survive, by what the plan says of itself."""
    planned = plan_recovery(Expander(of.graph, of.cluster), result.strategy, result.prediction)
    assert planned is not None
    way = planned.as_said(result.strategy.recovery)
    assert way.policy == result.strategy.recovery.policy
    nodes = planned.saved.nodes
    return way.goodput * (nodes + way.spares) / nodes / result.prediction.step_time_s


@pytest.mark.parametrize(("hours", "replace_s", "storage"), [(300, 7200, 1e9), (40, 3600, 3e7)])
def test_no_policy_that_is_asked_for_is_better_than_the_one_that_was_chosen(
    hours: float, replace_s: float, storage: float
) -> None:
    of = problem(failing(hours, replace_s, storage))
    chosen = plan(of)
    rule = chosen.strategy.recovery
    assert rule.checkpoint_every_s > 0
    assert rule.timeout_s > 10
    values = {}
    for policy in ("restart", "peers", "replan", "spares", "drop-replica"):
        asked = replace(of, constraints={**FIXED, "recovery.policy": policy})
        other = plan(asked)
        assert other.strategy.recovery.policy == policy
        values[policy] = kept(of, other)
    assert kept(of, chosen) >= max(values.values()) * (1 - 1e-6), (rule, values)


def test_a_strategy_for_what_fails_is_not_the_fastest() -> None:
    """Nodes are away for long, and often: some wait, and the plan is for the others."""
    of = problem(failing(60, 20_000), **{"recovery.policy": "spares", "recovery.spares": 1})
    result = plan(of)
    assert result.strategy.mesh.devices <= 10
    assert result.strategy.recovery.spares == 1
    assert result.alternatives[0].kind == "the fastest step"
    assert result.alternatives[0].strategy.mesh.devices == 12


def test_where_nothing_fails_nothing_is_said_unless_it_is_asked_for() -> None:
    quiet = plan(problem(CLUSTER))
    assert quiet.strategy.recovery == RecoveryRule()
    asked = plan(problem(CLUSTER, **{"recovery.policy": "peers", "recovery.peers": 1}))
    assert asked.strategy.recovery == RecoveryRule(policy="peers", peers=1)
    assert replace(asked.strategy, recovery=RecoveryRule()) == quiet.strategy
    with pytest.raises(UserError, match=r"recovery\.peers = 1"):
        plan(problem(CLUSTER, **{"recovery.policy": "peers"}))
    with pytest.raises(UserError, match="lower it to 0, or the mesh"):
        plan(problem(CLUSTER, **{"recovery.policy": "spares", "recovery.spares": 2}))


def test_the_file_says_the_rule_and_what_is_said_stays(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    of = problem(failing(300, 7200), **{"recovery.checkpoint_every_s": 77.0})
    strategy = plan(of).strategy
    assert strategy.recovery.checkpoint_every_s == 77.0
    write_strategy(path, strategy, {}, {}, {})
    assert strategy_from_constraints(read_strategy_file(path).constraints) == strategy
    write_strategy(path, replace(strategy, recovery=RecoveryRule()), {}, {}, {})
    assert "recovery" not in path.read_text()


def test_a_batch_that_does_not_divide_makes_going_on_with_less_dear() -> None:
    """Twelve ranks on six nodes lose two: sixty sequences divide among ten, forty-eight among eight."""
    prices = {}
    for batch in (60, 48):
        of = replace(problem(failing(300, 7200)), global_batch=batch)
        result = plan(of)
        planned = plan_recovery(Expander(of.graph, of.cluster), result.strategy, result.prediction)
        assert planned is not None
        assert planned.saved.fewer_step_s is not None
        prices[batch] = planned.saved.fewer_step_s / result.prediction.step_time_s
    assert prices[48] > prices[60] > 1.0, prices
