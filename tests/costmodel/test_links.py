"""Irregular networks: the same prices as levels where they are regular, and the laws of links."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoparallel.costmodel.collectives import collective_s
from autoparallel.costmodel.links import ALL, CHAIN, LOOP, RING, figure_of, flows, narrowest, routes_of
from autoparallel.costmodel.program import Axis, Collective, CollectiveOp
from autoparallel.profiles import Cluster, cluster_from_dict
from autoparallel.profiles.hardware import Network
from tests.clusters import NVLINK, cluster_file, on_cables, racks, ring

OPS = list(CollectiveOp)


def network_of(cluster: Cluster) -> Network:
    assert cluster.network is not None
    return cluster.network


def regular(nodes: int, per_node: int, port: float, nics: int) -> Cluster:
    """What a switch with equal ports is: two levels."""
    table = cluster_file(nodes, (), per_node=per_node)
    del table["link"]
    outer = {"name": "network", "size": nodes * per_node, "bytes_per_s": port / per_node, "latency_s": 1e-5}
    table["level"] = [{**NVLINK, "size": per_node}, outer | ({"nics": nics} if nics else {})]
    return cluster_from_dict(table, "test")


@settings(max_examples=25)
@given(
    nodes=st.sampled_from([2, 3, 4]), per_node=st.sampled_from([2, 4]), nics=st.sampled_from([0, 1, 2]),
    op=st.sampled_from(OPS), size=st.sampled_from([1, 10**5, 10**8]), inner=st.sampled_from([1, 2, 4]),
    outer=st.booleans(),
)  # fmt: skip
def test_a_switch_with_equal_ports_costs_what_its_levels_cost(
    nodes: int, per_node: int, nics: int, op: CollectiveOp, size: int, inner: int, outer: bool
) -> None:
    assume(per_node % inner == 0)
    star = racks([0] * nodes, 8e10, 1e15, per_node=per_node, **({"nics": nics} if nics else {}))
    axis = Axis(name="a", size=nodes * per_node // inner if outer else per_node // inner, stride=inner)
    one = Collective(op=op, axes=("a",), size_bytes=size)
    levels = collective_s(one, (axis,), regular(nodes, per_node, 8e10, nics))
    assert collective_s(one, (axis,), star) == pytest.approx(levels, rel=1e-9)


def test_a_chain_along_a_ring_avoids_its_slow_link_and_a_ring_does_not() -> None:
    network = network_of(ring([25e9, 25e9, 25e9, 2.5e9], per_node=1))
    four = (Axis(name="", size=4, stride=1),)
    routes = routes_of(network.fabric)
    rates = {
        pattern: figure_of(
            routes, flows(four, 1, pattern, network.devices), (0, 1, 2, 3), pattern
        ).bytes_per_s
        for pattern in (CHAIN, LOOP, RING)
    }
    assert rates == {CHAIN: 25e9, LOOP: 2.5e9, RING: 2.5e9}
    assert set(narrowest(network, four, 1, RING)) == {"node-3", "node-0"}


def test_groups_that_share_a_trunk_share_its_rate() -> None:
    apart = network_of(racks([0, 0, 1, 1], 1e11, 1e10, per_node=2))
    routes = routes_of(apart.fabric)
    inside = flows((Axis(name="", size=2, stride=2),), 1, RING, apart.devices)  # nodes 0 and 1, and 2 and 3
    across = flows((Axis(name="", size=2, stride=4),), 1, RING, apart.devices)  # nodes 0 and 2, and 1 and 3
    assert figure_of(routes, inside, (0, 1, 2, 3), RING).bytes_per_s == 1e11 / 2
    assert (
        figure_of(routes, across, (0, 1, 2, 3), RING).bytes_per_s == 1e10 / 4
    )  # two nodes of two devices each way
    assert figure_of(routes, across, (0, 2, 1, 3), RING).bytes_per_s == 1e11 / 2
    everyone = flows((Axis(name="", size=8, stride=1),), 2, ALL, apart.devices)
    crossing = 4 * 4 / (8 - 2)  # of each device's rate, what leaves for the other rack
    assert figure_of(routes, everyone, (0, 1, 2, 3), ALL).bytes_per_s == pytest.approx(1e10 / crossing)


def test_equal_paths_share_the_traffic() -> None:
    network = network_of(ring([8e9] * 4, per_node=1))
    demand = flows((Axis(name="", size=2, stride=2),), 1, CHAIN, network.devices)
    found = figure_of(routes_of(network.fabric), demand, (0, 1, 2, 3), CHAIN)
    assert found.bytes_per_s == 8e9  # both messages, half of each either way round
    assert found.latency_s == pytest.approx(1e-5)


RATES = st.sampled_from([1e9, 3e9, 1e10, 4e10])


@settings(max_examples=25)
@given(
    rates=st.lists(RATES, min_size=5, max_size=5), faster=st.integers(0, 4), times=st.sampled_from([1.5, 10.0]),
    op=st.sampled_from(OPS), shape=st.sampled_from([(4, 1), (8, 1), (2, 1), (4, 2), (2, 4), (2, 2)]),
    order=st.permutations(range(4)), wraps=st.booleans(),
)  # fmt: skip
def test_a_faster_link_never_costs_time(
    rates: list[float], faster: int, times: float, op: CollectiveOp, shape: tuple[int, int], order: list[int],
    wraps: bool,
) -> None:  # fmt: skip
    ends = [
        ("node-0", "node-1"),
        ("node-1", "leaf"),
        ("node-2", "leaf"),
        ("node-3", "node-0"),
        ("leaf", "node-3"),
    ]

    def seconds(speeds: list[float]) -> float:
        cluster = on_cables(4, [(*pair, rate) for pair, rate in zip(ends, speeds, strict=True)])
        placed = replace(cluster, network=replace(network_of(cluster), placement=tuple(order)))
        axis = Axis(name="pp", size=shape[0], stride=shape[1])
        one = Collective(op=op, axes=("pp",), size_bytes=10**7, wraps=wraps and op is CollectiveOp.SEND)
        return collective_s(one, (axis,), placed)

    more = [rate * times if i == faster else rate for i, rate in enumerate(rates)]
    assert seconds(more) <= seconds(rates) * (1 + 1e-12)
