"""The page of a run: its predicted and its measured timeline, where they differ most, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoparallel.costmodel.prediction import Span
from autoparallel.report.charts import Chart, line, split_action
from autoparallel.report.numbers import gigabytes, percent, seconds, times
from autoparallel.report.page import environment, resource
from autoparallel.report.timelines import KINDS, spans_of, timelines
from autoparallel.runtime.monitor.bandwidths import ADVICE, bandwidths
from autoparallel.runtime.monitor.clock import kind_of
from autoparallel.runtime.monitor.differences import Action, action_gaps, gaps, step_time_s
from autoparallel.runtime.monitor.record import Record, skipped_words
from autoparallel.runtime.monitor.slow_links import rate_text
from autoparallel.runtime.monitor.stragglers import stragglers

SHOWN = 5  # differences


def measured_spans(record: Record) -> tuple[Span, ...]:
    """The actions of the last step that was recorded action by action, on the slowest rank of every stage."""
    return spans_of(_traced(record))


def _traced(record: Record) -> Sequence[Sequence[tuple[str, int, float, float]]]:
    found: Sequence[Sequence[tuple[str, int, float, float]]] = ()
    return record.timelines[-1]["ranks"] if record.timelines else found


def predicted_timeline(record: Record) -> Mapping[str, Any]:
    """As `answer.timeline_table`; empty where the run knew no cluster."""
    found: Mapping[str, Any] = (record.start.get("predicted") or {}).get("timeline") or {}
    return found


def render_run(folder: str, records: Sequence[Record]) -> str:
    """The page for what is recorded in `folder`; of several starts the last."""
    record = records[-1]
    both = timelines(predicted_timeline(record), _traced(record))
    step_s, said_s = step_time_s(record), (record.start.get("predicted") or {}).get("step_time_s")
    context = {
        "style": resource("style.css"),
        "folder": folder,
        "begun": f"{times(record.start['world'], 'process', 'processes')}, started {times(len(records), 'time')}",
        "skipped": skipped_words(records),
        "record": record,
        "step_s": step_s,
        "predicted_s": said_s,
        "efficiency": said_s / step_s if said_s and step_s else None,
        "predicted": both.predicted_chart,
        "measured": both.measured_chart,
        "traced": record.timelines[-1]["step"] if record.timelines else None,
        "kinds": KINDS,
        "cut_s": both.cut_s,
        "differences": differences(record, both.predicted, both.measured, whole=both.cut_s is None),
        "collectives": bandwidths(record),
        "gigabytes": gigabytes,
        "rate": rate_text,
        "stragglers": stragglers([s["computing_s"] for s in record.steps], record.start["stages"]),
        "losses": _curve(records, "loss"),
        "times": _curve(records, "seconds"),
        "said": [entry for one in records for entry in one.said],
        "percent": percent,
        "seconds": seconds,
    }
    return environment().get_template("run.html.j2").render(context)


def differences(
    record: Record, predicted: Sequence[Span], measured: Sequence[Span], *, whole: bool
) -> list[tuple[str, str]]:
    """The five largest, in words, each with what to do about it: by pipeline rank and kind of action, where a step was
    recorded action by action and its prediction is `whole`; else by kind; and collectives far below their priced bandwidth."""
    below = [(one.costs_s, str(one), ADVICE) for one in bandwidths(record) if one.far_below]
    if predicted and measured and whole:
        total_s = predicted_timeline(record)["total_us"] / 1e6
        ended_s = max(span.end_s for span in measured)
        found = action_gaps(_actions(predicted), _actions(measured), (total_s, ended_s))
        others = [(abs(gap.costs_s), str(gap), gap.advice) for gap in found]
    else:
        words = [(abs(gap.costs_s), *str(gap).rpartition("): ")) for gap in gaps(record)]
        others = [(cost, f"{a})" if a else b, b if a else "") for cost, a, _, b in words]
    for one in below:  # a cause, beside what it may have others wait for: where that would stand, or before
        place = next((n for n, other in enumerate(others) if other[0] <= one[0]), len(others))
        others.insert(place, one)
    return [(text, advice) for _, text, advice in others[:SHOWN]]


def _actions(spans: Sequence[Span]) -> list[Action]:
    """By pipeline rank and kind, how long each takes; what runs beside them is left out."""
    found = []
    for span in spans:
        _, kind, _ = split_action(span.action)
        label = {"weight": "backward"}.get(span.label, span.label)
        label = kind_of(kind) if label not in ("forward", "backward", "optimizer") else label
        found.append((span.rank, label, span.end_s - span.start_s))
    return found


def _curve(records: Sequence[Record], key: str) -> Chart | None:
    """A value of every step of a run; steps that were done again count as they were done last."""
    found = {
        step["step"]: float(step[key]) for one in records for step in one.steps if step[key] == step[key]
    }
    points = sorted(found.items())
    return line(points) if len(points) > 1 else None
