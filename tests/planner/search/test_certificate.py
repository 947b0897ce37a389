"""What "optimal" speaks of: every key of the strategy file is named, with what was done about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoparallel.errors import UserError
from autoparallel.planner.check import constraint_problems
from autoparallel.planner.explain.break_even import (
    break_evens,
    compressed,
    gathered,
    seconds_at,
    uncompressed,
)
from autoparallel.planner.explain.choice import complexity
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.space.certificate import every_key, space_of
from autoparallel.planner.strategy.schema import SECTIONS, StrategySchema, keys_of
from autoparallel.profiles.load import load_cluster
from tests.planned import plan
from tests.toy_graphs import toy_transformer

PROBLEM = Problem(
    graph=toy_transformer(layers=6, hidden=1024, heads=8, seq=512, vocab=4096),
    cluster=load_cluster("a100-pcie-80gb:2x4"),
    global_batch=32,
)


def test_every_key_of_the_file_is_named_once() -> None:
    named = [one.key for one in space_of(PROBLEM)]
    assert len(named) == len(set(named))
    sections = set(StrategySchema.model_fields) - {"schema_", "problem", "predicted", "search"}
    assert {key.partition(".")[0] for key in named} == sections
    for section, model in SECTIONS.items():
        assert {key for key in named if key.startswith(f"{section}.")} == {
            f"{section}.{key}" for key in keys_of(model)
        }


def test_each_key_says_what_was_done_about_it() -> None:
    fixed = replace(PROBLEM, constraints={"mesh.tp": 2, "pipeline.schedule": "zbv"})
    free, held = ({one.key: one for one in space_of(problem)} for problem in (PROBLEM, fixed))
    for one in free.values():
        assert one.how in ("searched", "stated") or one.how.startswith("left-out: "), one
    assert {key for key in every_key() if held[key].how == "fixed"} == {"mesh.tp", "pipeline.schedule"}
    assert all(one.how == "stated" for key, one in free.items() if key.startswith("execution."))
    assert free["pipeline.schedule"].how == "searched"
    lossy = {one.key: one for one in space_of(replace(PROBLEM, allow_lossy=True))}
    assert free["grad_sync.compression"].how.startswith("left-out")
    assert lossy["grad_sync.compression"].how == "searched"
    assert (free["grad_sync.weights"].how[:8], lossy["grad_sync.weights"].how) == ("left-out", "searched")


def test_offloading_is_left_out_where_a_hosts_memory_is_not_stated() -> None:
    def told(cluster: str) -> list[str]:
        problem = replace(PROBLEM, cluster=load_cluster(cluster))
        return [one.how for one in space_of(problem) if one.key.startswith("offload.")]

    assert told("a100-pcie-80gb:2x4") == ["searched"] * 2
    assert all("host.memory_bytes" in how for how in told("l40s:1x4"))


def test_compression_pays_below_its_break_even_and_not_above() -> None:
    fixed: dict[str, object] = {"mesh.tp": 1, "mesh.pp": 1}
    strategy = plan(replace(PROBLEM, constraints=fixed, all_devices=True)).strategy
    found = break_evens(replace(PROBLEM, lossy=("int8", "topk:0.01")), strategy)
    assert [one.method for one in found] == ["int8", "topk:0.01"]
    assert {one.level for one in found} == {PROBLEM.cluster.levels[1].name}
    for one in found:
        assert 0 < one.bytes_per_s < float("inf")
        coded = compressed(strategy, ("none", one.method))
        for factor, pays in ((0.8, True), (1.25, False)):
            share = factor * one.bytes_per_s / one.now_bytes_per_s
            plain = [seconds_at(PROBLEM, other, 1, share) for other in uncompressed(PROBLEM, strategy)]
            assert (seconds_at(PROBLEM, coded, 1, share) < min(plain)) == pays, one


def test_gathers_of_fewer_bits_pay_below_their_break_even_and_not_above() -> None:
    fixed = {"mesh.tp": 1, "mesh.pp": 1, "shard.zero": 3, "shard.secondary": 0}
    strategy = plan(replace(PROBLEM, constraints=fixed)).strategy
    (one,) = [
        b for b in break_evens(replace(PROBLEM, lossy=("int8",)), strategy) if b.key == "grad_sync.weights"
    ]
    assert 0 < one.bytes_per_s < float("inf")
    for factor, pays in ((0.8, True), (1.25, False)):
        share = factor * one.bytes_per_s / one.now_bytes_per_s
        level = [level.name for level in PROBLEM.cluster.levels].index(one.level)
        coded, plain = (seconds_at(PROBLEM, gathered(strategy, m), level, share) for m in ("int8", "none"))
        assert (coded < plain) == pays, one


def test_only_methods_that_are_allowed_are_chosen() -> None:
    problem = replace(
        PROBLEM, allow_lossy=True, lossy=("int4",), constraints={"mesh.pp": 1, "mesh.tp": 1}, all_devices=True
    )
    found = plan(problem)
    assert {m for m in found.strategy.grad_sync.compression if m != "none"} == {"int4"}
    assert found.status == "optimal"
    other = replace(problem, lossy=("int8",))
    assert list(constraint_problems(other, found.strategy)) == ["compression by int4, but int8 was allowed"]
    with pytest.raises(UserError, match="int3"):
        replace(problem, lossy=("int3",))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("batch", [8, 32])
def test_what_is_chosen_within_a_share_of_the_optimum_is_no_less_simple(batch: int) -> None:
    problem = replace(PROBLEM, global_batch=batch, constraints={"recompute.mode": "none"})
    optimum, chosen = plan(problem), plan(problem, within=0.05, rivals=True)
    assert optimum.optimum is None
    assert not optimum.broken
    assert chosen.optimum_s == pytest.approx(optimum.prediction.step_time_s)
    assert chosen.prediction.step_time_s <= optimum.prediction.step_time_s * 1.05 * (1 + 1e-6)
    assert complexity(chosen.strategy, chosen.prediction) <= complexity(optimum.strategy, optimum.prediction)
    assert (chosen.optimum is None) == (chosen.strategy == optimum.strategy)
    assert bool(chosen.instead) == (chosen.optimum is not None)
    assert chosen.lower_bound_s <= chosen.optimum_s
