from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel.costmodel.program import Action, ActionKind
from autoparallel.costmodel.program_text import parse, show
from autoparallel.costmodel.stage_cost import StageCost
from autoparallel.costmodel.timetable import pipeline_times, prepare
from autoparallel.planner.expand.schedules import BUILT_SCHEDULES, build_schedule, schedule_problem
from tests.toy_programs import stage_cost

K = ActionKind


def step_s(name: str, ranks: int, virtual: int, micro: int, costs: list[StageCost]) -> float:
    return pipeline_times(prepare(build_schedule(name, ranks, virtual, micro)), costs).step_time_s


@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (1, 5), (2, 2), (4, 4), (4, 9), (8, 24)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_equal_stages_take_micro_batches_plus_ranks_less_one_rounds(
    name: str, ranks: int, micro: int
) -> None:
    costs = [stage_cost(2.0, 3.0, 1.0)] * ranks
    assert step_s(name, ranks, 1, micro, costs) == pytest.approx((micro + ranks - 1) * 6.0)


def test_interleaving_divides_the_bubble_by_the_chunks() -> None:
    for virtual in (2, 3, 4):
        costs = [stage_cost(1.0 / virtual, 2.0 / virtual)] * (4 * virtual)
        assert step_s("interleaved-1f1b", 4, virtual, 8, costs) == pytest.approx(8 * 3.0 + 3 * 3.0 / virtual)


def test_zero_bubble_hides_weight_gradients_in_the_drain() -> None:
    """ZB-1P with I = W = F: the bubble is (p - 1) (F + I - W), against (p - 1) (F + I + W) of 1F1B."""
    costs = [stage_cost(1.0, 1.0, 1.0)] * 4
    assert step_s("1f1b", 4, 1, 12, costs) == pytest.approx(12 * 3 + 3 * 3)
    assert step_s("zb1p", 4, 1, 12, costs) == pytest.approx(12 * 3 + 3 * 1)


def test_zbv_has_almost_no_bubble_when_all_parts_are_equal() -> None:
    """The V shape leaves the fill of the first chunks: (p - 1) forwards of half a stage."""
    costs = [stage_cost(0.5, 0.5, 0.5)] * 8
    assert step_s("zbv", 4, 2, 12, costs) == pytest.approx(12 * 3 + 3 * 0.5)


def test_uneven_stages_by_hand() -> None:
    """F = 1, 3 and B = 2, 4 on two ranks, two micro-batches, a message takes 0.5.

    rank 0: F0 0-1, F1 1-2; rank 1: F0 1.5-4.5, B0 4.5-8.5, F1 8.5-11.5, B1 11.5-15.5;
    rank 0: B0 9-11, B1 16-18.
    """
    costs = [stage_cost(1.0, 2.0, send_s=0.5), stage_cost(3.0, 4.0)]
    timetable = prepare(build_schedule("1f1b", 2, 1, 2))
    times = pipeline_times(timetable, costs)
    ends = {show([[action]]): end for action, end in zip(timetable.actions, times.end_s, strict=True)}
    expected = {
        "0F0": 1.0,
        "0F1": 2.0,
        "1F0": 4.5,
        "1B0": 8.5,
        "1F1": 11.5,
        "1B1": 15.5,
        "0B0": 11.0,
        "0B1": 18.0,
    }
    assert {key: ends[key] for key in expected} == pytest.approx(expected)
    assert times.step_time_s == pytest.approx(18.0)


def test_a_stage_that_waits_for_its_messages_starts_later_but_not_for_what_the_receiver_does_with_them() -> (
    None
):
    """F = B = 1, a message takes 3, of which the receiver takes 1 to join its shares.

    rank 0: F0 0-1, its message until 4, itself free from 3: F1 3-4. Alone F1 would run 1-2.
    """
    first = replace(stage_cost(1.0, 1.0, send_s=3.0), joined_s=1.0)
    ends = {}
    for blocking in (False, True):
        timetable = prepare(build_schedule("gpipe", 2, 1, 2), blocking_sends=blocking)
        times = pipeline_times(timetable, [first, stage_cost(1.0, 1.0)])
        ends[blocking] = {
            show([[action]]): end for action, end in zip(timetable.actions, times.end_s, strict=True)
        }
    assert ends[False]["0F1"] == pytest.approx(2.0)
    assert ends[True]["0F1"] == pytest.approx(4.0)
    assert ends[True]["1F0"] == pytest.approx(5.0), "the receiver has all of it at 4"


