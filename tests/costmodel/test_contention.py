from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.costmodel.collectives import collective_s
from autoparallel.costmodel.contention import Shares, excess, port_shares
from autoparallel.costmodel.price import Pricer, price_stage
from autoparallel.costmodel.program import Axis, Collective, CollectiveOp
from autoparallel.costmodel.stage_cost import StageCost
from autoparallel.costmodel.streams import Interference, Segment, run_streams
from autoparallel.planner.expand.schedules import build_schedule
from autoparallel.profiles.load import load_cluster
from tests.toy_programs import MEBI, gemm, toy_block, toy_program, toy_stage

CLUSTER = load_cluster("h100-sxm:2x8")
INSIDE = Axis(name="tp", size=2, stride=1)
WITHIN = (Axis(name="dp_shard", size=4, stride=2), INSIDE)  # both on NVLink
ACROSS = (Axis(name="dp_shard", size=2, stride=8), INSIDE)  # data parallelism between the nodes alone

SHARE = st.floats(0.0, 1.0)
SECONDS = st.floats(0.01, 10.0)


def collective(op: CollectiveOp, axis: str, size: int = 256 * MEBI) -> Collective:
    return Collective(op=op, axes=(axis,), size_bytes=size, label="dp")


def shares(one: Collective, axes: tuple[Axis, ...]) -> Shares:
    return port_shares(one, axes, CLUSTER, collective_s(one, axes, CLUSTER))


def test_a_collective_keeps_only_the_levels_busy_that_it_crosses() -> None:
    inside = shares(collective(CollectiveOp.ALL_REDUCE, "tp"), WITHIN)
    outside = shares(collective(CollectiveOp.ALL_GATHER, "dp_shard"), ACROSS)
    assert inside[0] > 0.5
    assert inside[1] == 0.0
    assert outside[0] == 0.0
    assert outside[1] > 0.5


def test_a_ring_through_the_nodes_leaves_most_of_the_wider_links_inside_them_free() -> None:
    through = (Axis(name="dp_shard", size=8, stride=2), INSIDE)
    inner, outer = shares(collective(CollectiveOp.ALL_GATHER, "dp_shard"), through)
    assert 0.0 < inner < 0.5 < outer


def test_a_short_message_waits_more_than_it_sends() -> None:
    assert shares(collective(CollectiveOp.ALL_REDUCE, "tp", 1024), WITHIN)[0] < 0.1


@pytest.mark.parametrize(
    "op", [CollectiveOp.ALL_REDUCE, CollectiveOp.ALL_TO_ALL, CollectiveOp.REDUCE_SCATTER]
)
def test_no_collective_asks_for_more_than_its_port(op: CollectiveOp) -> None:
    for axes in (WITHIN, ACROSS):
        assert all(0.0 <= share <= 1.0 for share in shares(collective(op, "dp_shard"), axes))


@given(SHARE, SHARE, SECONDS, SECONDS)
def test_two_transfers_on_one_link_take_the_longer_alone_at_least_and_their_sum_at_most(
    one: float, other: float, first_s: float, second_s: float
) -> None:
    both = excess((one,), (other,))
    times = run_streams(
        [Segment(0.0, 0.0, ((1.0, second_s),)), Segment(first_s, contention=both)], Interference()
    )
    whole_s = times.end_s + times.tail_s
    assert whole_s >= max(first_s, second_s) * (1 - 1e-9)
    assert whole_s <= (first_s + second_s) * (1 + 1e-9)
    if one + other <= 1.0:
        assert whole_s == pytest.approx(max(first_s, second_s))


def cost(axes: tuple[Axis, ...]) -> StageCost:
    """A stage that sums over tp in line, and gathers its parameters over dp_shard beside."""
    inline = replace(collective(CollectiveOp.ALL_REDUCE, "tp", 64 * MEBI), label="tp")
    block = toy_block(
        forward=(gemm(), inline), gather=collective(CollectiveOp.ALL_GATHER, "dp_shard", 64 * MEBI)
    )
    stage = toy_stage(((block, 4),), last=True)
    program = toy_program(build_schedule("none", 1, 1, 1), (stage,), 1, axes=axes)
    return price_stage(stage, program, CLUSTER.device, Pricer(CLUSTER))


def test_gathers_cost_more_beside_collectives_on_their_own_links(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, apart = cost(WITHIN), cost(ACROSS)
    monkeypatch.setattr("autoparallel.costmodel.price.excess", lambda one, other: 0.0)
    assert shared.forward.total_s > cost(WITHIN).forward.total_s
    assert apart == cost(ACROSS)
