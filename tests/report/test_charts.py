from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.answer import read_timeline
from autoparallel.report import charts, numbers
from tests.report.sample import one_f_one_b, shortened

_points = st.lists(
    st.builds(
        charts.Candidate,
        step_time_s=st.floats(1e-6, 1e6),
        peak_gib=st.floats(1e-6, 1e6),
        fits=st.booleans(),
        label=st.just("x"),
    ),
    min_size=1,
    max_size=30,
)


@given(_points)
def test_nothing_beats_the_frontier_and_the_frontier_beats_the_rest(points: list[charts.Candidate]) -> None:
    edge = charts.frontier(points)
    for point in points:
        assert any(e.step_time_s <= point.step_time_s and e.peak_gib <= point.peak_gib for e in edge), edge
    for a, b in pairwise(edge):
        assert a.step_time_s < b.step_time_s
        assert a.peak_gib > b.peak_gib


@given(_points)
def test_every_dot_of_the_scatter_lies_inside_the_picture(points: list[charts.Candidate]) -> None:
    chart = charts.scatter(points, points[0], 70.0)
    assert chart is not None
    for dot in chart.dots:
        assert charts.LEFT <= dot.x <= chart.width
        assert 0 <= dot.y <= chart.bottom


@given(st.dictionaries(st.sampled_from(["forward", "backward", "bubble"]), st.floats(0, 1e6)))
def test_the_pieces_of_the_breakdown_fill_the_bar(breakdown_s: dict[str, float]) -> None:
    chart = charts.breakdown_bar(breakdown_s)
    if sum(breakdown_s.values()) > 0:
        assert sum(box.width for box in chart.boxes) == pytest.approx(charts.WIDTH)


@given(
    st.lists(
        st.fixed_dictionaries({part: st.floats(0, 100) for part in charts.MEMORY_PARTS}),
        min_size=1,
        max_size=70,
    ),
    st.one_of(st.none(), st.floats(1, 200)),
)
def test_memory_columns_stand_on_the_axis_and_below_the_top(
    parts: list[dict[str, float]], capacity: float | None
) -> None:
    stages = [{"stage": i, **held, "peak": sum(held.values())} for i, held in enumerate(parts)]
    chart = charts.memory_bars(stages, capacity)
    for box in chart.boxes:
        assert box.y >= 0
        assert box.y + box.height <= chart.bottom + 1e-6


@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 4), (4, 8), (8, 200)])
def test_a_timeline_reads_back_to_the_microsecond(pp: int, micro_batches: int) -> None:
    spans = one_f_one_b(pp, micro_batches)
    table = shortened(spans)
    read = {(s.rank, s.action): s for s in read_timeline(table)}
    known = {(s.rank, s.action): s for s in spans}
    assert read.keys() <= known.keys()
    assert ("cut_us" in table) == (len(read) < len(known))
    for key, span in read.items():
        assert span.start_s == pytest.approx(known[key].start_s, abs=1e-6)
        assert span.end_s == pytest.approx(known[key].end_s, abs=2e-6)
        assert span.label == known[key].label


@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 4), (4, 8), (8, 200)])
def test_spans_of_one_rank_do_not_overlap_in_the_picture(pp: int, micro_batches: int) -> None:
    table = shortened(one_f_one_b(pp, micro_batches))
    cut_us = table.get("cut_us")
    cut_s = (cut_us[0] / 1e6, cut_us[1] / 1e6) if cut_us else None
    chart = charts.timeline(read_timeline(table), cut_s)
    rows: dict[float, list[charts.Box]] = {}
    for box in chart.boxes:
        rows.setdefault(box.y, []).append(box)
    for row in rows.values():
        row.sort(key=lambda box: box.x)
        for a, b in pairwise(row):
            assert a.x + a.width <= b.x + 0.5, (a.tip, b.tip)
        assert row[-1].x + row[-1].width <= chart.width + 1.0


@pytest.mark.parametrize(
    ("value", "text"),
    [(12.345, "12.3 s"), (0.0451, "45.1 ms"), (3e-6, "3.00 µs"), (7500.0, "2 h 5 min"), (0.0, "0 µs")],
)
def test_seconds_read_well(value: float, text: str) -> None:
    assert numbers.seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(8030261248, "8.03 billion"), (512, "512"), (5321.0, "5,321")])
def test_counts_read_well(value: float, text: str) -> None:
    assert numbers.count(value) == text


@pytest.mark.parametrize(
    ("action", "parts"),
    [("2F0", ("2", "F", "0")), ("13SEND_B127", ("13", "SEND_B", "127")), ("0STEP", ("0", "STEP", ""))],
)
def test_actions_come_apart(action: str, parts: tuple[str, str, str]) -> None:
    assert charts.split_action(action) == parts


def test_the_chosen_strategy_is_one_dot_with_a_name() -> None:
    chosen = charts.Candidate(step_time_s=1.0, peak_gib=60.0, fits=True, label="dp_shard 16")
    other = charts.Candidate(step_time_s=2.0, peak_gib=30.0, fits=True, label="pp 2")
    chart = charts.scatter([chosen, other], chosen, 70.0)
    assert chart is not None
    assert sorted(dot.tip for dot in chart.dots) == [
        "chosen: dp_shard 16: 1.00 s, 60.0 GiB",
        "pp 2: 2.00 s, 30.0 GiB",
    ]
