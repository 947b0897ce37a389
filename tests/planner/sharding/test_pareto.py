"""The Pareto set of a tensor plan's Pareto set: dearer memory is used less, and a point is what its entries say."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.score import score
from autoparallel.planner.sharding.pareto import FASTEST, LEANEST, whole_cost
from autoparallel.planner.sharding.plan import TensorPlan
from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Pipeline, Shard, Strategy, TensorRule
from autoparallel.profiles.load import load_cluster
from tests.toy_graphs import toy_transformer

CLUSTER = load_cluster("h100-sxm:1x2")
GRAPHS = {
    "wide": toy_transformer(layers=2, hidden=1024, heads=2, seq=512, vocab=4096),
    "tied": toy_transformer(layers=2, hidden=512, heads=4, seq=128, vocab=512, tied=True),
}
EXPANDERS = {name: Expander(graph, CLUSTER) for name, graph in GRAPHS.items()}
PRICES = (FASTEST, 20.0, LEANEST)  # nanoseconds per KiB


def strategy(*, sequence: bool = False, rules: tuple[TensorRule, ...] = ()) -> Strategy:
    return Strategy(
        batch=Batch(global_=2, micro=1), mesh=Mesh(tp=2), shard=Shard(sequence_parallel=sequence),
        pipeline=Pipeline(stage_blocks=(2,)), tensor=rules, execution=Execution(kernels="eager"),
    )  # fmt: skip


def points(name: str, asked: Strategy) -> list[TensorPlan]:
    """The plan at each price, the first plan where no other is better there."""
    expander = EXPANDERS[name]
    own = expander.tensor_plan(asked)
    return [expander.works.pareto_plan(asked, price) or own for price in PRICES]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_an_entry_file_of_a_point_gives_the_point_back(name: str, sequence: bool) -> None:
    asked = strategy(sequence=sequence)
    again = Expander(GRAPHS[name], CLUSTER)
    found = {plan.rules: plan for plan in points(name, asked)}
    assert sequence or len(found) > 1
    for rules, plan in found.items():
        assert again.tensor_plan(replace(asked, tensor=rules)) == plan, rules


@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_dearer_memory_is_used_less(name: str) -> None:
    priced = [whole_cost(GRAPHS[name], plan) for plan in points(name, strategy())[1:]]
    for cheap, dear in pairwise(priced):
        assert dear.held_kib + dear.kept_kib <= (cheap.held_kib + cheap.kept_kib) * 1.002, priced


def test_the_points_differ_in_time_and_in_what_a_device_holds_and_keeps() -> None:
    asked, expander = strategy(), EXPANDERS["wide"]
    fastest, _, leanest = points("wide", asked)
    times, bytes_kept = [], []
    for rules in (fastest.rules, (), leanest.rules):
        said = replace(asked, tensor=rules)
        times.append(score(GRAPHS["wide"], CLUSTER, said, expander).step_time_s)
        bytes_kept.append(sum(expander.work(said, b, "none").saved_bytes for b in range(3)))
    assert times[0] < times[1] < times[2]
    assert bytes_kept[0] >= bytes_kept[1] > bytes_kept[2]


def test_a_replica_that_an_entry_asks_for_is_among_the_entries_of_the_plan() -> None:
    whole = TensorRule(module="layers.*.mlp.up", params=(("weight", "replicate"),))
    plan = EXPANDERS["wide"].tensor_plan(strategy(rules=(whole,)))
    assert dict(plan.blocks[1].params)["mlp.up.weight"] == "R"
    assert EXPANDERS["wide"].tensor_plan(strategy(rules=plan.rules)) == plan


def test_what_products_read_whole_and_in_shares_is_kept_twice() -> None:
    rows = TensorRule(
        module="layers.*.attn.q", params=(("weight", "shard(1)"),), inputs=(("0", "shard(2)"),),
        outputs=("shard(2)",),
    )  # fmt: skip
    expander = EXPANDERS["wide"]
    own, split = (expander.work(strategy(rules=r), 1, "none").saved_bytes for r in ((), (rows,)))
    share = 512 * 1024 * 2 // 2  # half of the normalised hidden state, beside the whole that k and v read
    assert split == own + share
