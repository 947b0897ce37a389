"""Irregular networks and nodes short of a device: brute force over placements, bounds, and what a person expects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoparallel.costmodel.collectives import collective_s
from autoparallel.costmodel.links import routes_of
from autoparallel.costmodel.program import Axis, Collective, CollectiveOp
from autoparallel.costmodel.topology import best_placed
from autoparallel.errors import UserError
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.heterogeneous.assign import Talk, assign, traffic_s
from autoparallel.planner.heterogeneous.cuts import cut_reaches
from autoparallel.planner.heterogeneous.irregular import every_part
from autoparallel.planner.heterogeneous.placements import MOST_SEQUENCES, node_flows, reaches, sequences
from autoparallel.planner.problem import Problem
from autoparallel.planner.score import score
from autoparallel.planner.search.bounds.outer import bound_variants, expand_quickly, expand_shapes, outer_of
from autoparallel.planner.search.evaluate import evaluate
from autoparallel.planner.search.partition.quick import even_partition
from autoparallel.planner.search.space.build import build_space, variants
from autoparallel.planner.search.space.candidates import candidate, strategy_of
from autoparallel.planner.strategy.types import Execution, Strategy
from autoparallel.profiles import Cluster, cluster_from_dict
from autoparallel.profiles.hardware import Network
from autoparallel.profiles.parts import placed
from autoparallel.report.placement import places
from tests.clusters import cluster_file, racks, ring
from tests.planned import plan
from tests.toy_graphs import toy_transformer

SMALL = toy_transformer(layers=2, hidden=512, heads=4, seq=256, vocab=512)
LARGE = toy_transformer(layers=8, hidden=4096, heads=32, seq=2048, vocab=1024)
EAGER = Execution(kernels="eager")
FEW: dict[str, Any] = {
    "recompute__mode": "none",
    "mesh__cp": 1,
    "mesh__tp": 1,
    "batch__micro": 1,
}  # what is left takes no time


LITTLE_WORK = 20.0  # less than the bound of placements alone takes


def problem_of(cluster: Cluster, graph: Any = SMALL, batch: int = 8, **constraints: object) -> Problem:
    named = {key.replace("__", "."): value for key, value in constraints.items()}
    return Problem(graph=graph, cluster=cluster, global_batch=batch, constraints=named, execution=EAGER)


def network_of(cluster: Cluster) -> Network:
    assert cluster.network is not None
    return cluster.network


def some_strategies(problem: Problem, rng: np.random.Generator, most: int) -> list[Strategy]:
    """Variants of the space with evenly divided blocks."""
    space = build_space(problem)
    every = variants(space, np.arange(len(space.shapes)))
    rows = rng.permutation(len(every))[:most]
    found = [candidate(space, every, int(row)) for row in rows]
    blocks = len(problem.graph.repeated_positions)
    return [strategy_of(problem, one, even_partition(blocks, one.chunks)) for one in found]


def test_no_placement_of_any_strategy_beats_an_optimal_plan() -> None:
    """Every mesh and order of a small space, on every order of the nodes."""
    cluster = ring([4e9, 1e9, 4e9, 2e8], per_node=1)
    fixed = problem_of(cluster, shard__zero=1, **FEW)
    found = plan(fixed)
    assert found.status == "optimal"
    best, count = inf, 0
    strategies = some_strategies(fixed, np.random.default_rng(0), 10**6)
    for nodes in permutations(range(4)):
        expander = Expander(graph=SMALL, cluster=placed(cluster, nodes))
        for strategy in strategies:
            best = min(best, evaluate(expander, strategy).step_time_s)
            count += 1
    assert count > 600
    assert found.prediction.step_time_s <= best * (1 + 2e-6), (found.strategy, count)


@settings(max_examples=2)
@given(
    rates=st.lists(st.sampled_from([2e8, 1e9, 4e9]), min_size=4, max_size=4), seed=st.integers(0, 99),
    per_node=st.sampled_from([1, 2, 3]), order=st.permutations(range(4)),
)  # fmt: skip
def test_no_bound_exceeds_the_simulation_on_any_placement(
    rates: list[float], seed: int, per_node: int, order: Sequence[int]
) -> None:
    rng = np.random.default_rng(seed)
    constraints: dict[str, object] = {"mesh.placement": tuple(order), "mesh.per_node": per_node}
    (part,) = every_part(replace(problem_of(ring(rates, per_node=per_node)), constraints=constraints))
    outer = outer_of(part.problem)
    assert outer is not None
    rows = rng.permutation(len(outer.space.shapes))[:24]
    every, bounds = expand_shapes(outer, rows, inf, memory=True)
    again, quick = expand_quickly(outer, rows)
    assert len(every) == len(again)
    for row in rng.permutation(len(every))[:8]:
        chosen = candidate(outer.space, every, int(row))
        partition = even_partition(len(outer.chain.kinds), chosen.chunks)
        found = evaluate(outer.book.expander, strategy_of(part.problem, chosen, partition))
        limit_s, shown = found.step_time_s * (1 + 1e-9), f"{chosen}\n{part.problem.cluster.network}"
        assert outer.bounds.time_s[int(every.shape[row])] <= limit_s, shown
        assert not np.isfinite(quick.time_s[row]) or quick.time_s[row] <= limit_s, shown
        tight = replace(outer, capacity_bytes=float(found.peak_bytes))
        assert bound_variants(tight, every.take(np.array([row])), inf).time_s[0] <= limit_s, shown
        assert bounds.memory_bytes[row] <= found.peak_bytes + 1


def test_a_pipeline_goes_round_the_slow_link_of_a_ring() -> None:
    cluster = ring([25e9, 2.5e7, 25e9, 25e9], per_node=1)
    found = plan(problem_of(cluster, LARGE, 16, mesh__pp=4, pipeline__schedule="1f1b")).strategy
    assert found.mesh.placement in ((1, 0, 3, 2), (2, 3, 0, 1))
    regular = plan(problem_of(ring([25e9] * 4, per_node=1), LARGE, 16, mesh__pp=4, pipeline__schedule="1f1b"))
    again = score(LARGE, cluster, found)
    assert again.step_time_s == pytest.approx(regular.prediction.step_time_s, rel=1e-3)


@pytest.mark.parametrize("inside", ["dp_shard", "pp"])
def test_what_talks_most_stays_in_its_rack(inside: str) -> None:
    """With long sequences messages between stages outweigh gradients; with few tokens gradients do."""
    hidden, seq = (2048, 64) if inside == "dp_shard" else (256, 16384)
    graph = toy_transformer(layers=4, hidden=hidden, heads=2, seq=seq, vocab=256)
    cluster = racks([0, 1, 1, 0], 25e9, 1e9, per_node=1)
    named = {"mesh__pp": 2, "mesh__dp_shard": 2, "mesh__dp_replicate": 1, "batch__micro": 1}
    mesh = plan(problem_of(cluster, graph, 16, shard__zero=1, **named)).strategy.mesh
    pairs = {frozenset(mesh.placement[:2]), frozenset(mesh.placement[2:])}
    inner = [axis for axis in mesh.order if axis in ("pp", "dp_shard")][-1]
    in_racks = pairs == {frozenset({0, 3}), frozenset({1, 2})}
    assert in_racks == (inner == inside), mesh


def test_a_part_is_searched_for_each_placement_that_some_mesh_could_want() -> None:
    names = [part.nodes for part in every_part(problem_of(racks([0, 1, 0, 1], 4e9, 4e8)))]
    assert names == [(0, 2, 1, 3), (0, 1, 2, 3)]
    star = every_part(problem_of(racks([0, 0, 0, 0], 4e9, 4e8)))
    assert [part.nodes for part in star] == [(0, 1, 2, 3)]


def test_a_named_placement_is_kept_and_one_that_cannot_be_is_refused() -> None:
    cluster = racks([0, 1, 0, 1], 4e9, 4e8)
    named = problem_of(cluster, mesh__placement=(3, 1), **FEW)
    found = plan(named)
    assert found.strategy.mesh.placement == (3, 1)
    assert found.prediction.devices == 4
    with pytest.raises(UserError, match=r"mesh\.placement = \[3, 9\]"):
        score(SMALL, cluster, replace(found.strategy, mesh=replace(found.strategy.mesh, placement=(3, 9))))


def test_one_node_of_an_irregular_network_is_planned_as_one_that_stands_alone() -> None:
    cluster = ring([4e9, 4e8, 4e9])
    looped = {"mesh__pp": 2, "pipeline__virtual_stages": 2}  # its last stages send to its first ranks
    strategy = plan(problem_of(cluster, LARGE, mesh__placement=(0,), **FEW, **looped)).strategy
    assert strategy.mesh.placement == (0,)
    assert all(place.link is None for place in places(strategy, cluster))


def short(have: Sequence[int], per_node: int = 4) -> Cluster:
    table = cluster_file(len(have), (), per_node=per_node)
    del table["link"]
    outer = {"name": "fabric", "size": len(have) * per_node, "bytes_per_s": 2e9, "latency_s": 1e-5}
    table["level"] = [*table["level"], outer]
    table["group"][0]["short"] = {str(i): n for i, n in enumerate(have) if n < per_node}
    return cluster_from_dict(table, "test")


def test_a_short_node_is_used_as_far_as_that_helps() -> None:
    cluster = short([4, 3, 4])
    found = plan(problem_of(cluster, batch=24, **FEW))
    mesh = found.strategy.mesh
    assert found.prediction.step_time_s == pytest.approx(score(SMALL, cluster, found.strategy).step_time_s)
    each = [
        plan(part.problem).prediction.step_time_s for part in every_part(problem_of(cluster, batch=24, **FEW))
    ]
    assert len(each) == 3
    assert found.prediction.step_time_s == pytest.approx(min(each), rel=1e-5)
    assert mesh.placement
    assert mesh.per_node in (3, 4)


def test_a_cluster_of_whole_nodes_is_planned_as_if_nobody_had_counted() -> None:
    whole, counted = short([2, 2], per_node=2), racks([0, 0], 4e9, 1.0, per_node=2)
    assert plan(problem_of(whole, **FEW)).strategy.mesh.placement == ()
    found = plan(problem_of(counted, **FEW))
    assert found.prediction.step_time_s == pytest.approx(
        plan(problem_of(whole, **FEW)).prediction.step_time_s, rel=1e-6
    )


LINKS = st.lists(st.sampled_from([1e9, 2e9, 1e10]), min_size=5, max_size=5)


@settings(max_examples=60)
@given(
    rates=st.lists(st.sampled_from([2e8, 1e9, 4e9, 4e11]), min_size=3, max_size=3), per_node=st.sampled_from([2, 3, 4, 6]),
    size=st.integers(2, 9), stride=st.integers(1, 4), op=st.sampled_from(list(CollectiveOp)), racked=st.booleans(),
)  # fmt: skip
def test_no_placement_is_faster_than_bounds_have_it_even_where_groups_do_not_line_up_with_nodes(
    rates: list[float], per_node: int, size: int, stride: int, op: CollectiveOp, racked: bool
) -> None:
    assume(size * stride <= 3 * per_node)
    cluster = (
        racks([0, 1, 0], rates[0], rates[1], per_node=per_node) if racked else ring(rates, per_node=per_node)
    )
    network, axis = network_of(cluster), Axis(name="a", size=size, stride=stride)
    every = sequences(network)
    assert every is not None
    loose = replace(network, reach=reaches(network, every), unplaced=True)
    best, one = best_placed(replace(cluster, network=loose)), Collective(op=op, axes=("a",), size_bytes=10**7)
    for nodes in every.tolist():
        assert collective_s(one, (axis,), best) <= collective_s(one, (axis,), placed(cluster, nodes)) * (
            1 + 1e-9
        )


@settings(max_examples=15)
@given(
    rates=LINKS, homes=st.lists(st.integers(0, 2), min_size=5, max_size=5), trunk=st.sampled_from([5e8, 4e9])
)
def test_cuts_let_through_no_less_than_any_placement_gets(
    rates: list[float], homes: list[int], trunk: float
) -> None:
    for cluster in (ring(rates, per_node=1), racks(homes, rates[0], trunk, per_node=1)):
        network = network_of(cluster)
        every = sequences(network)
        assert every is not None
        for best, cut in zip(reaches(network, every), cut_reaches(network), strict=True):
            assert (best.pattern, best.fan, best.groups) == (cut.pattern, cut.fan, cut.groups)
            assert best.bytes_per_s <= cut.bytes_per_s * (1 + 1e-9), (best, cut)
            assert best.latency_s >= cut.latency_s * (1 - 1e-9)


def test_distinct_placements_give_all_that_any_order_of_the_nodes_gives() -> None:
    network = network_of(racks([0, 1, 0, 2, 1], 4e9, 1e9, per_node=1))
    every, routes = sequences(network), routes_of(network.fabric)
    assert every is not None
    assert len(every) < 120
    rng = np.random.default_rng(0)
    for _ in range(4):
        told = (Talk(flows=rng.integers(0, 3, (5, 5)) * (1.0 - np.eye(5)), bytes=1.0),)
        best = min(traffic_s(network, told, nodes) for nodes in permutations(range(5)))
        assert min(traffic_s(network, told, row) for row in every) == pytest.approx(best)
    assert routes.nodes == 5


@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), kind=st.sampled_from(["ring", "racks"]))
def test_the_solver_places_blocks_as_well_as_brute_force(seed: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    cluster = (
        ring(rng.choice([1e9, 5e9], 5), per_node=1)
        if kind == "ring"
        else racks(rng.integers(0, 2, 5), 4e9, 1e9)
    )
    network = network_of(cluster)
    told = [
        Talk(flows=node_flows(pattern, fan, groups, 5)[np.ix_(turn, turn)], bytes=float(rng.integers(1, 9)))
        for pattern, fan, groups in (("ring", 2, 2), ("chain", 5, 1), ("all", 3, 1))
        for turn in (rng.permutation(5),)
    ]
    found = traffic_s(network, told, assign(network, told))
    assert found == pytest.approx(min(traffic_s(network, told, p) for p in permutations(range(5))), rel=1e-5)


def test_more_nodes_than_can_be_tried_are_placed_by_the_solver_under_a_bound() -> None:
    cluster = racks([i % 4 for i in range(16)], 2e10, 2e9, per_node=1)
    assert sequences(network_of(cluster)) is None
    assert MOST_SEQUENCES < 10**7
    named = {
        "mesh__pp": 4,
        "batch__micro": 1,
        "recompute__mode": "none",
        "mesh__cp": 1,
        "mesh__dp_replicate": 1,
    }
    problem = problem_of(cluster, LARGE, 16, pipeline__schedule="1f1b", mesh__tp=1, shard__zero=1, **named)
    hurried = plan(problem, most_work=LITTLE_WORK)  # of which the bound leaves some to placements
    assert hurried.strategy.mesh.placement
    found = plan(problem)
    assert found.prediction.step_time_s <= hurried.prediction.step_time_s
    assert found.lower_bound_s <= found.prediction.step_time_s
    assert found.prediction.step_time_s == pytest.approx(score(LARGE, cluster, found.strategy).step_time_s)
    asis = replace(found.strategy, mesh=replace(found.strategy.mesh, placement=tuple(range(16))))
    assert score(LARGE, cluster, asis).step_time_s > 1.2 * found.prediction.step_time_s


def test_unlike_devices_on_an_irregular_network_are_placed_inside_their_groups() -> None:
    table = cluster_file(4, [("node-0", "a", 25e9), ("node-2", "a", 25e9), ("node-1", "b", 25e9), ("node-3", "b", 25e9),
                             ("a", "b", 1e9)], per_node=1)  # fmt: skip
    kinds = ("a100-sxm-40gb", "v100-sxm2-32gb")
    table["group"] = [{"device": name, "nodes": 2, "devices_per_node": 1} for name in kinds]
    cluster = cluster_from_dict(table, "test")
    half = Execution(dtype="fp16", param_dtype="fp16")
    named = {"mesh.groups": (0, 0, 1, 1), "pipeline.schedule": "1f1b"}
    problem = Problem(graph=LARGE, cluster=cluster, global_batch=16, constraints=named, execution=half)
    found = plan(problem)
    assert found.strategy.mesh.placement in ((1, 0, 2, 3), (0, 1, 3, 2))  # one message each way on the trunk
    assert found.prediction.step_time_s == pytest.approx(score(LARGE, cluster, found.strategy).step_time_s)
    alone = plan(replace(problem, constraints={"mesh.groups": (0,), "mesh.dp_shard": 2, "batch.micro": 1}))
    assert sorted(alone.strategy.mesh.placement) == [0, 1]
