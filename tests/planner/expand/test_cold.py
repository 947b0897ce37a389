"""Embedding tables in tiers: what moves, what is held where, and what it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel.costmodel.prediction import Prediction
from autoparallel.costmodel.program import ActionKind
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.expand.tables import find_tables
from autoparallel.planner.score import score
from autoparallel.planner.strategy.types import (
    Batch,
    EmbeddingAccess,
    EmbeddingRule,
    Execution,
    Mesh,
    Pipeline,
    Shard,
    Strategy,
)
from autoparallel.profiles.load import load_cluster
from tests.toy_tables import toy_recommender

ROWS = 1_000_000
GRAPH = toy_recommender(ROWS, 50_000, ROWS)
ONE_NODE, FOUR_NODES = load_cluster("a100-sxm-80gb:1x8"), load_cluster("a100-sxm-80gb:4x8")
TIERS = st.sampled_from(["sharded", "parameter-server"])


def strategy(
    tier: str, hot: int, *, law: str = "uniform", update: str = "auto", devices: int = 8, micro: int = 512
) -> Strategy:
    return Strategy(
        batch=Batch(global_=2 * devices * micro, micro=micro), mesh=Mesh(dp_replicate=devices),
        pipeline=Pipeline(stage_blocks=(0,)),
        embedding=(EmbeddingRule(module="tables.*", tier=tier, hot_rows=hot),),
        embedding_access=EmbeddingAccess(law=law, update=update),
    )  # fmt: skip


def priced(one: Strategy) -> Prediction:
    cluster = ONE_NODE if one.mesh.devices == 8 else FOUR_NODES
    return score(GRAPH, cluster, one)


def moved(one: Strategy) -> int:
    """Bytes of one rank's exchange, forward."""
    expander = Expander(GRAPH, ONE_NODE)
    links = [block for block, _ in expander.program(one).stages[0].blocks if block.name == "cold rows"]
    return links[0].saved_bytes if links else 0


def test_tables_are_found_by_what_they_are() -> None:
    assert [(t.module, t.rows, t.lookups.at(3)) for t in find_tables(GRAPH)] == [
        ("tables.0", ROWS, 3), ("tables.1", 50_000, 3), ("tables.2", ROWS, 3),
    ]  # fmt: skip


@pytest.mark.parametrize("tier", ["sharded", "parameter-server"])
def test_all_rows_hot_is_the_price_of_replicas(tier: str) -> None:
    hot = strategy(tier, ROWS)
    assert priced(hot) == priced(replace(hot, embedding=())) == priced(strategy("device", 0))


@settings(max_examples=25)
@given(
    tier=TIERS,
    law=st.sampled_from(["uniform", "zipf:0.9", "zipf:1.3"]),
    hot=st.lists(st.integers(0, ROWS), min_size=2, max_size=2),
)
def test_more_hot_rows_never_move_more_bytes(tier: str, law: str, hot: list[int]) -> None:
    few, many = sorted(hot)
    assert moved(strategy(tier, many, law=law)) <= moved(strategy(tier, few, law=law))
    assert priced(strategy(tier, many)).host_bytes <= priced(strategy(tier, few)).host_bytes


@settings(max_examples=15)
@given(tier=TIERS, low=st.floats(0.0, 1.5), high=st.floats(0.0, 1.5), devices=st.sampled_from([8, 32]))
def test_a_steeper_law_never_costs_time(tier: str, low: float, high: float, devices: int) -> None:
    low, high = sorted((low, high))
    even, steep = (
        priced(strategy(tier, 0, law=f"zipf:{e}", update="touched", devices=devices)).step_time_s
        for e in (low, high)
    )
    assert steep <= even * (1 + 1e-4)


def test_servers_hold_what_the_devices_do_not() -> None:
    cold, hot = priced(strategy("parameter-server", 0)), priced(strategy("device", 0))
    state = (2 * ROWS + 50_000) * 64 * (2 + 12)  # bf16, and fp32 master and moments
    gradients = cold.host_bytes - state
    assert 0 < gradients < 3 * 8192 * 64 * 4 + 1
    tables = sum(t.numel for t in find_tables(GRAPH))
    freed = hot.memory[0].parameters - cold.memory[0].parameters
    assert freed == 2 * tables
    assert hot.memory[0].optimizer - cold.memory[0].optimizer == 12 * tables
    assert priced(strategy("parameter-server", 0, devices=32)).host_bytes < cold.host_bytes / 3


def test_sharded_rows_are_divided_among_the_ranks() -> None:
    sharded, replicated = priced(strategy("sharded", 0)), priced(strategy("device", 0))
    bottom_and_top = 2 * 2 * 64 * 256
    held = replicated.memory[0].parameters - bottom_and_top
    assert sharded.memory[0].parameters - bottom_and_top == held / 8
    assert sharded.host_bytes == 0


def test_a_dense_optimizer_sweeps_the_rows_and_a_sparse_one_does_not() -> None:
    for tier in ("sharded", "parameter-server"):
        swept, touched = (priced(strategy(tier, 0, update=update)) for update in ("all", "touched"))
        assert dict(touched.breakdown_s)["optimizer"] < dict(swept.breakdown_s)["optimizer"]
    plain = replace(strategy("parameter-server", 0), execution=Execution(optimizer="sgd"))
    touched = replace(plain, embedding_access=EmbeddingAccess(update="touched"))
    assert priced(plain) == priced(touched)  # rows without gradient stay as they are


def test_pulls_and_pushes_stand_in_the_program() -> None:
    program = Expander(GRAPH, FOUR_NODES).program(strategy("parameter-server", 0, devices=32))
    (link,) = [block for block, _ in program.stages[0].blocks if block.name == "cold rows"]
    forward, backward = (
        [str(getattr(s, "op", getattr(s, "kind", ""))) for s in steps]
        for steps in (link.forward, link.backward_weight)
    )
    assert forward == ["all_to_all", "served"]
    assert backward == ["embedding", "all_to_all", "served"]
    assert [k.kind for k in program.stages[0].optimizer] == ["optimizer", "host_update"]
    assert ActionKind.STEP in {action.kind for action in program.ranks[0]}
    assert dict(priced(strategy("parameter-server", 0)).breakdown_s)["other"] > 0


def test_a_host_without_room_does_not_fit() -> None:
    huge = toy_recommender(10_000_000_000)
    found = score(huge, ONE_NODE, strategy("parameter-server", 0))
    assert found.excess_bytes < 0 < found.host_excess_bytes
    assert not found.feasible


def test_zero_shards_what_is_not_in_the_tables() -> None:
    one = replace(strategy("sharded", 0), mesh=Mesh(dp_shard=8), shard=Shard(zero=3))
    assert priced(one).memory[0].parameters < priced(strategy("sharded", 0)).memory[0].parameters
