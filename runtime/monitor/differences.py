"""Predicted and measured, kind by kind, in the order of what the difference costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from autoparallel.runtime.monitor.record import Record

# Kinds of the prediction by what a run can tell apart, and the words for them.
_JOINED = {
    "forward": ("forward",),
    "backward": ("backward", "recompute"),
    "communication and waiting": ("tp_comm", "cp_comm", "ep_comm", "pp_comm", "dp_comm", "bubble"),
    "optimizer": ("optimizer",),
    "other": ("host_copies", "other", "data"),
}
_ADVICE = {
    "forward": "measure this machine (`autoparallel profile`), or calibrate its profile by this run",
    "backward": "measure this machine (`autoparallel profile`), or calibrate its profile by this run",
    "communication and waiting": "look for stragglers, then measure the links (`autoparallel profile`)",
    "optimizer": "see whether the optimizer is fused (torch's fused=True), and where its state lies",
    "other": "see whether the data loader keeps up (loader={'num_workers': …})",
}
# Steps at the beginning of a start that are left out: kernels are compiled, memory is taken. Kind: choice.
WARM_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Seconds a step of one kind, as predicted and as measured on the slowest rank (median over the steps)."""

    kind: str
    predicted_s: float
    measured_s: float

    @property
    def costs_s(self) -> float:
        return self.measured_s - self.predicted_s

    def __str__(self) -> str:
        more = "longer" if self.costs_s > 0 else "shorter"
        share = f", {abs(self.costs_s) / self.predicted_s:.0%}" if self.predicted_s > 0 else ""
        advice = f": {_ADVICE[self.kind]}" if self.costs_s > 0 else ""
        return (
            f"{self.kind}: {self.measured_s:.4g} s where {self.predicted_s:.4g} s were predicted "
            f"({abs(self.costs_s):.3g} s {more}{share}){advice}"
        )


def step_time_s(record: Record) -> float | None:
    """The median step, the first ones left out; None where there are too few."""
    seconds = [step["seconds"] for step in record.steps[WARM_UP:]]
    return median(seconds) if seconds else None


def gaps(record: Record) -> list[Gap]:
    """The five kinds, the largest difference first; empty where nothing was predicted or measured."""
    predicted: Mapping[str, float] = (record.start.get("predicted") or {}).get("breakdown_s", {})
    steps: list[Mapping[str, Any]] = record.steps[WARM_UP:]
    if not predicted or not steps:
        return []
    found = []
    for kind, parts in _JOINED.items():
        measured = median(sum(step["breakdown_s"].get(part, 0.0) for part in parts) for step in steps)
        found.append(
            Gap(kind=kind, predicted_s=sum(predicted.get(part, 0.0) for part in parts), measured_s=measured)
        )
    return sorted(found, key=lambda gap: -abs(gap.costs_s))
