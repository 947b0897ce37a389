from __future__ import annotations

import io
import time

from rich.console import Console

from autoparallel.cli_progress import hinted, progress_text, working
from autoparallel.planner.outcome import Progress
from autoparallel.planner.problem import Objective


def test_more_partitions_solved_than_candidates_are_no_negative_count() -> None:
    at = Progress(
        phase="solve", candidates=164, pruned=-35, solved=199, incumbent=0.014, bound=0.0139, elapsed_s=2.0
    )
    assert "164 candidates, 0 ruled out, 199 solved" in progress_text(at, Objective.TIME)


def test_a_hint_is_given_only_where_work_takes_longer() -> None:
    told = io.StringIO()
    console = Console(file=told)
    with hinted(console, "this takes long", after_s=30.0):
        pass
    assert told.getvalue() == ""
    with hinted(console, "this takes long", after_s=0.0):
        time.sleep(0.05)
    assert told.getvalue() == "this takes long\n"


def test_work_that_says_nothing_is_told_of_again_and_again() -> None:
    told = io.StringIO()
    with working(Console(file=told), "reading it", lambda: "its backward pass", every_s=0.08):
        time.sleep(0.5)
    lines = told.getvalue().splitlines()
    assert 3 <= len(lines) <= 7, lines
    assert lines[0].startswith("reading it: its backward pass (0 s")


def test_short_work_says_nothing() -> None:
    told = io.StringIO()
    with working(Console(file=told), "reading it") as say:
        say("half of it")
    assert told.getvalue() == ""
