"""`plan`: the best strategy for a problem, with its proof."""

from __future__ import annotations

from autoparallel.planner.outcome import (
    Alternative,
    Explored,
    InfeasiblePlan,
    PlanResult,
    Progress,
    Relaxation,
    SearchTimeout,
)

__all__ = [
    "Alternative",
    "Explored",
    "InfeasiblePlan",
    "PlanResult",
    "Progress",
    "Relaxation",
    "SearchTimeout",
]
