"""Timelines for Perfetto (https://ui.perfetto.dev): Chrome's trace event format, a process for each timeline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from autoparallel.costmodel.prediction import Span
from autoparallel.report.charts import split_action

# Messages and reductions run beside the computation of their rank: a row of their own.
_BESIDE = ("_comm",)


def trace(timelines: Mapping[str, Sequence[Span]]) -> str:
    """The JSON of named timelines ("predicted", "measured"): rows are pipeline ranks, times microseconds."""
    events: list[dict[str, object]] = []
    for process, (name, spans) in enumerate(timelines.items(), start=1):
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})
        rows = sorted({(span.rank, span.label.endswith(_BESIDE)) for span in spans})
        for rank, beside in rows:
            row = f"pipeline rank {rank}{', communication' if beside else ''}"
            args = {"name": row}
            events.append(
                {"ph": "M", "pid": process, "tid": 2 * rank + beside, "name": "thread_name", "args": args}
            )
        for span in spans:
            stage, kind, micro = split_action(span.action)
            events.append(
                {
                    "ph": "X", "pid": process, "tid": 2 * span.rank + span.label.endswith(_BESIDE), "name": span.action,
                    "cat": span.label, "ts": span.start_s * 1e6, "dur": (span.end_s - span.start_s) * 1e6,
                    "args": {"stage": stage, "kind": kind, "micro-batch": micro},
                }
            )  # fmt: skip
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
