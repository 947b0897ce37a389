"""Phases: what the file may say of them, and where a change of strategy between two pays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoparallel.errors import UserError
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.phases import phase_prices, plan_phases
from autoparallel.planner.problem import Problem
from autoparallel.planner.recovery import plan_recovery
from autoparallel.planner.score import score
from autoparallel.planner.strategy.file import parse_strategy, read_strategy_file, strategy_from_constraints
from autoparallel.planner.strategy.lengths import with_length
from autoparallel.planner.strategy.phases import strategy_at
from autoparallel.planner.strategy.types import Batch, GradSync, Mesh, Phase, Shard, Strategy
from autoparallel.planner.strategy.write import write_strategy
from autoparallel.profiles import load_cluster
from autoparallel.profiles.hardware import Failures
from tests.planned import plan
from tests.toy_graphs import toy_transformer

GRAPH, CLUSTER = toy_transformer(), load_cluster("a100-sxm-80gb:2x2")
LONGER = toy_transformer(seq=1024)
LENGTHS = replace(GRAPH, other_lengths=(LONGER,))
LONG = Phase(from_step=11, keys=(("batch.seq_len", 1024), ("batch.global", 16)))
LATER = Phase(from_step=11, keys=(("grad_sync.compression", ("none", "int8")),))
LAST = Phase(
    from_step=21,
    keys=(("batch.global", 64), ("mesh.dp_replicate", 4), ("mesh.dp_shard", 1), ("shard.zero", 0)),
)
BASE = Strategy(
    batch=Batch(global_=32, micro=2), mesh=Mesh(dp_shard=4), grad_sync=GradSync(compression=("none", "none"))
)


def test_a_step_has_the_keys_of_all_phases_that_have_begun(tmp_path: Path) -> None:
    strategy = replace(BASE, phases=(LATER, LAST))
    assert strategy_at(strategy, 10) == BASE
    assert (
        strategy_at(strategy, 11)
        == strategy_at(strategy, 20)
        == replace(BASE, grad_sync=GradSync(compression=("none", "int8")))
    )
    assert strategy_at(strategy, 21).mesh == Mesh(dp_replicate=4)
    assert strategy_at(strategy, 21).grad_sync.compression == ("none", "int8")
    whole = replace(strategy, pipeline=replace(BASE.pipeline, stage_blocks=(4,)))
    write_strategy(tmp_path / "phases.toml", whole, {}, {}, {})
    again = strategy_from_constraints(read_strategy_file(tmp_path / "phases.toml").constraints)
    assert again == whole


@pytest.mark.parametrize(
    ("phases", "words"),
    [
        (
            [{"from_step": 20, "batch": {"micro": 1}}, {"from_step": 10, "batch": {"micro": 2}}],
            "not after the phase before",
        ),
        ([{"from_step": 1, "batch": {"micro": 1}}], "at least 2"),
        ([{"from_step": 5}], "changes nothing"),
        ([{"from_step": 5, "execution": {"dtype": "bf16"}}], "execution stays what it is"),
        ([{"from_step": 5, "grad_sync": {"compression": ["topk:0"]}}], "compression"),
    ],
)
def test_phases_that_cannot_be_are_refused(phases: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_strategy({"phase": phases}, name="file")


def test_what_a_phase_makes_illegal_is_said_with_its_step() -> None:
    wrong = replace(BASE, phases=(Phase(from_step=7, keys=(("mesh.dp_shard", 64),)),))
    with pytest.raises(UserError, match="from step 7: mesh"):
        score(GRAPH, CLUSTER, wrong)


@pytest.mark.parametrize("steps", [12, 100_000])
def test_a_change_is_made_where_it_gains_more_than_it_costs(steps: int) -> None:
    grown = Phase(from_step=11, keys=(("batch.global", 4096),))
    constraints = {"mesh.pp": 1, "mesh.cp": 1, "phase": (grown,)}
    problem = Problem(graph=GRAPH, cluster=CLUSTER, global_batch=4, constraints=constraints, all_devices=True)
    found = plan_phases(problem, steps, plan)
    total = sum(p.steps * p.step_time_s + p.change_s for p in found.phases)
    assert found.total_s == pytest.approx(total)
    assert found.bound_s <= found.total_s
    if found.unchanged_s is not None:
        assert found.total_s <= found.unchanged_s * (1 + 1e-9)
    first, second = found.phases
    assert (first.strategy.batch.global_, second.strategy.batch.global_) == (4, 4096)
    assert strategy_at(found.first.strategy, 11).mesh == second.strategy.mesh
    if steps == 12:
        assert second.strategy.mesh == first.strategy.mesh, "two steps pay for no change"


def test_a_phase_is_priced_with_the_graph_of_its_own_length() -> None:
    base = replace(BASE, shard=Shard(zero=1))
    whole = replace(base, phases=(LONG, Phase(from_step=21, keys=(("batch.seq_len", 32),))))
    prices = phase_prices(Expander(graph=LENGTHS, cluster=CLUSTER), whole)
    assert [(price.from_step, price.seq_len) for price in prices] == [(1, 32), (11, 1024), (21, 32)]
    for price, graph, batch in zip(prices, (GRAPH, LONGER, GRAPH), (32, 16, 16), strict=True):
        alone = score(graph, CLUSTER, replace(base, batch=Batch(global_=batch, micro=2)))
        assert price.prediction == alone


def test_phases_of_longer_sequences_are_planned_each_with_its_own_graph() -> None:
    fixed: dict[str, object] = {"mesh.pp": 1, "mesh.cp": 1, "mesh.tp": 1, "recompute.mode": "none"}
    short = Problem(graph=LENGTHS, cluster=CLUSTER, global_batch=32, constraints=fixed, all_devices=True)
    found = plan_phases(replace(short, constraints={**fixed, "phase": (LONG,)}), 100_000, plan)
    alone = [plan(one) for one in (short, replace(short, graph=LONGER, global_batch=16))]
    assert [phase.step_time_s for phase in found.phases] == [one.prediction.step_time_s for one in alone]
    later = strategy_at(found.first.strategy, 11)
    assert later.batch.seq_len == 1024
    assert score(LENGTHS, CLUSTER, later).step_time_s == found.phases[1].step_time_s


@pytest.mark.parametrize(
    ("tokens", "keys", "words"),
    [
        (64, {}, "from step 11: batch.seq_len = 64: .* captured with sequences of 32 and 1024"),
        (
            1024,
            {"mesh.cp": 3, "mesh.dp_shard": 1, "shard.zero": 0},
            "from step 11: mesh.cp = 3 does not divide .* 1024",
        ),
    ],
)
def test_what_a_length_makes_illegal_is_said_with_its_step(
    tokens: int, keys: dict[str, int], words: str
) -> None:
    wrong = Phase(from_step=11, keys=(("batch.seq_len", tokens), *keys.items()))
    with pytest.raises(UserError, match=words):
        score(LENGTHS, CLUSTER, replace(BASE, phases=(wrong,)))


def test_ranks_wait_as_long_as_the_longest_phase_takes() -> None:
    failures = Failures(mtbf_hours_per_device=1000.0, storage_bytes_per_s=1e9)
    short, long = (toy_transformer(hidden=1024, heads=8, seq=seq) for seq in (128, 1024))
    problem = Problem(
        graph=replace(short, other_lengths=(long,)), cluster=replace(CLUSTER, failures=failures), global_batch=32,
        constraints={"mesh.dp_shard": 4, "recompute.mode": "none", "batch.micro": 4},
    )  # fmt: skip
    alone = plan(problem).strategy.recovery.timeout_s
    both = plan(replace(problem, constraints={**problem.constraints, "phase": (LONG,)})).strategy
    assert both.recovery.timeout_s > alone > 10.0
    last = plan_recovery(
        Expander(long, problem.cluster), later := strategy_at(both, 11), score(long, CLUSTER, later)
    )
    assert last is not None
    assert both.recovery.timeout_s == last.rule(last.best).timeout_s


def test_a_strategy_that_fits_one_phase_alone_is_changed_for_the_next() -> None:
    short, long = (toy_transformer(layers=8, hidden=1024, heads=8, seq=seq) for seq in (128, 32768))
    alone = [
        plan(
            Problem(
                graph=graph,
                cluster=CLUSTER,
                global_batch=64,
                constraints={"mesh.cp": 1, "mesh.pp": 1, "mesh.tp": 1},
            )
        )
        for graph in (short, long)
    ]
    problem = Problem(
        graph=replace(short, other_lengths=(long,)), cluster=CLUSTER, global_batch=64,
        constraints={"mesh.cp": 1, "mesh.pp": 1, "mesh.tp": 1, "phase": (Phase(from_step=11, keys=(("batch.seq_len", 32768),)),)},
    )  # fmt: skip
    kept = with_length(alone[0].strategy, 32768)
    assert not score(problem.graph, CLUSTER, kept).feasible, "what is said here is of one that does not"
    found = plan_phases(problem, 1000, plan)
    assert found.unchanged_s is None
    assert [phase.step_time_s for phase in found.phases] == [one.prediction.step_time_s for one in alone]
    assert found.bound_s <= found.total_s < float("inf")
