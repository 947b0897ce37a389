"""The most that a rank holds at once: its state, and what lives while it walks through the program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoparallel.costmodel.program import ActionKind, Program
from autoparallel.planner.expand.state import casts_parameters, zero_level
from autoparallel.planner.strategy.types import Strategy

if TYPE_CHECKING:
    from autoparallel.runtime.check.dryrun import LoweredStage

_PASSES = {
    ActionKind.FORWARD: "F",
    ActionKind.BACKWARD: "B",
    ActionKind.BACKWARD_INPUT: "I",
    ActionKind.BACKWARD_WEIGHT: "W",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most bytes that a pipeline rank holds, and the action and module in which it does."""

    bytes: float
    action: str
    module: str


def peak_of(
    strategy: Strategy, program: Program, lowered: Sequence[LoweredStage], rank: int, stages: Sequence[int]
) -> Peak | None:
    """Parameters, gradients, optimizer state, activations and temporaries of a pipeline rank at their fullest.

    Actions come in the program's order; each holds the most that was seen of one of its stage. None where the
    dry run did not look.
    """
    if any(not lowered[s].live for s in stages):
        return None
    state = sum(lowered[s].parameter_bytes + lowered[s].optimizer_bytes for s in stages)
    if strategy.mesh.pp == 1:
        return _alone(lowered[stages[0]], state)
    gathers = zero_level(strategy) in (1, 2) or casts_parameters(strategy)
    whole = sum(lowered[s].gathered_bytes for s in stages) if gathers else 0
    before = strategy.micro_batches > 1  # of a micro-batch before the last one there are gradients already
    lasting = whole + sum(lowered[s].gradient_bytes if before else lowered[s].buffer_bytes for s in stages)
    best, flying = Peak(bytes=0.0, action="", module=""), 0
    ends = {action.stage: n for n, action in enumerate(program.ranks[rank]) if action.kind in _PASSES}
    for number, action in enumerate(program.ranks[rank]):
        name = _PASSES.get(action.kind)
        if name is None:
            continue
        lived = lowered[action.stage].live
        saved = lived["F"].kept
        if not before and gathers:
            saved -= lowered[action.stage].gathered_bytes
        if name == "W" and name not in lived:  # halves were not looked at: nothing is freed before the second
            flying -= saved
            continue
        seen = name if name in lived else "B"
        ends_here = ends[action.stage] == number
        live = lowered[action.stage].lived_in(seen, last=ends_here)
        held = state + lasting + flying + live.peak
        if name == "F" and not before and gathers:
            held -= lowered[action.stage].gathered_bytes  # gathered in this very pass, which saw them come
        if held > best.bytes:
            best = Peak(bytes=held, action=seen, module=live.module)
        left = lived["I"].kept if "I" in lived else 0  # by the first half: less what it freed
        flying += {"F": saved, "B": -saved, "I": left, "W": -saved - left}[name]
        if ends_here:
            flying += lowered[action.stage].under_way_bytes
    for s in stages:
        waiting = lowered[s].live.get("REDUCE_GRAD")
        if waiting is not None and state + lasting + flying + waiting.peak > best.bytes:
            held = state + lasting + flying + waiting.peak
            best = Peak(bytes=held, action="REDUCE_GRAD", module=waiting.module)
        flying -= lowered[s].under_way_bytes
    return best


def _alone(stage: LoweredStage, state: int) -> Peak:
    found = [
        Peak(bytes=state + live.begin + live.peak, action=action, module=live.module)
        for action, live in stage.live.items()
    ]
    return max(found, key=lambda peak: peak.bytes)
