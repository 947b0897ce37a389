from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.costmodel.collectives import ALGORITHMS, collective_s
from autoparallel.costmodel.program import Axis, Collective, CollectiveOp
from autoparallel.errors import UserError
from autoparallel.profiles import Cluster, load_cluster

SPECS = (
    "a100-sxm-80gb:4x8",
    "h100-sxm:4x8",
    "gb200:36x4",
    "l40s:4x8",
    "mi300x:2x8",
    "cpu-gloo:1x4",
    "dgx-1v",
)
CLUSTERS = {spec: load_cluster(spec) for spec in SPECS}
OPS = tuple(CollectiveOp)
specs = st.sampled_from(SPECS)
ops = st.sampled_from(OPS)
message = st.integers(1, 1 << 34)


def line(size: int, stride: int = 1) -> tuple[Axis, ...]:
    return (Axis(name="d", size=size, stride=stride),)


def cost(
    op: CollectiveOp, size_bytes: int, cluster: Cluster, axes: Sequence[Axis], *, algorithm: str = "auto",
    compression: tuple[str, ...] = (), names: tuple[str, ...] = ("d",),
) -> float:  # fmt: skip
    collective = Collective(
        op=op, axes=names, size_bytes=size_bytes, algorithm=algorithm, compression=compression
    )
    return collective_s(collective, axes, cluster)


def faster(cluster: Cluster, index: int, factor: float = 2.0) -> Cluster:
    levels = list(cluster.levels)
    levels[index] = replace(levels[index], bytes_per_s=levels[index].bytes_per_s * factor)
    return replace(cluster, levels=tuple(levels))


@given(specs, ops, message)
def test_one_rank_and_no_bytes_cost_nothing(spec: str, op: CollectiveOp, size: int) -> None:
    assert cost(op, size, CLUSTERS[spec], line(1)) == 0.0
    assert cost(op, 0, CLUSTERS[spec], line(2)) == 0.0


@given(specs, message, st.sampled_from((2, 4, 8, 16, 32)), st.integers(2, 16))
def test_rows_that_travel_once_to_a_rank_never_take_longer_than_each_copy_alone_on_one_level(
    spec: str, size: int, ranks: int, copies: int
) -> None:
    axes, cluster = line(min(ranks, CLUSTERS[spec].devices)), CLUSTERS[spec]
    alone = Collective(op=CollectiveOp.ALL_TO_ALL, axes=("d",), size_bytes=size)
    once = replace(alone, copies=copies)
    if axes[0].size <= cluster.levels[0].size:
        assert collective_s(once, axes, cluster) <= collective_s(alone, axes, cluster) * (1 + 1e-9)


def test_of_eight_copies_for_four_nodes_less_than_half_leave_a_node() -> None:
    cluster, axes = CLUSTERS["h100-sxm:4x8"], line(32)
    alone = Collective(op=CollectiveOp.ALL_TO_ALL, axes=("d",), size_bytes=1 << 34)
    share = 3 * (1 - (3 / 4) ** 8) / 8 / (24 / 32)  # nodes that a row goes to, of its copies that leave
    found = collective_s(replace(alone, copies=8), axes, cluster) / collective_s(alone, axes, cluster)
    assert found == pytest.approx(share, rel=0.02)


@given(specs, ops, message, st.sampled_from(ALGORITHMS), st.data())
def test_more_bandwidth_never_costs_time(
    spec: str, op: CollectiveOp, size: int, algorithm: str, data: st.DataObject
) -> None:
    cluster = CLUSTERS[spec]
    ranks = data.draw(st.sampled_from([r for r in (2, 4, 8, 16, 32) if cluster.devices % r == 0]))
    index = data.draw(st.integers(0, len(cluster.levels) - 1))
    slow = cost(op, size, cluster, line(ranks), algorithm=algorithm)
    assert cost(op, size, faster(cluster, index), line(ranks), algorithm=algorithm) <= slow * (1 + 1e-12)


@given(specs, ops, message, st.integers(1, 1 << 30))
def test_more_bytes_never_cost_less(spec: str, op: CollectiveOp, size: int, more: int) -> None:
    cluster = CLUSTERS[spec]
    axes = line(cluster.devices)
    assert cost(op, size + more, cluster, axes) >= cost(op, size, cluster, axes) * (1 - 1e-12)


