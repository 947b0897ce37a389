"""What each phase of a run costs, as plain data and in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.phases import phase_prices
from autoparallel.planner.strategy.types import Strategy

GIB = 1024**3


def phases_table(expander: Expander, strategy: Strategy) -> dict[str, Any]:
    """`phases`, where a strategy has some: the first step of each, its sequences, and what a step of it takes."""
    found = [
        {
            "from_step": phase.from_step,
            "seq_len": phase.seq_len,
            "feasible": phase.prediction.feasible,
            "step_time_s": phase.prediction.step_time_s,
            "tokens_per_s_per_device": phase.prediction.tokens_per_s_per_device,
            "peak_memory_gib": phase.prediction.peak_bytes / GIB,
            "capacity_gib": phase.prediction.capacity_bytes / GIB,
        }
        for phase in phase_prices(expander, strategy)
    ]
    return {"phases": found} if found else {}


def phase_lines(predicted: Mapping[str, Any]) -> Iterator[str]:
    """A line for each phase of a `[predicted]` table."""
    for phase in predicted.get("phases", ()):
        peak, capacity = phase["peak_memory_gib"], phase["capacity_gib"]
        fits = "" if phase["feasible"] else f", which does not fit in {capacity:.1f} GiB"
        length = f"sequences of {phase['seq_len']:,}, " if phase["seq_len"] > 1 else ""
        yield f"from step {phase['from_step']}: {length}{phase['step_time_s']:.4g} s a step, {peak:.1f} GiB{fits}"
