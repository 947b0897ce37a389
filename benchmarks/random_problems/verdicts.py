"""How another strategy stands to an answer, and what was found of one case."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from autoparallel.planner.strategy.file import strategy_to_constraints
from autoparallel.planner.strategy.types import Strategy
from benchmarks.random_problems.answers import Answer

# What the search itself calls equal is 1e-6; a law is not broken by that. Kind: chosen.
EQUAL = 2e-6
NOTABLE = 0.01  # a plan that is not called optimal may be so much worse than another without being counted


class Grade(StrEnum):
    """From a broken law to nothing at all."""

    BROKEN = "broken"  # better than what is called optimal; or feasible where nothing is said to fit
    OUTSIDE = "outside the gap"  # below the stated bound
    CRASHED = "crashed"  # something raised what it may not raise
    CUT = "cut"  # no answer within the limit
    COUNTED = "more than 1 % better"  # than an answer that is not called optimal
    SLIGHT = "better"  # likewise, by less
    FEWER = "better on fewer devices"  # which the planner does not claim to try: told, no law
    KEPT = "kept"


VIOLATIONS = (Grade.BROKEN, Grade.OUTSIDE, Grade.CRASHED, Grade.CUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that does not hold of an answer."""

    law: str  # "key", "strategy", "own key", "price", "twice", "claims", "bound"
    grade: Grade
    told: str
    step_time_s: float = 0.0
    better: float = 0.0  # share by which it is better than the answer


def grade_of(answer: Answer, step_time_s: float, devices: int) -> Grade:
    """How a strategy that fits stands to the answer."""
    if answer.status in ("infeasible", "refused"):
        return Grade.BROKEN if answer.status == "infeasible" else Grade.COUNTED
    if not answer.found:
        return Grade.COUNTED
    if step_time_s >= answer.step_time_s * (1 - EQUAL):
        return Grade.KEPT
    if devices < answer.devices:
        return Grade.FEWER
    if answer.status == "optimal":
        return Grade.BROKEN
    if step_time_s < answer.lower_bound_s * (1 - EQUAL):
        return Grade.OUTSIDE
    return Grade.COUNTED if step_time_s < answer.step_time_s * (1 - NOTABLE) else Grade.SLIGHT


def better_by(answer: Answer, step_time_s: float) -> float:
    """Share of the answer's time that the other one saves; 0 where there is no answer."""
    return 1 - step_time_s / answer.step_time_s if answer.step_time_s else 0.0


def differences(strategy: Strategy, base: Strategy | None) -> str:
    """The keys of a strategy that differ from another's, as `--set` takes them; all but the defaults without one."""
    base = base or Strategy(batch=strategy.batch)
    own, other = strategy_to_constraints(strategy), strategy_to_constraints(base)
    told = []
    for key, value in own.items():
        if value != other.get(key):
            shown = f"{len(value)} rules" if key == "tensor" and isinstance(value, tuple) else value
            told.append(f"{key}={list(shown) if isinstance(shown, tuple) else shown}")
    return " ".join(told)