@given(specs, message)
def test_a_direct_all_reduce_never_costs_more_than_the_detour(spec: str, size: int) -> None:
    cluster = CLUSTERS[spec]
    axes = line(cluster.devices)
    detour = cost(CollectiveOp.REDUCE_SCATTER, size, cluster, axes) + cost(
        CollectiveOp.ALL_GATHER, size, cluster, axes
    )
    assert cost(CollectiveOp.ALL_REDUCE, size, cluster, axes) <= detour * (1 + 1e-12)


@given(specs, ops, message)
def test_auto_is_the_cheapest_algorithm_of_a_library(spec: str, op: CollectiveOp, size: int) -> None:
    cluster = CLUSTERS[spec]
    axes = line(cluster.devices)
    ours = ("hierarchical", "parameter-server")  # made of several collectives
    named = [cost(op, size, cluster, axes, algorithm=name) for name in ALGORITHMS if name not in ours]
    assert cost(op, size, cluster, axes) == min(named)


@given(specs, ops, message)
def test_wire_time_is_a_floor(spec: str, op: CollectiveOp, size: int) -> None:
    """No rank receives its part of the result faster than its own link carries it, NVLink SHARP included."""
    cluster = CLUSTERS[spec]
    ranks = cluster.levels[0].size
    least = size * (ranks - 1) / ranks if op in (CollectiveOp.ALL_GATHER, CollectiveOp.ALL_REDUCE) else 0
    factor = cluster.device.constants[f"collective.factor.{op}"]
    assert cost(op, size, cluster, line(ranks)) >= factor * least / cluster.levels[0].bytes_per_s


def test_groups_that_share_a_nic_each_have_their_share() -> None:
    """Eight groups of four ranks, one a node, against one group that has all eight NICs of each node."""
    cluster = CLUSTERS["a100-sxm-80gb:4x8"]
    size = 1 << 30
    alone = cost(CollectiveOp.ALL_GATHER, size, cluster, line(32), algorithm="ring")
    strided = cost(CollectiveOp.ALL_GATHER, size, cluster, line(4, stride=8), algorithm="ring")
    assert 5 < strided / alone < 9


def test_placement_decides_what_a_group_crosses() -> None:
    cluster = CLUSTERS["a100-sxm-80gb:4x8"]
    inside, across = (cost(CollectiveOp.ALL_REDUCE, 1 << 28, cluster, line(4, stride)) for stride in (1, 8))
    assert inside * 5 < across


def test_an_axis_that_does_not_line_up_with_nodes_is_priced_by_its_worst_group() -> None:
    cluster = load_cluster("a100-sxm-80gb:3x8")
    lined_up, crooked = (cost(CollectiveOp.ALL_REDUCE, 1 << 28, cluster, line(size)) for size in (4, 3))
    assert crooked > 5 * lined_up


def test_several_axes_span_their_product() -> None:
    cluster = CLUSTERS["h100-sxm:4x8"]
    axes = (Axis(name="a", size=4, stride=8), Axis(name="b", size=8, stride=1))
    both = cost(CollectiveOp.ALL_REDUCE, 1 << 26, cluster, axes, names=("a", "b"))
    assert both == cost(CollectiveOp.ALL_REDUCE, 1 << 26, cluster, line(32))


def test_oversubscription_divides_a_level() -> None:
    cluster = CLUSTERS["a100-sxm-80gb:4x8"]
    levels = (cluster.levels[0], replace(cluster.levels[1], oversubscription=4.0))
    slow = cost(CollectiveOp.ALL_GATHER, 1 << 32, replace(cluster, levels=levels), line(32))
    assert slow / cost(CollectiveOp.ALL_GATHER, 1 << 32, cluster, line(32)) == pytest.approx(4, rel=0.05)


def test_a_tenth_of_the_network_takes_at_most_ten_times_as_long() -> None:
    usual = load_cluster("v100-sxm2-16gb:4x8")
    outer = usual.levels[-1]
    slow = replace(usual, levels=(*usual.levels[:-1], replace(outer, bytes_per_s=outer.bytes_per_s / 10)))
    for size in (1 << 20, 1 << 24, 1 << 28):
        fast_s = cost(CollectiveOp.ALL_REDUCE, size, usual, line(32))
        slow_s = cost(CollectiveOp.ALL_REDUCE, size, slow, line(32))
        assert fast_s < slow_s < 10 * fast_s  # the pipeline of chunks fills ten times as soon


