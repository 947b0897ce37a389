"""Predicted and measured, kind by kind, in the order of what the difference costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
Action = tuple[int, str, float]
_KIND_WORDS = {
    "forward": "forward passes", "backward": "backward passes", "optimizer": "the optimizer", "data": "reading samples",
    "idle": "communication and waiting",
}  # fmt: skip
_CONSEQUENCE = 0.9  # others wait for what takes longer: of two that are about as large the cause comes first. Kind: choice
_KIND_ADVICE = {
    "forward": "the device computes slower than its profile says: `autoparallel profile` measures it, `autoparallel "
    "calibrate PROFILE --measured RUN/` corrects it, and a rank that is slower than its peers is named by `watch`",
    "backward": "the device computes slower than its profile says: measure it (`autoparallel profile`) or calibrate it by this "
    "run; where only the backward pass is longer, look for recomputation that the strategy does not have",
    "optimizer": "see whether the optimizer is fused (torch's fused=True), and where its state lies",
    "data": "the data loader does not keep up: loader={'num_workers': …}, or samples that are prepared beforehand",
    "idle": "the stage waits: for a slower stage (see its passes), for a slow link (`autoparallel profile` measures them), or "
    "for gradients that nothing hides (grad_sync.overlap, a larger bucket)",
}  # fmt: skip
# Steps at the beginning of a start that are left out: kernels are compiled, memory is taken. Kind: choice.
WARM_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    """Seconds of one kind, as predicted and as measured."""

    kind: str
    predicted_s: float
    measured_s: float

    @property
    def costs_s(self) -> float:
        return self.measured_s - self.predicted_s

    @property
    def _how_much(self) -> str:
        """`0.2 s longer, 12 %`."""
        share = f", {100 * abs(self.costs_s) / self.predicted_s:.0f} %" if self.predicted_s > 0 else ""
        return f"{abs(self.costs_s):.3g} s {'longer' if self.costs_s > 0 else 'shorter'}{share}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap(_Difference):
    """Seconds a step of one kind, as predicted and as measured on the slowest rank (median over the steps)."""

    def __str__(self) -> str:
        advice = f": {_ADVICE[self.kind]}" if self.costs_s > 0 else ""
        return (
            f"{self.kind}: {self.measured_s:.4g} s where {self.predicted_s:.4g} s were predicted "
            f"({self._how_much}){advice}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionGap(_Difference):
    """Seconds of one kind of action of one pipeline rank in a step, as predicted and as measured there; `idle`: between
    actions, as predicted, and spent waiting for messages, as measured."""

    rank: int

    def __str__(self) -> str:
        return (
            f"pipeline rank {self.rank}, {_KIND_WORDS[self.kind]}: {self.measured_s:.4g} s where {self.predicted_s:.4g} s "
            f"were predicted ({self._how_much})"
        )

    @property
    def advice(self) -> str:
        """What to do about it."""
        if self.costs_s <= 0:
            return "the prediction was too dark: `autoparallel calibrate PROFILE --measured RUN/` corrects the profile"
        return _KIND_ADVICE[self.kind]


def action_gaps(
    predicted: Sequence[Action], measured: Sequence[Action], step_s: tuple[float, float]
) -> list[ActionGap]:
    """By pipeline rank and kind, the largest difference first. An action is (pipeline rank, kind, seconds); messages and
    reductions that run beside computation are not in `predicted`, and what a rank waits for them is what lacks to the step,
    whose predicted and measured seconds are `step_s`."""
    found = []
    for rank in sorted({r for r, _, _ in measured}):
        sums = [_by_kind(rank, actions) for actions in (predicted, measured)]
        for own, whole in zip(sums, step_s, strict=True):
            own["idle"] = max(whole - sum(own.values()), 0.0)
        found += [
            ActionGap(
                rank=rank, kind=kind, predicted_s=sums[0].get(kind, 0.0), measured_s=sums[1].get(kind, 0.0)
            )
            for kind in _KIND_WORDS
        ]
    return sorted(
        (gap for gap in found if gap.costs_s),
        key=lambda gap: -abs(gap.costs_s) * (_CONSEQUENCE if gap.kind == "idle" else 1.0),
    )


def _by_kind(rank: int, actions: Sequence[Action]) -> dict[str, float]:
    found: dict[str, float] = {}
    for of, kind, seconds in actions:
        if of == rank and kind in _KIND_WORDS:
            found[kind] = found.get(kind, 0.0) + seconds
    return found


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