def test_messages_on_one_link_wait_for_each_other() -> None:
    """A slow link limits the rate: forwards of 1, messages of 5, so message m arrives at 1 + 5 (m + 1)."""
    costs = [stage_cost(1.0, 0.0, send_s=5.0), stage_cost(1.0, 0.0)]
    timetable = prepare(build_schedule("gpipe", 2, 1, 3))
    times = pipeline_times(timetable, costs)
    arrivals = [
        arrival
        for action, arrival in zip(timetable.actions, times.arrival_s, strict=True)
        if action.kind is K.SEND_F
    ]
    assert arrivals == pytest.approx([6.0, 11.0, 16.0])


def test_step_waits_for_the_reduction_and_tied_stages_for_each_other() -> None:
    alone = [stage_cost(1.0, 2.0, reduce_s=4.0, step_s=1.0)]
    assert step_s("none", 1, 1, 2, alone) == pytest.approx(6 + 4 + 1)
    tied = [
        stage_cost(1.0, 2.0, step_s=1.0, tied_s=2.0),
        stage_cost(1.0, 2.0, reduce_s=9.0, step_s=1.0, tied_s=2.0),
    ]
    last_reduced = 4.0 + 9.0  # rank 1 ends its only backward at 4
    assert step_s("1f1b", 2, 1, 1, tied) == pytest.approx(last_reduced + 2.0 + 1.0)


def test_a_late_gather_runs_from_the_start_and_the_first_forward_waits_for_it() -> None:
    """F = 1, B = 2, gathers of 3 and 5 on two ranks: rank 0 starts at 3, rank 1 (from 4 on) at 5."""
    costs = [replace(stage_cost(1.0, 2.0), updated_s=3.0), replace(stage_cost(1.0, 2.0), updated_s=5.0)]
    timetable = prepare(build_schedule("1f1b", 2, 1, 2), late_gathers=True)
    times = pipeline_times(timetable, costs)
    ends = {show([[action]]): end for action, end in zip(timetable.actions, times.end_s, strict=True)}
    assert (ends["0F0"], ends["1F0"]) == (pytest.approx(4.0), pytest.approx(6.0)), ends
    assert times.step_time_s == pytest.approx(6.0 + 2 + 1 + 2 + 2), "1B0, 1F1, 1B1 and 0B1 follow"


def test_the_chunks_of_a_rank_gather_one_after_the_other() -> None:
    """Two chunks on one of two ranks: the second forward has four of its own to hide a gather of 4 behind."""
    schedule = build_schedule("interleaved-1f1b", 2, 2, 4)
    hidden = [replace(stage_cost(2.0, 1.0), updated_s=u) for u in (0.0, 0.0, 4.0, 4.0)]
    shown = [replace(stage_cost(2.0, 1.0), updated_s=u) for u in (0.0, 0.0, 9.0, 0.0)]
    plain = step_s("interleaved-1f1b", 2, 2, 4, hidden)
    timetable = prepare(schedule, late_gathers=True)
    assert pipeline_times(timetable, hidden).step_time_s == pytest.approx(plain)
    assert pipeline_times(timetable, shown).step_time_s > plain
    rest = [replace(cost, updated_s=5.0, updated_rest_s=4.0) if cost.updated_s else cost for cost in shown]
    ends = pipeline_times(timetable, rest)
    first = {show([[action]]): end for action, end in zip(timetable.actions, ends.end_s, strict=True)}
    assert first["2F0"] == pytest.approx(5.0 + 2.0), "it does not wait for the rest"


@given(
    case=st.sampled_from(BUILT_SCHEDULES[1:]), gathers=st.lists(st.floats(0.0, 20.0), min_size=8, max_size=8)
)
@settings(max_examples=60, deadline=None)
def test_late_gathers_cost_at_most_their_sum_on_a_rank(case: str, gathers: list[float]) -> None:
    """Between nothing, and the longest that one rank waits for all of its own."""
    virtual = {"zbv": 2, "dualpipev": 2, "interleaved-1f1b": 2}.get(case, 1)
    ranks = build_schedule(case, 4, virtual, 8)
    costs = [replace(stage_cost(1.0, 1.0, 1.0), updated_s=gathers[stage]) for stage in range(4 * virtual)]
    plain = pipeline_times(prepare(ranks), costs).step_time_s
    late = pipeline_times(prepare(ranks, late_gathers=True), costs).step_time_s
    most = max(sum(gathers[stage] for stage in {action.stage for action in actions}) for actions in ranks)
    assert plain <= late <= plain + most + 1e-9, show(ranks)