def test_in_switch_reduction_pays_on_large_messages_only() -> None:
    with_sharp = CLUSTERS["h100-sxm:4x8"]
    levels = tuple(replace(level, in_network_reduction=False) for level in with_sharp.levels)
    without = replace(with_sharp, levels=levels)
    large, small = 1 << 30, 1 << 14
    assert cost(CollectiveOp.ALL_REDUCE, large, with_sharp, line(8)) < cost(
        CollectiveOp.ALL_REDUCE, large, without, line(8)
    )
    assert cost(CollectiveOp.ALL_REDUCE, small, with_sharp, line(8)) == cost(
        CollectiveOp.ALL_REDUCE, small, without, line(8)
    )


def test_a_hierarchy_pays_where_latency_rules() -> None:
    cluster = load_cluster("a100-sxm-80gb:64x8")
    flat, phased = (
        cost(CollectiveOp.ALL_GATHER, 1 << 22, cluster, line(512), algorithm=name)
        for name in ("ring", "hierarchical")
    )
    assert phased < 0.8 * flat


def test_a_group_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(UserError, match="does not fit"):
        cost(CollectiveOp.ALL_REDUCE, 1024, CLUSTERS["a100-sxm-80gb:4x8"], line(64))


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(UserError, match=r"unknown algorithm `rings`.*hierarchical"):
        cost(CollectiveOp.ALL_REDUCE, 1024, CLUSTERS["a100-sxm-80gb:4x8"], line(2), algorithm="rings")


def test_compression_pays_on_a_slow_network_and_not_on_nvlink() -> None:
    slow, fast = load_cluster("hgx-100g-ethernet"), CLUSTERS["h100-sxm:4x8"]
    size = 1 << 30
    plain = cost(CollectiveOp.ALL_REDUCE, size, slow, line(32))
    for method, least in (("bf16", 1.8), ("int8", 2.5), ("sign", 5.0), ("powersgd:4", 5.0)):
        assert plain / cost(CollectiveOp.ALL_REDUCE, size, slow, line(32), compression=(method,) * 2) > least
    inside = cost(CollectiveOp.ALL_REDUCE, size, fast, line(8))
    assert cost(CollectiveOp.ALL_REDUCE, size, fast, line(8), compression=("int8",)) > inside / 4


def test_compression_of_the_outer_level_alone_runs_in_phases() -> None:
    slow = load_cluster("hgx-100g-ethernet")
    size = 1 << 30
    plain = cost(CollectiveOp.ALL_REDUCE, size, slow, line(32))
    outer = cost(CollectiveOp.ALL_REDUCE, size, slow, line(32), compression=("none", "int8"))
    assert outer < plain / 2


def test_compressing_a_level_that_the_group_does_not_cross_changes_nothing() -> None:
    cluster = CLUSTERS["h100-sxm:4x8"]
    plain = cost(CollectiveOp.ALL_REDUCE, 1 << 24, cluster, line(8))
    assert cost(CollectiveOp.ALL_REDUCE, 1 << 24, cluster, line(8), compression=("none", "int8")) == plain


@pytest.mark.parametrize(
    ("nics", "stride", "senders"), [(0, 4, 8), (1, 4, 4), (1, 8, 8), (4, 1, 4), (1, 1, 1)]
)
def test_devices_that_send_between_nodes_share_its_ports(nics: int, stride: int, senders: int) -> None:
    """Eight devices a node; a rank of the axis is `stride` devices, so that many send at once to the next node."""
    cluster = load_cluster("a100-sxm-80gb:2x8")
    inner, outer = cluster.levels
    cluster = replace(cluster, levels=(inner, replace(outer, nics=nics)))
    alone = replace(cluster, levels=(inner, replace(outer, bytes_per_s=8 * outer.bytes_per_s / senders)))
    axes = (Axis(name="pp", size=16 // stride, stride=stride),)
    message = Collective(op=CollectiveOp.SEND, axes=("pp",), size_bytes=2**26)
    assert collective_s(message, axes, cluster) == pytest.approx(collective_s(message, axes, alone))
