from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel.costmodel.price import price_program
from autoparallel.costmodel.program import Program
from autoparallel.costmodel.stage_cost import phase
from autoparallel.costmodel.timeline import timeline
from autoparallel.costmodel.timetable import pipeline_times, prepare
from tests.costmodel.test_simulate import CLUSTER, programs


@settings(max_examples=30)
@given(programs())
def test_the_end_of_the_step_is_drawn_as_what_the_breakdown_calls_it(program: Program) -> None:
    order = prepare(program.ranks)
    gathers = phase({"optimizer": 1e-3, "dp_comm": 5e-3})  # as ZeRO-1 does
    costs = [replace(cost, step=gathers) for cost in price_program(program, CLUSTER)]
    spans, _ = timeline(order, pipeline_times(order, costs), costs)
    for rank, stages in enumerate(order.steps):
        spent: dict[str, float] = {}
        for stage in stages:
            for label, seconds in costs[stage].step.parts:
                spent[label] = spent.get(label, 0.0) + seconds
        steps = [s for s in spans if s.rank == rank and s.action.endswith("STEP")]
        drawn = {label: sum(s.end_s - s.start_s for s in steps if s.label == label) for label in spent}
        assert drawn == pytest.approx(spent, abs=1e-9)


@settings(max_examples=30)
@given(programs(), st.integers(1, 60))
def test_a_shortened_timeline_is_the_whole_one_without_its_middle(program: Program, most: int) -> None:
    order = prepare(program.ranks)
    costs = price_program(program, CLUSTER)
    times = pipeline_times(order, costs)
    whole, nothing = timeline(order, times, costs)
    kept, cut = timeline(order, times, costs, most=most)
    assert nothing is None
    if cut is None:
        assert kept == whole
        return
    assert cut[0] < cut[1]
    assert kept == tuple(s for s in whole if s.start_s < cut[0] or s.start_s >= cut[1])
