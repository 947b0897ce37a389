"""`plan`: the best strategy for a problem, with its proof.

Best bound first. Shapes (mesh, micro-batch, recomputation) are bounded all at once; those that may win are
expanded to variants, again bounded all at once; a variant that comes up gets its stage problem, whose CP-SAT
bound takes the place of the first one; when that still leads, its deal is simulated, the critical path of the
simulation becomes a row of the stage problem, and the variant goes back with the bound that it then has. The
search ends when no bound is below the incumbent: the incumbent is then the best under the cost model, up to
`TOLERANCE`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from autoparallel.costmodel.prediction import Prediction
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.problem import Objective, Problem
from autoparallel.planner.score import score
from autoparallel.planner.search.alternatives import EXPLAINED_WORK, WORK, alternatives
from autoparallel.planner.search.check import check_plan
from autoparallel.planner.search.constraints import constraint_costs
from autoparallel.planner.search.evaluate import Evaluation
from autoparallel.planner.search.explain import explain_empty, explain_infeasible
from autoparallel.planner.search.frontier import TOLERANCE, Frontier, Stopped
from autoparallel.planner.search.outcome import (
    GIB,
    Alternative,
    ConstraintCost,
    Explored,
    InfeasiblePlan,
    PlanResult,
    Progress,
    Relaxation,
    SearchTimeout,
)
from autoparallel.planner.search.outer import Outer, outer_of
from autoparallel.planner.strategy.types import Strategy

__all__ = [
    "Alternative",
    "ConstraintCost",
    "Explored",
    "InfeasiblePlan",
    "PlanResult",
    "Progress",
    "Relaxation",
    "SearchTimeout",
    "plan",
]

# Work after which a search without a time limit stops, proved or not, so that equal inputs give equal plans on any
# machine (`Frontier.work`, about milliseconds). Kind: formula: a few seconds for the largest models and clusters.
MOST_WORK = 6000.0
REPORT_EVERY_S = 0.1
WORK_WHEN_STOPPED = 10.0  # on the alternatives, where the user's time is over


def plan(
    problem: Problem,
    *,
    time_limit_s: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    explain: bool = False,
) -> PlanResult:
    """The best strategy of the problem's space, and how far that is proved.

    A time limit or an interrupt returns the best so far with its gap. `explain` also looks for the best plan
    without each constraint, and longer for the best of each kind that was not chosen. Raises `InfeasiblePlan` where nothing
    fits, `SearchTimeout` where time ended before anything was found, `UserError` where the constraints allow no
    legal strategy at all.
    """
    started_s = time.monotonic()
    watch = _Watch(started_s, time_limit_s, progress)
    outer = outer_of(problem)
    if outer is None:
        raise explain_empty(problem)
    frontier = Frontier(outer=outer, check=watch.check)
    stopped = False
    try:
        frontier.run()
    except (Stopped, KeyboardInterrupt):
        stopped = True
    if frontier.incumbent is None:
        if stopped:  # not looked at is not infeasible
            raise SearchTimeout(
                f"no strategy found within {time.monotonic() - started_s:.1f} s; allow more time, or fix some keys"
            )
        if frontier.errors and not frontier.seen:
            raise frontier.errors[0]
        raise explain_infeasible(outer)
    work = WORK_WHEN_STOPPED if stopped else EXPLAINED_WORK if explain else WORK
    result = _result(outer, frontier, started_s, work=work, explain=explain and not stopped)
    return replace(result, seconds=time.monotonic() - started_s)


class _Watch:
    """Stops a search at its limits, and reports how it goes."""

    def __init__(
        self, started_s: float, limit_s: float | None, progress: Callable[[Progress], None] | None
    ) -> None:
        self.started_s, self.limit_s, self.progress = started_s, limit_s, progress
        self.reported_s = started_s

    def check(self, frontier: Frontier) -> None:
        """Called before every step of the search."""
        now_s = time.monotonic()
        if self.limit_s is not None and now_s - self.started_s >= self.limit_s:
            raise Stopped
        if self.limit_s is None and self.worked_enough(frontier):
            raise Stopped
        if self.progress is not None and now_s - self.reported_s >= REPORT_EVERY_S:
            self.reported_s = now_s
            self.progress(_progress(frontier, now_s - self.started_s))

    def worked_enough(self, frontier: Frontier) -> bool:
        """Whether the search has done all the work that it does without a time limit."""
        return self.limit_s is None and frontier.work >= MOST_WORK


def _progress(frontier: Frontier, elapsed_s: float) -> Progress:
    candidates, bound = int(frontier.outer.counts.sum()), frontier.bound()[0]
    return Progress(
        phase="solve",
        candidates=candidates,
        pruned=candidates - frontier.solved,
        solved=frontier.solved,
        incumbent=frontier.value[0] if frontier.incumbent is not None else None,
        bound=bound if bound != float("inf") else None,
        elapsed_s=elapsed_s,
    )


def _result(outer: Outer, frontier: Frontier, started_s: float, *, work: float, explain: bool) -> PlanResult:
    assert frontier.incumbent is not None
    problem, expander = outer.problem, outer.book.expander
    strategy = with_rules(expander, frontier.incumbent.strategy)
    prediction = score(problem.graph, problem.cluster, strategy, expander)
    check_plan(problem, strategy, prediction)
    value, bound = frontier.value[0], frontier.bound()[0]
    optimal = not frontier.may_win(frontier.bound())
    gap = 0.0 if optimal else max(0.0, 1.0 - bound / value)
    candidates = int(outer.counts.sum())
    return PlanResult(
        strategy=strategy,
        prediction=prediction,
        status="optimal" if optimal else "feasible",
        lower_bound_s=_lower_bound_s(problem, prediction, gap if not optimal else TOLERANCE),
        gap=gap,
        candidates=candidates,
        pruned=max(candidates - frontier.solved, 0),
        seconds=time.monotonic() - started_s,
        alternatives=alternatives(outer, frontier.incumbent, frontier.seen, work=work),
        constraints=_constraints(outer, frontier.incumbent) if explain else (),
        explored=tuple(
            Explored(
                step_time_s=e.step_time_s, peak_memory_gib=e.peak_bytes / GIB,
                feasible=outer.excess_bytes(e) <= 0, label=_label(e.strategy),
            )
            for e in frontier.seen
        ),
    )  # fmt: skip


def _constraints(outer: Outer, best: Evaluation) -> tuple[ConstraintCost, ...]:
    """What the constraints cost; an interrupt keeps those that are known."""
    found = []
    try:
        for cost in constraint_costs(outer, best):
            found.append(replace(cost, strategy=with_rules(outer.book.expander, cost.strategy)))
    except KeyboardInterrupt:
        pass
    return tuple(found)


def _lower_bound_s(problem: Problem, prediction: Prediction, gap: float) -> float:
    """The bound on the objective as seconds on as many devices; the step itself where seconds come second."""
    if problem.objective == Objective.MEMORY:
        return prediction.step_time_s * (1 - TOLERANCE)
    return prediction.step_time_s * (1 - gap)


def with_rules(expander: Expander, strategy: Strategy) -> Strategy:
    """The strategy with the tensor placements that it was priced with."""
    return replace(strategy, tensor=expander.tensor_plan(strategy).rules)


def _label(strategy: Strategy) -> str:
    mesh = strategy.mesh
    sizes = " ".join(
        f"{name}{getattr(mesh, name)}"
        for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        if getattr(mesh, name) > 1
    )
    return f"{sizes or 'one device'} zero{strategy.shard.zero} micro{strategy.batch.micro} {strategy.recompute.mode}"
