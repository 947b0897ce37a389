"""The record of a run, who is slow in it, and where it differs from its plan."""

from __future__ import annotations

import io
import json
import math
import random
import resource
import time
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoparallel.cli_watch import summary
from autoparallel.errors import UserError
from autoparallel.report.picture import draw_step
from autoparallel.report.run import render_run
from autoparallel.runtime.monitor.clock import StepClock
from autoparallel.runtime.monitor.monitor import Monitor, MonitorOptions
from autoparallel.runtime.monitor.outputs import TensorBoard, prometheus_text, write_prometheus
from autoparallel.runtime.monitor.record import Recorder, read_record
from autoparallel.runtime.monitor.stragglers import FEWEST, WINDOW, stragglers
from autoparallel.runtime.ranks.agreement import Agreement


def _windows(noise: float, slow: float, ranks: int, seed: int) -> list[list[float]]:
    """Computing times of a window: log-normal noise, and the last rank slower by a share."""
    draw = random.Random(seed)
    return [
        [math.exp(draw.gauss(0.0, noise)) * (1 + slow * (rank == ranks - 1)) for rank in range(ranks)]
        for _ in range(WINDOW)
    ]


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_who_is_slow_is_named_and_nobody_else(noise: float) -> None:
    alarms = sum(bool(stragglers(_windows(noise, 0.0, 4, seed), [0] * 4)) for seed in range(300))
    assert alarms < 3, "less than 1 % false alarms"
    slow = 0.2 + 1.5 * noise
    named = [[s.rank for s in stragglers(_windows(noise, slow, 4, seed), [0] * 4)] for seed in range(200)]
    assert named.count([3]) >= 198, "99 % of those that are slower by a fifth, and by more than the noise"


def test_stages_are_not_compared_with_each_other_and_few_steps_say_nothing() -> None:
    steps = [[1.0, 1.0, 2.0, 2.0]] * FEWEST
    assert stragglers(steps, [0, 0, 1, 1]) == []
    assert stragglers([[1.0, 1.5]] * (FEWEST - 1), [0, 0]) == []
    (one,) = stragglers([[1.0, 1.5]] * FEWEST, [0, 0])
    assert str(one) == "rank 1 computes 50 % longer than its peers, which costs up to 0.5 s a step"
    slightly = [[1.0, 1.07]] * FEWEST
    assert stragglers(slightly, [0, 0]) == []
    assert [s.rank for s in stragglers(slightly, [0, 0], frozenset({1}))] == [1], "until it is clearly back"


def _collectives(bytes_per_s: float) -> list[dict[str, Any]]:
    """Of a step: all-reduces over a level, and messages whose end nobody knows; both are priced."""
    return [
        {"op": "all_reduce", "level": 'spine "2"', "count": 3, "bytes": 8_000_000, "seconds": 8e6 / bytes_per_s,
         "bytes_per_s": bytes_per_s, "priced_bytes_per_s": 2e9},
        {"op": "send", "level": "nvlink", "count": 4, "bytes": 4096, "seconds": None, "bytes_per_s": None},
    ]  # fmt: skip


def _step(number: int, **changed: Any) -> dict[str, Any]:
    step = {
        "step": number, "loss": 2.5, "seconds": 0.4, "efficiency": 0.5,
        "breakdown_s": {"forward": 0.1, "backward": 0.2, "dp_comm": 0.06, "optimizer": 0.04},
        "computing_s": [0.2, 0.3], "communicating_s": [0.06, 0.06], "waiting_s": [0.1, 0.0], "memory_bytes": [1e9, 2e9],
    }  # fmt: skip
    return {**step, **changed}


def _recorded(folder: Path, steps: int) -> None:
    recorder = Recorder(folder)
    predicted = {
        "step_time_s": 0.2,
        "breakdown_s": {"forward": 0.1, "backward": 0.07, "recompute": 0.01, "dp_comm": 0.02},
    }
    recorder.add("start", step=0, world=2, predicted=predicted, stages=[0, 0])
    for number in range(1, steps + 1):
        recorder.add("step", **_step(number))
    recorder.add("said", step=steps, text="rank 1 computes longer")


def test_a_record_says_where_a_run_differs_from_its_plan(tmp_path: Path) -> None:
    _recorded(tmp_path, 30)
    with (tmp_path / "record.jsonl").open("a") as file:
        file.write('{"event": "st')  # being written
    found = summary(read_record(tmp_path))
    assert (found["step_time_s"], found["efficiency"], found["said"]) == (
        0.4,
        0.5,
        ["rank 1 computes longer"],
    )
    assert [s["rank"] for s in found["stragglers"]] == [1]
    first, second, *_ = found["differences"]
    assert first["kind"] == "backward"
    assert first["words"].startswith(
        "backward: 0.2 s where 0.08 s were predicted (0.12 s longer, 150 %): measure this"
    )
    assert second["kind"] in ("communication and waiting", "optimizer")
    with pytest.raises(UserError, match="the folder of a run that Trainer records"):
        read_record(tmp_path / "other")


