from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel.costmodel.price import price_program
from autoparallel.costmodel.program import Program
from autoparallel.costmodel.timeline import timeline
from autoparallel.costmodel.timetable import pipeline_times, prepare
from tests.costmodel.test_simulate import CLUSTER, programs


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
