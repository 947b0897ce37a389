"""What `--json` and `[predicted]` say of how far a prediction should be trusted."""

from __future__ import annotations

from typing import Any

from autoparallel.costmodel.confidence import MEMORY_FACTOR, confidence, fits
from autoparallel.costmodel.prediction import Prediction
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.strategy.types import Strategy

GIB = 1024**3


def confidence_table(expander: Expander, strategy: Strategy, prediction: Prediction) -> dict[str, Any]:
    """How far time and memory should be trusted: intervals, what they were seen on, what kinds of figures the time rests
    on, and how probably the step fits."""
    timetable = expander.prepared(strategy).timetable
    found = confidence(expander.program(strategy), expander.cluster, timetable)
    return {
        "step_time_low_s": found.low_s,
        "step_time_high_s": found.high_s,
        "coverage": found.coverage,
        "basis": found.basis,
        "rests_on": dict(found.shares),
        "peak_memory_low_gib": prediction.peak_bytes / GIB / MEMORY_FACTOR,
        "peak_memory_high_gib": prediction.peak_bytes / GIB * MEMORY_FACTOR,
        "fits": fits(prediction),
    }
