"""Steps whose batch was left out stand in the record, and whoever looks at a run sees how many there were."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from autoparallel.cli_watch import summary
from autoparallel.runtime.monitor.alerts import Alert
from autoparallel.runtime.monitor.clock import StepClock
from autoparallel.runtime.monitor.monitor import Monitor, MonitorOptions
from autoparallel.runtime.monitor.record import NAME, Record, read_record, skipped_steps, skipped_words
from autoparallel.runtime.ranks.agreement import Agreement
from tests.cli.runner import run


def _monitored(folder: Path, skips: set[int], steps: int, options: MonitorOptions) -> list[str]:
    """A run of one process whose guards leave out such steps: what was said."""
    said, clock = list[str](), StepClock()
    folder.mkdir()
    monitor = Monitor(
        folder, Agreement(60.0), clock, 0, about={"shape": "1x1"}, predicted=None, step=0, options=options,
        say=said.append, per_node=1,
    )  # fmt: skip
    for step in range(1, steps + 1):
        clock.begin()
        clock.at("F0", 0)
        if step in skips:
            monitor.skipped(step)
        else:
            monitor.end(step, 2.0, 0.5)
    return said


def test_steps_that_are_left_out_are_recorded_and_shown_and_spoil_no_statistics(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    said = _monitored(folder, {4, 13}, 20, MonitorOptions(every=2))
    assert said == []
    (record,) = read_record(folder)
    assert [entry["step"] for entry in record.skipped] == [4, 13], "whether or not their steps are recorded"
    assert 4 not in [step["step"] for step in record.steps]
    assert (record.steps[-1]["skipped_share"], record.said) == (2 / 50, [])
    found = summary([record])
    assert (found["skipped"], found["step_time_s"], found["last"]["step"]) == (2, 0.5, 20)
    assert json.loads(run("watch", folder, "--json").out)["skipped"] == 2
    assert "2 batches were left out, the last one in step 13" in run("watch", folder, "--once").err
    run("report", folder, "-o", tmp_path / "page.html")
    assert "<li>2 batches were left out, the last one in step 13</li>" in (tmp_path / "page.html").read_text()
    assert "autoparallel_skipped_ratio" in (folder / "metrics.prom").read_text()


def test_a_run_that_only_leaves_out_is_told_so(tmp_path: Path) -> None:
    _monitored(tmp_path / "run", {1, 2}, 2, MonitorOptions())
    shown = run("watch", tmp_path / "run", "--once").err
    assert "1 process, started 1 time; no step is done yet" in shown
    assert "2 batches were left out, the last one in step 2" in shown
    run("report", tmp_path / "run", "-o", tmp_path / "page.html")
    assert "2 batches were left out" in (tmp_path / "page.html").read_text()


def test_an_alert_can_be_set_on_what_is_left_out(tmp_path: Path) -> None:
    rules = (
        Alert(metric="skipped_share", above=0.05, steps=1),
        Alert(metric="waiting_share", above=0.9),
        Alert(metric="loss", above=9.0),
    )
    said = _monitored(tmp_path / "run", {5, 6, 7, 8}, 80, MonitorOptions(alerts=rules))
    assert said == [
        "step 7: skipped_share has been above 0.05 for 1 step (0.06)",
        "step 56: skipped_share is back (0.04; the threshold is 0.05)",
    ]


def test_steps_that_a_later_start_does_again_count_as_it_did_them() -> None:
    def start(at: int, *skipped: int) -> Record:
        return Record(start={"step": at}, skipped=[{"step": step} for step in skipped])

    assert skipped_steps([start(0, 3, 7), start(5, 9), start(8)]) == [3]
    assert skipped_words([start(0)]) == ""
    assert skipped_words([start(0, 3)]) == "1 batch was left out, in step 3"


def test_records_of_other_versions_are_read(tmp_path: Path) -> None:
    step: dict[str, Any] = {
        "event": "step", "step": 1, "loss": math.nan, "seconds": 1.0, "computing_s": [1.0], "communicating_s": [0.0],
    }  # fmt: skip
    lines = [
        {"event": "start", "step": 0, "world": 1, "stages": [0]}, step, {"event": "said", "step": 1, "text": "slow"},
        {"event": "of another day", "step": 1},
    ]  # fmt: skip
    (tmp_path / NAME).write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = summary(read_record(tmp_path))
    assert (found["skipped"], found["last"]["step"], found["said"]) == (0, 1, ["slow"])
