"""The report of a run: what was predicted above what was measured, and the differences that were put in, named."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel.answer import timeline_table
from autoparallel.costmodel.prediction import Span
from autoparallel.runtime.monitor.differences import action_gaps
from autoparallel.runtime.monitor.record import NAME
from tests.cli.runner import run

KINDS = ("forward", "backward", "optimizer")


def _spans() -> list[Span]:
    """Two stages, two micro-batches."""
    found = []
    for rank in (0, 1):
        clock = 0.1 * rank
        for action, length, label in (
            ("F0", 0.1, "forward"), ("F1", 0.1, "forward"), ("B0", 0.2, "backward"), ("B1", 0.2, "backward"),
            ("STEP", 0.05, "optimizer"),
        ):  # fmt: skip
            found.append(
                Span(rank=rank, action=f"{rank}{action}", start_s=clock, end_s=clock + length, label=label)
            )
            clock += length
    return found


def _recorded(folder: Path, slow: dict[tuple[int, str], float]) -> None:
    """A run whose stage and action take so many times as long as predicted."""
    folder.mkdir()
    ranks: list[list[list[Any]]] = [[["DATA", 0, 0.0, 0.01]], [["DATA", 1, 0.0, 0.11]]]
    for span in _spans():
        action = span.action[1:]
        begin = ranks[span.rank][-1][3]
        length = (span.end_s - span.start_s) * slow.get((span.rank, action[0]), 1.0)
        ranks[span.rank].append([action, span.rank, begin, begin + length])
    end_s = max(actions[-1][3] for actions in ranks)
    predicted = {"step_time_s": 0.75, "breakdown_s": {"forward": 0.2, "backward": 0.4, "optimizer": 0.05},
                 "timeline": timeline_table(_spans(), 0.75)}  # fmt: skip
    start = {"event": "start", "step": 0, "world": 2, "stages": [0, 1], "predicted": predicted}
    step = {
        "event": "step", "seconds": end_s, "breakdown_s": {"forward": 0.2, "backward": 0.4}, "computing_s": [0.6, 0.6],
        "communicating_s": [0, 0], "waiting_s": [0, 0], "memory_bytes": [1, 1], "efficiency": 0.9,
    }  # fmt: skip
    lines = [start, *({**step, "step": n, "loss": 3.0 / n} for n in range(1, 8))]
    lines.append({"event": "timeline", "step": 5, "ranks": ranks})
    lines.append({"event": "said", "step": 6, "text": "rank 1 <computes> longer", "time": 0})
    (folder / NAME).write_text("\n".join(map(json.dumps, lines)) + "\n")


def test_the_page_names_what_was_slowed_down_and_both_timelines_are_there(tmp_path: Path) -> None:
    _recorded(tmp_path / "run", {(1, "B"): 3.0})
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    run("report", tmp_path / "run", "-o", page, "--trace", trace)
    text = page.read_text()
    assert "<script" not in text
    assert "rank 1 &lt;computes&gt; longer" in text
    listed = [re.sub(r"<[^>]+>", "", li) for li in re.findall(r"<li>(.*?)</li>", unescape(text), re.DOTALL)]
    assert listed[0].startswith(
        "pipeline rank 1, backward passes: 1.2 s where 0.4 s were predicted (0.8 s longer, 200 %)"
    ), listed
    assert "What to do: the device computes slower" in listed[0]
    assert len(listed) <= 5
    predicted, measured = (text.index(word) for word in ("as predicted", "What each pipeline rank did"))
    assert predicted < measured
    events = json.loads(trace.read_text())["traceEvents"]
    for process, sign in ((1, 0.4), (2, 1.2)):
        backward = [e for e in events if e["pid"] == process and e["ph"] == "X" and e["name"][:2] == "1B"]
        assert round(sum(e["dur"] for e in backward) / 1e6, 6) == sign
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert names == {"predicted", "measured"}


@settings(max_examples=60, deadline=None)
@given(
    rank=st.integers(0, 1),
    kind=st.sampled_from(KINDS),
    factor=st.floats(1.3, 20),
    noise=st.floats(0.99, 1.01),
)
def test_the_largest_difference_is_first_and_they_sum_to_the_steps(
    rank: int, kind: str, factor: float, noise: float
) -> None:
    predicted = [(s.rank, s.label, s.end_s - s.start_s) for s in _spans()]
    measured = [(r, k, x * (factor if (r, k) == (rank, kind) else noise)) for r, k, x in predicted]
    longest = max(sum(x for r, _, x in measured if r == of) for of in (0, 1))
    found = action_gaps(predicted, measured, (0.75, longest + 0.1))
    causes = [abs(g.costs_s) for g in found if g.kind != "idle"]
    assert causes == sorted(causes, reverse=True)
    assert found[0].costs_s * 1.2 >= max(abs(g.costs_s) for g in found)
    slowed = next(g for g in found if (g.rank, g.kind) == (rank, kind))
    assert slowed.costs_s > 0
    assert max((g for g in found if g.kind != "idle"), key=lambda g: g.costs_s) == slowed
    for of in (0, 1):
        assert sum(g.measured_s for g in found if g.rank == of) <= longest + 0.1 + 1e-9