def test_without_overlap_a_rank_waits_for_the_reduction_of_one_chunk_before_the_next() -> None:
    ranks = build_schedule("interleaved-1f1b", 2, 2, 2)
    costs = [stage_cost(1.0, 1.0, reduce_s=10.0)] * 4
    beside = pipeline_times(prepare(ranks, overlap=True), costs).step_time_s
    in_line = pipeline_times(prepare(ranks, overlap=False), costs).step_time_s
    assert in_line > beside


def reference_ends(ranks: tuple[tuple[Action, ...], ...], costs: list[StageCost]) -> dict[Action, float]:
    """The definition, by relaxation to the fixed point: no order of evaluation, no columns, no rows."""
    homes = {action.stage: rank for rank, actions in enumerate(ranks) for action in actions}
    end = {action: 0.0 for actions in ranks for action in actions}
    arrival = dict.fromkeys(end, 0.0)
    seconds = {
        K.FORWARD: lambda cost: cost.forward,
        K.BACKWARD: lambda cost: cost.backward,
        K.BACKWARD_INPUT: lambda cost: cost.backward_input,
        K.BACKWARD_WEIGHT: lambda cost: cost.backward_weight,
    }
    changed = True
    while changed:
        changed = False
        for actions in ranks:
            now, links = 0.0, dict.fromkeys(range(len(ranks)), 0.0)
            for action in actions:
                if action.kind in (K.SEND_F, K.SEND_B):
                    peer = homes[action.stage + (1 if action.kind is K.SEND_F else -1)]
                    size = costs[action.stage - (action.kind is K.SEND_B)].send_s
                    links[peer] = max(links[peer], now) + size
                    changed |= arrival[action] != links[peer]
                    arrival[action] = links[peer]
                elif action.kind in seconds:
                    start = now
                    if action.kind is not K.BACKWARD_WEIGHT:
                        forward = action.kind is K.FORWARD
                        sender = action.stage - 1 if forward else action.stage + 1
                        send = Action(sender, K.SEND_F if forward else K.SEND_B, action.micro)
                        start = max(start, arrival.get(send, 0.0))
                    now = start + seconds[action.kind](costs[action.stage]).total_s
                    changed |= end[action] != now
                    end[action] = now
    return end


@st.composite
def schedules_and_costs(draw: st.DrawFn) -> tuple[str, int, int, int, list[StageCost]]:
    name = draw(st.sampled_from([name for name in BUILT_SCHEDULES if name != "none"]))
    ranks = draw(st.integers(2, 4))
    virtual = 2 if name in ("zbv", "dualpipev", "interleaved-1f1b") else 1
    micro = draw(st.integers(1, 9).filter(lambda m: schedule_problem(name, ranks, virtual, m) is None))
    seconds = st.floats(0.01, 10.0)
    costs = [
        stage_cost(draw(seconds), draw(seconds), draw(seconds), send_s=draw(st.floats(0.0, 5.0)))
        for _ in range(ranks * virtual)
    ]
    return name, ranks, virtual, micro, costs


@settings(max_examples=60)
@given(schedules_and_costs())
def test_the_timetable_gives_what_the_definition_gives(
    case: tuple[str, int, int, int, list[StageCost]],
) -> None:
    name, ranks, virtual, micro, costs = case
    schedule = build_schedule(name, ranks, virtual, micro)
    timetable = prepare(schedule)
    times = pipeline_times(timetable, costs)
    expected = reference_ends(schedule, costs)
    for action, end_s in zip(timetable.actions, times.end_s, strict=True):
        if action.kind in (K.FORWARD, K.BACKWARD, K.BACKWARD_INPUT, K.BACKWARD_WEIGHT):
            assert end_s == pytest.approx(expected[action]), show([[action]])
    assert times.step_time_s == pytest.approx(max(expected.values()))


def test_sends_may_stand_later_than_what_they_send() -> None:
    late = parse("0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0STEP\n"
                 "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1STEP")  # fmt: skip
    costs = [stage_cost(1.0, 2.0), stage_cost(1.0, 2.0)]
    assert pipeline_times(prepare(late), costs).step_time_s == pytest.approx(2 + 2 * 3 + 2)
