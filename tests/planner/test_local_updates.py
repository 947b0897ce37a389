"""Local updates as a choice of the plan: priced, bounded, and proved against every number of islands."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoparallel.errors import UserError
from autoparallel.planner.problem import Problem
from autoparallel.planner.score import score
from autoparallel.planner.strategy.types import AXES, Batch, Mesh, Outer, Shard, Strategy
from autoparallel.profiles import Cluster, load_cluster
from tests.planned import plan
from tests.toy_graphs import toy_transformer

GRAPH = toy_transformer()
CLUSTER = load_cluster("a100-sxm-80gb:4x2")
SMALL = load_cluster("a100-sxm-80gb:2x2")
OUTSIDE_IN = ("dp_replicate", *(axis for axis in AXES if axis != "dp_replicate"))


def slowed(bytes_per_s: float, cluster: Cluster = CLUSTER) -> Cluster:
    levels = (*cluster.levels[:-1], replace(cluster.levels[-1], bytes_per_s=bytes_per_s))
    return replace(cluster, levels=levels)


def planned(cluster: Cluster, **outer: object) -> Strategy:
    problem = Problem(
        graph=GRAPH,
        cluster=cluster,
        global_batch=64,
        constraints={"batch.micro": 4, **{f"outer.{k}": v for k, v in outer.items()}},
        all_devices=True,
    )
    result = plan(problem)
    assert result.lower_bound_s <= result.prediction.step_time_s * (1 + 1e-9)
    assert result.prediction.step_time_s == pytest.approx(score(GRAPH, cluster, result.strategy).step_time_s)
    assert sum(seconds for _, seconds in result.prediction.breakdown_s) == pytest.approx(
        result.prediction.step_time_s
    )
    assert {key.key: key.how for key in result.space}["outer.algorithm"] in ("searched", "fixed", "stated")
    return result.strategy


def test_slow_networks_are_given_to_local_updates_and_only_where_that_is_allowed() -> None:
    slow = slowed(1e6, SMALL)
    assert planned(slow).outer == Outer()
    chosen = planned(slow, every=50)
    assert chosen.outer.algorithm == "diloco"
    assert chosen.mesh.order[0] == "dp_replicate"
    assert planned(slowed(1e13, SMALL), every=1).outer.algorithm == "none"


def local(**outer: object) -> Strategy:
    return Strategy(
        batch=Batch(global_=64, micro=4), mesh=Mesh(dp_replicate=4, dp_shard=2, order=OUTSIDE_IN), shard=Shard(zero=1),
        outer=Outer(algorithm="diloco", **outer),  # type: ignore[arg-type]
    )  # fmt: skip


def test_exchanges_cost_less_when_they_are_rarer_or_narrower_and_their_state_is_held() -> None:
    cluster = slowed(1e7)
    times = [score(GRAPH, cluster, local(every=n)).step_time_s for n in (1, 10, 100)]
    assert times == sorted(times, reverse=True)
    bits = [score(GRAPH, cluster, local(every=10, bits=n)).step_time_s for n in (32, 16, 8, 4)]
    assert bits == sorted(bits, reverse=True)
    alone = replace(local(), outer=Outer(), mesh=Mesh(dp_shard=2), batch=Batch(global_=16, micro=4))
    one = score(GRAPH, load_cluster("a100-sxm-80gb:1x2"), alone)
    four = score(GRAPH, cluster, local(every=10**6))
    assert four.step_time_s == pytest.approx(one.step_time_s, rel=1e-3), "an island runs as if it were alone"
    assert four.tokens == 4 * one.tokens
    assert four.memory[0].peak > one.memory[0].peak
    whole, parts = (score(GRAPH, cluster, local(fragments=n)).memory[0].peak for n in (1, 10))
    assert parts < whole


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mesh": Mesh(dp_shard=8)}, "needs replicas"),
        ({"mesh": Mesh(dp_replicate=4, dp_shard=2)}, "mesh.order with dp_replicate first"),
        ({"outer": Outer(algorithm="diloco", every=2, fragments=3)}, "outer.fragments = 3"),
    ],
)
def test_what_cannot_be_exchanged_so_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        score(GRAPH, CLUSTER, replace(local(), **change))  # type: ignore[arg-type]
