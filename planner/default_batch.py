"""Whether a global batch that nobody asked for decides the answer, and which one would serve better.

One sequence per device is all that can be said before a plan is known. On 31 devices that is a batch that no data
parallelism but 31 ranks divides; the next power of two is divided by most.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoparallel.planner.outcome import InfeasiblePlan, PlanResult, SearchTimeout
from autoparallel.planner.plan import plan
from autoparallel.planner.problem import Problem

WORK = 1500.0  # of the search for a plan of the other batch. Kind: formula: a second or two
WORTH = 0.05  # share of a sequence's time from which on the other batch is named. Kind: formula: what predictions are off by


@dataclass(frozen=True, slots=True, kw_only=True)
class BetterBatch:
    """A batch whose plan takes `less` of the time per sequence than that of the default one."""

    global_batch: int
    step_time_s: float
    less: float


def better_batch(problem: Problem, found: PlanResult) -> BetterBatch | None:
    """The next power of two above the problem's batch where its plan takes at least `WORTH` less per sequence."""
    batch = 1 << (problem.global_batch - 1).bit_length()
    if batch == problem.global_batch:
        return None
    constraints = {key: value for key, value in problem.constraints.items() if key != "batch.global"}
    other = replace(problem, global_batch=batch, constraints=constraints)
    try:
        better = plan(other, advise=False, rivals=False, most_work=WORK)
    except (InfeasiblePlan, SearchTimeout):
        return None
    before_s = found.prediction.step_time_s / problem.global_batch
    less = 1.0 - better.prediction.step_time_s / batch / before_s
    if less < WORTH:
        return None
    return BetterBatch(global_batch=batch, step_time_s=better.prediction.step_time_s, less=less)
