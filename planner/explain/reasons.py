"""A strategy that was not chosen, and why it lost, in words."""

from __future__ import annotations

from autoparallel.costmodel.prediction import Prediction
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.outcome import GIB, Alternative
from autoparallel.planner.problem import Objective, Problem, objective_value
from autoparallel.planner.score import score
from autoparallel.planner.strategy.types import Strategy

# A part of the step that differs by less than this share of it says nothing. Kind: formula.
WORTH_SAYING = 0.002
PARTS_SAID = 2
WORDS = {
    "bubble": "pipeline bubble", "dp_comm": "gradient and parameter communication",
    "tp_comm": "tensor-parallel communication", "pp_comm": "communication between stages",
    "recompute": "recomputation", "forward": "forward computation", "backward": "backward computation",
    "optimizer": "the optimizer", "ep_comm": "expert communication", "cp_comm": "context-parallel communication",
    "host_copies": "copies to the hosts and back", "other": "other work",
}  # fmt: skip


def alternative(
    problem: Problem,
    kind: str,
    strategy: Strategy,
    chosen: Prediction,
    expander: Expander | None = None,
    *,
    proved: bool = False,
) -> Alternative:
    """A strategy of a kind, as it compares with the chosen one."""
    found = score(problem.graph, problem.cluster, strategy, expander)
    return Alternative(
        kind=kind, strategy=strategy, step_time_s=found.step_time_s, peak_memory_gib=found.peak_bytes / GIB,
        feasible=found.feasible, reason=reason(found, chosen, problem.objective), proved=proved,
        value=objective_value(problem, found),
    )  # fmt: skip


def reason(theirs: Prediction, ours: Prediction, objective: Objective) -> str:
    """What the chosen strategy, `ours`, is better in, and where that comes from."""
    if not theirs.feasible:
        return f"does not fit: {theirs.peak_bytes / GIB:.1f} GiB of {theirs.capacity_bytes / GIB:.1f} GiB"
    slower = theirs.step_time_s / ours.step_time_s - 1.0
    if objective is Objective.MEMORY:
        more = theirs.peak_bytes / ours.peak_bytes - 1.0
        speed = f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'}".replace("%", " %")
        return f"needs {_percent(more)} more memory, {speed}"
    if objective is Objective.COST and theirs.devices != ours.devices:
        return (
            f"{theirs.devices} devices for {_seconds(theirs.step_time_s)} instead of {ours.devices} for "
            f"{_seconds(ours.step_time_s)} a step"
        )
    if slower <= 0:
        return "as fast, but worse in what was asked for"
    return f"{_percent(slower)} slower{_where(theirs, ours)}"


def _where(theirs: Prediction, ours: Prediction) -> str:
    """The parts of the step that grew most."""
    before, after = dict(ours.breakdown_s), dict(theirs.breakdown_s)
    grown = sorted(((after[key] - before[key], key) for key in after), reverse=True)[:PARTS_SAID]
    said = [
        f"{WORDS[key]} {_seconds(after[key])} instead of {_seconds(before[key])}"
        for more, key in grown
        if more > WORTH_SAYING * ours.step_time_s
    ]
    return f": {', '.join(said)}" if said else ""


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %" if share >= 0.001 else "<0.1 %"


def _seconds(value: float) -> str:
    """Three digits; what is left of subtracting equal times is nothing."""
    if value < 1e-9:
        return "none"
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
