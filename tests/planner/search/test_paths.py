"""Critical paths: as long as the step they explain, and a lower bound on it for all other stage costs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel.costmodel.stage_cost import Phase, StageCost
from autoparallel.costmodel.timetable import Timetable, pipeline_times, prepare
from autoparallel.planner.expand.schedules import build_schedule
from autoparallel.planner.search.partition.paths import SchedulePaths
from autoparallel.planner.search.partition.problem import Q, Row

CASES = [
    ("none", 1, 1, 3), ("gpipe", 3, 1, 4), ("1f1b", 3, 1, 5), ("1f1b", 4, 1, 2), ("interleaved-1f1b", 2, 2, 4),
    ("zb1p", 3, 1, 4), ("zbv", 2, 2, 4),
]  # fmt: skip
PHASES = ("forward", "backward", "backward_input", "backward_weight", "last_backward", "last_backward_weight",
          "step")  # fmt: skip


def draw_costs(data: st.DataObject, timetable: Timetable) -> list[StageCost]:
    numbers = st.floats(0.01, 1.0)
    stages = len(timetable.homes)
    tied = data.draw(st.booleans())
    return [
        StageCost(
            **{name: Phase(total_s=data.draw(numbers)) for name in PHASES},
            reduce_s=data.draw(numbers), send_s=data.draw(numbers),
            tied_s=data.draw(numbers) if tied and stage in (0, stages - 1) else 0.0,
            updated_s=data.draw(numbers),
        )
        for stage in range(stages)
    ]  # fmt: skip


def value_s(row: Row, costs: Sequence[StageCost]) -> float:
    """Seconds along a path: a lower bound on the step for any stage costs."""
    flat = {Q.SEND: "send_s", Q.REDUCE: "reduce_s", Q.REDUCE_AFTER_WEIGHT: "reduce_after_weight_s", Q.TIED: "tied_s",
            Q.UPDATED: "updated_s"}  # fmt: skip
    ends = {Q.END: (Q.LAST_BACKWARD, Q.REDUCE), Q.END_WEIGHT: (Q.LAST_BACKWARD_WEIGHT, Q.REDUCE_AFTER_WEIGHT)}

    def of(quantity: Q, stage: int) -> float:
        if quantity in ends:
            return sum(of(part, stage) for part in ends[quantity])
        if quantity in flat:
            return float(getattr(costs[stage], flat[quantity]))
        return float(getattr(costs[stage], quantity.name.lower()).total_s)

    return sum(count * of(Q(quantity), stage) for quantity, stage, count in row.terms)


@settings(max_examples=60)
@given(case=st.sampled_from(CASES), overlap=st.booleans(), late=st.booleans(), data=st.data())
def test_a_path_is_as_long_as_the_step_and_never_longer_for_other_costs(
    case: tuple[str, int, int, int], overlap: bool, late: bool, data: st.DataObject
) -> None:
    timetable = prepare(build_schedule(*case), overlap=overlap, late_gathers=late)
    mine, other = draw_costs(data, timetable), draw_costs(data, timetable)
    times = pipeline_times(timetable, mine)
    paths = SchedulePaths(timetable)
    path = paths.learn(mine, times)
    assert value_s(path, mine) == pytest.approx(times.step_time_s), path
    if any(cost.tied_s for cost in mine) == any(cost.tied_s for cost in other):
        assert value_s(path, other) <= pipeline_times(timetable, other).step_time_s * (1 + 1e-9), path


@settings(max_examples=60)
@given(case=st.sampled_from(CASES), overlap=st.booleans(), late=st.booleans(), data=st.data())
def test_no_path_that_a_timetable_shows_unasked_is_longer_than_the_step(
    case: tuple[str, int, int, int], overlap: bool, late: bool, data: st.DataObject
) -> None:
    timetable = prepare(build_schedule(*case), overlap=overlap, late_gathers=late)
    costs = draw_costs(data, timetable)
    step_s = pipeline_times(timetable, costs).step_time_s
    rows = SchedulePaths(timetable).rows
    assert len(rows) >= case[1]
    for row in rows:
        assert value_s(row, costs) <= step_s * (1 + 1e-9), row
