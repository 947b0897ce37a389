"""A step as it was predicted and as it was measured: two timelines that can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoparallel.answer import read_timeline
from autoparallel.costmodel.prediction import Span
from autoparallel.report.charts import Chart, timeline
from autoparallel.runtime.monitor.clock import kind_of

# Kinds of action, as they are coloured, and the words for them.
KINDS = {
    "forward": "forward", "backward": "backward", "weight": "backward, weights only", "optimizer": "optimizer",
    "pp_comm": "between stages", "dp_comm": "gradients and parameters", "data": "reading samples", "other": "all else",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Timelines:
    """The actions of one step, and their pictures: on one axis, unless the middle of the predicted one, `cut_s`, is left out."""

    predicted: tuple[Span, ...]
    measured: tuple[Span, ...]
    cut_s: tuple[float, float] | None
    predicted_chart: Chart | None  # None: there are no actions
    measured_chart: Chart | None


def timelines(
    table: Mapping[str, Any], ranks: Sequence[Sequence[tuple[str, int, float, float]]]
) -> Timelines:
    """`table` is an `answer.timeline_table`, `ranks` is a timeline of the record; either may be empty."""
    predicted, measured, cut_us = read_timeline(table), spans_of(ranks), table.get("cut_us")
    cut_s = (cut_us[0] / 1e6, cut_us[1] / 1e6) if cut_us else None
    end_s = max((span.end_s for span in (*predicted, *measured)), default=0.0)
    return Timelines(
        predicted=predicted, measured=measured, cut_s=cut_s,
        predicted_chart=timeline(predicted, cut_s, end_s=None if cut_s else end_s) if predicted else None,
        measured_chart=timeline(measured, None, end_s=end_s) if measured else None,
    )  # fmt: skip


def spans_of(ranks: Sequence[Sequence[tuple[str, int, float, float]]]) -> tuple[Span, ...]:
    """The actions of a step that was recorded action by action, by pipeline rank."""
    return tuple(
        Span(rank=rank, action=f"{stage}{action}", start_s=begin, end_s=end, label=kind_of(action))
        for rank, actions in enumerate(ranks)
        for action, stage, begin, end in actions
    )