@pytest.mark.parametrize(("bytes_per_s", "told"), [(5e8, True), (1.9e9, False)])
def test_a_collective_far_below_its_priced_bandwidth_is_told_with_its_level(
    tmp_path: Path, bytes_per_s: float, told: bool
) -> None:
    recorder = Recorder(tmp_path)
    priced = {
        "op": "all_reduce",
        "level": 'spine "2"',
        "count": 2,
        "bytes": 8_000_000,
        "seconds": 0.004,
        "bytes_per_s": 2e9,
    }
    predicted = {"step_time_s": 0.2, "breakdown_s": {"forward": 0.1}, "collectives": [priced]}
    recorder.add("start", step=0, world=2, predicted=predicted, stages=[0, 0])
    for number in range(1, 9):  # the first steps are slow in everything
        recorder.add("step", **_step(number, collectives=_collectives(1e6 if number < 3 else bytes_per_s)))
    records = read_record(tmp_path)
    found, page = summary(records), render_run("run", records)
    (reduces, sends) = found["collectives"]
    assert (reduces["bytes_per_s"], reduces["priced_bytes_per_s"], reduces["priced_s"]) == (
        bytes_per_s,
        2e9,
        0.004,
    )
    assert (sends["sent_bytes"], sends["seconds"], sends["priced_s"]) == (4096, None, None)
    words = 'all_reduce over spine "2": 500 MB/s where 2 GB/s were priced (0.012 s longer a step'
    assert any(d["words"].startswith(words) for d in found["differences"]) is told
    assert (words in unescape(page)) is told
    assert "<td>nvlink</td>" in page


def test_metrics_are_prometheus_text(tmp_path: Path) -> None:
    write_prometheus(tmp_path / "metrics.prom", _step(7, loss=math.nan))
    text = (tmp_path / "metrics.prom").read_text()
    assert text == prometheus_text(_step(7, loss=math.nan))
    assert 'autoparallel_waiting_seconds{rank="0"} 0.1\n' in text
    assert "autoparallel_loss NaN\n" in text
    text += prometheus_text({"collectives": _collectives(5e8)})
    assert (
        'autoparallel_collective_bytes_per_second{op="all_reduce",level="spine \\"2\\""} 500000000.0\n'
        in text
    )
    assert 'autoparallel_collective_bytes{op="send",level="nvlink"} 4096.0\n' in text
    parser = pytest.importorskip("prometheus_client.parser")
    families = {f.name: f for f in parser.text_string_to_metric_families(text)}
    assert families["autoparallel_computing_seconds"].samples[1].labels == {"rank": "1"}


def test_scalars_are_what_tensorboard_reads(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    TensorBoard(tmp_path).add(_step(7, collectives=_collectives(5e8)))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(7, 2.5)]
    reached = events.Scalars('collective_bytes_per_second/all_reduce spine "2"')
    assert [(e.step, e.value) for e in reached] == [(7, 5e8)]


def test_the_timelines_of_a_traced_step_are_a_picture_that_tensorboard_reads(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    clock = StepClock()
    monitor = Monitor(
        tmp_path, Agreement(60.0), clock, 0, about={"shape": "1x1"}, predicted=None, step=0,
        options=MonitorOptions(tensorboard=True), say=print, per_node=1, draw=draw_step,
    )  # fmt: skip
    for step in range(1, 8):
        clock.begin()
        for action in ("DATA", "F0", "B0", "STEP"):
            clock.at(action, 0)
            time.sleep(0.001)
        monitor.end(step, 1.0, 0.004)
    (shown,) = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Images("timeline")
    (recorded,) = read_record(tmp_path)[0].timelines
    assert shown.step == recorded["step"] == 5
    image = np.asarray(Image.open(io.BytesIO(shown.encoded_image_string)))
    assert np.array_equal(image, draw_step({}, recorded["ranks"]))


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # of tensorboard's own thread
def test_a_disk_that_takes_no_more_of_what_is_measured_is_told_once_and_ends_nothing(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    said, clock = list[str](), StepClock()
    monitor = Monitor(
        tmp_path, Agreement(60.0), clock, 0, about={"shape": "1x1"}, predicted=None, step=0,
        options=MonitorOptions(tensorboard=True), say=said.append, per_node=1,
    )  # fmt: skip
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        for step in range(1, 30):
            clock.begin()
            clock.at("F0", 0)
            monitor.end(step, 1.0, 0.004)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(text.split(" (")[0] for text in said) == [
        "nothing more is written for TensorBoard",
        "the record of the run is not kept",
    ], said
    monitor.end(30, 1.0, 0.004)
    assert read_record(tmp_path)[0].steps[-1]["step"] == 30, "what was cut off is one line"


def test_json_holds_what_is_recorded(tmp_path: Path) -> None:
    _recorded(tmp_path, 5)
    assert json.loads(json.dumps(summary(read_record(tmp_path))))["last"]["step"] == 5
