"""`plan`: the best strategy for a problem, with its proof.

Best bound first. Shapes (mesh, micro-batch, recomputation) are bounded all at once; those that may win are
expanded to variants, again bounded all at once; a variant that comes up gets its stage problem, whose CP-SAT
bound takes the place of the first one; when that still leads, its partition is simulated, the critical path of the
simulation becomes a row of the stage problem, and the variant goes back with the bound that it then has. The
search ends when no bound is below the incumbent: the incumbent is then the best under the cost model, up to
`TOLERANCE`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf

from autoparallel.costmodel.collecting import without_collection
from autoparallel.planner.embedding.options import tiers_matter, without_tables
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.explain.alternatives import work_of_kinds
from autoparallel.planner.explain.infeasible import explain_empty, explain_infeasible
from autoparallel.planner.explain.result import result_of
from autoparallel.planner.heterogeneous.irregular import has_parts
from autoparallel.planner.heterogeneous.plan_parts import plan_parts
from autoparallel.planner.kernels import plan_kernels
from autoparallel.planner.local_updates import asks_outer, plan_outer, without_outer
from autoparallel.planner.outcome import (
    ADVISING,
    Alternative,
    ConstraintCost,
    Explored,
    InfeasiblePlan,
    PlanResult,
    Progress,
    Relaxation,
    SearchTimeout,
)
from autoparallel.planner.problem import NOTHING, Problem, Value, objective_value
from autoparallel.planner.recovering import Expanders, with_recovery, without_recovery
from autoparallel.planner.recovery import patient
from autoparallel.planner.search.bounds.outer import outer_of
from autoparallel.planner.search.driver import Search, Stopped, WorkDone
from autoparallel.planner.search.headway import Watched
from autoparallel.planner.search.space.certificate import space_of
from autoparallel.planner.search.tensor_plans import search_tensor_plans
from autoparallel.planner.strategy.lengths import SEQ_LEN, graph_at, with_length

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

# Work after which a search without a time limit stops, proved or not, so that equal inputs give equal plans on any machine
# (`Search.work`, about milliseconds). In any case:
MOST_WORK = 10_000.0
# Where the gap is small, after so much as soon as nothing better was found for so long. Kind: measured
SMALL_GAP, EARLY, SHORT_IDLE = 0.02, 1500.0, 700.0
# Where it is not far from that, once the local search has nothing left, and the pace of the last `LATELY` will not make it small.
LARGE_GAP, ENOUGH_WORK, LATELY = 0.05, 4000.0, 2000.0
# Where it is large, once nothing better was found for so long, and the bound has risen by less than `SLOW` in the last `LATELY`.
LONG_IDLE, SLOW = 5000.0, 0.01
TIERS_SHARE = 0.5  # of the time that a user gives, for embedding tables in tiers. Kind: choice
RECOVERY_SHARE = 4.0  # a search for a plan that recovers better takes so much less. Kind: choice
# Of that time, for the strategies that are told beside the answer, where it is enough for them: seconds. Kind: measured
TOLD_SHARE, TOLD_S = 0.05, 1.5
REPORT_EVERY_S = 0.1


@without_collection()
def plan(
    problem: Problem,
    *,
    time_limit_s: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    explain: bool = False,
    advise: bool = True,
    rivals: bool = True,
    expander: Expander | None = None,
    processes: int = 1,
    within: float = 0.0,
    most_work: float = MOST_WORK,
) -> PlanResult:
    """The best strategy of the problem's space, and how far that is proved; of what is `within` that share of it, the simplest.

    A time limit or an interrupt returns the best so far with its gap. `explain` also looks for the best plan without each constraint, and
    longer for the best of each kind that was not chosen; without `rivals` nobody looks for these (a proved optimum is the same; without
    a proof one of them may be better). Where nothing fits, `advise` looks for what would. A caller who has more to ask about the answer
    passes the `expander` of graph and cluster, which then knows it. With two `processes` the prices of a large space are made, and
    rejected kinds searched, in both: the answer is the same. A caller whose process must not be forked leaves it at one. A search without a time limit stops after `most_work`.
    Raises `InfeasiblePlan` where nothing fits, `SearchTimeout` where time ended before anything was found, `UserError`
    where the constraints allow no legal strategy at all.
    """
    started_s = time.monotonic()
    each = max(len(problem.kernels), 1)  # searches that share time and work
    again = partial(
        plan, time_limit_s=None if time_limit_s is None else time_limit_s / each, progress=progress, explain=explain, advise=advise, rivals=rivals, processes=processes,
        within=within, most_work=most_work / each,
    )  # fmt: skip
    if (wider := _wider(problem, again, partial(again, advise=False))) is not None:
        return replace(wider, seconds=time.monotonic() - started_s)
    watch, stated = _Watch(started_s, time_limit_s, progress, most_work, tells=rivals), problem
    problem = without_outer(without_recovery(problem))
    tables = tiers_matter(problem, alike=not has_parts(problem))
    if tables:
        from autoparallel.planner.embedding.answer import plan_tiers

        def on_devices(bare: Problem, rival: Value, *, tell: bool) -> PlanResult:
            told = advise and tell
            return _plan(bare, watch, expander, processes, within, explain=explain, advise=told, rival=rival)

        result = plan_tiers(problem, expander, on_devices, partial(watch.check_time, share=TIERS_SHARE))
    elif has_parts(problem):
        result = plan_parts(
            without_tables(problem), watch.check, explain=explain, within=within, advise=advise, rivals=rivals
        )
    else:
        bare = without_tables(problem)
        expander = expander or (Expander(bare.graph, bare.cluster) if problem.cluster.failures else None)
        result = _plan(bare, watch, expander, processes, within, explain=explain, advise=advise)

    watch.share(RECOVERY_SHARE)
    known = Expanders(expander)

    def recovers(other: Problem) -> PlanResult:
        return _plan(other, watch, known.of(other), processes, within, explain=False, advise=False)

    result = with_recovery(stated, result, recovers, known)
    space = space_of(stated, tables=tables)
    return replace(result, seconds=time.monotonic() - started_s, space=space)


def _wider(
    problem: Problem, search: Callable[[Problem], PlanResult], quietly: Callable[[Problem], PlanResult]
) -> PlanResult | None:
    """The plan of a problem that is made of others: phases, of which the first is planned, sequences whose length is stated, kinds of
    kernels (searched `quietly`), and local updates."""
    if phases := problem.constraints.get("phase"):
        assert isinstance(phases, tuple)
        kept = {k: v for k, v in problem.constraints.items() if k != "phase"}
        found = search(replace(problem, constraints=kept))
        strategy = replace(found.strategy, phases=phases)
        if "recovery.timeout_s" not in problem.constraints:
            strategy = patient(Expander(problem.graph, problem.cluster), strategy)
        return replace(found, strategy=strategy)
    if tokens := problem.constraints.get(SEQ_LEN):
        assert isinstance(tokens, int)
        kept = {k: v for k, v in problem.constraints.items() if k != SEQ_LEN}
        found = search(replace(problem, constraints=kept, graph=graph_at(problem.graph, tokens)))
        return replace(found, strategy=with_length(found.strategy, tokens), space=space_of(problem))
    if problem.kernels:
        return plan_kernels(problem, search, quietly)
    if asks_outer(problem):
        return replace(plan_outer(problem, search), space=space_of(problem))
    return None


def _plan(
    problem: Problem,
    watch: _Watch,
    expander: Expander | None,
    processes: int,
    within: float,
    *,
    explain: bool,
    advise: bool,
    rival: Value = NOTHING,
) -> PlanResult:
    """One search; where nothing fits, `advise` asks for the reason and what would. Where a `rival` is known of another space, it is
    what the search is about to beat."""
    outer = outer_of(problem, expander, processes)
    if outer is None:
        raise explain_empty(problem)
    search = Search(outer=outer, check=watch.check, rival=rival)
    stopped = watch.ended_early(search.run)
    if search.incumbent is not None or not stopped:

        def points() -> None:
            ended = not stopped
            if not search_tensor_plans(search, watch.check_limits, ended=ended, most_work=watch.most_work):
                raise Stopped

        stopped |= watch.ended_early(points)
    if search.incumbent is None:
        if stopped:  # not looked at is not infeasible
            raise SearchTimeout(
                f"no strategy found within {time.monotonic() - watch.started_s:.1f} s; allow more time, or fix some keys",
                bound=search.bound()[0],
            )
        if search.errors and not search.seen:
            raise search.errors[0]
        if not advise:
            raise InfeasiblePlan("memory of the devices")
        watch.say_advising(search)
        raise explain_infeasible(outer, lambda: watch.check_time(None))
    search.sims.value = objective_value(problem, search.incumbent)
    explain = explain and not (stopped and watch.is_limited)
    out_of_time = stopped and watch.is_limited and watch.left_s() <= watch.reserved_s / 2
    return result_of(
        outer,
        search,
        work=work_of_kinds(explain=explain, out_of_time=out_of_time) if watch.tells else 0.0,
        explain=explain,
        processes=processes,
        within=within,
    )


class _Watch:
    """Stops a search at its limits, and reports how it goes."""

    def __init__(
        self,
        started_s: float,
        limit_s: float | None,
        progress: Callable[[Progress], None] | None,
        most_work: float,
        *,
        tells: bool,
    ) -> None:
        self.started_s, self.limit_s, self.progress = started_s, limit_s, progress
        self.reported_s = started_s
        self.whole_work = self.most_work = most_work
        self.interrupted, self.tells = False, tells

    def ended_early(self, search: Callable[[], None]) -> bool:
        """Run a search; whether a limit or an interrupt ended it. After an interrupt every search ends at once."""
        try:
            search()
        except Stopped:
            return True
        except KeyboardInterrupt:
            self.interrupted = True
            return True
        return False

    def share(self, parts: float) -> None:
        """Divide the work evenly among so many searches."""
        self.most_work = self.whole_work / parts

    def check(self, search: Watched) -> None:
        """Called before every step of the search."""
        self.check_limits(search)
        if self.limit_s is None and self.worked_enough(search):
            raise WorkDone

    def check_limits(self, search: Watched) -> None:
        """Likewise, of a search whose work is counted elsewhere."""
        now_s = time.monotonic()
        if self.interrupted or self.left_s() <= self.reserved_s:
            raise Stopped
        if self.progress is not None and now_s - self.reported_s >= REPORT_EVERY_S:
            self.reported_s = now_s
            self.progress(_progress(search, now_s - self.started_s))

    def say_advising(self, search: Watched) -> None:
        """Nothing fits: what comes now is the search for what would."""
        if self.progress is not None:
            told = _progress(search, time.monotonic() - self.started_s)
            self.progress(replace(told, phase=ADVISING))

    def check_time(self, _: object, share: float = 1.0) -> None:
        """Called before every step of a search that counts its work itself, and has so much of the time."""
        if self.limit_s is not None and time.monotonic() - self.started_s >= self.limit_s * share:
            raise Stopped

    @property
    def is_limited(self) -> bool:
        """Whether the user wants no more than so much time, by a limit or an interrupt."""
        return self.interrupted or self.limit_s is not None

    def left_s(self) -> float:
        """Seconds that the user has left."""
        if self.interrupted:
            return 0.0
        return inf if self.limit_s is None else self.limit_s - (time.monotonic() - self.started_s)

    @property
    def reserved_s(self) -> float:
        """Of these, what is left for the strategies that are told beside the answer, where that is enough for them."""
        share_s = 0.0 if self.limit_s is None else self.limit_s * TOLD_SHARE
        return share_s if share_s >= TOLD_S else 0.0

    def worked_enough(self, search: Watched) -> bool:
        """Whether the search has done all the work that it does without a time limit."""
        work, value, bound = search.work, search.value[0], search.bound()[0]
        headway, scale = search.headway, self.most_work / MOST_WORK
        headway.note(work, value, bound)
        if work >= self.most_work:
            return True
        if value <= bound * (1 + SMALL_GAP):
            return work >= EARLY * scale and headway.idle >= SHORT_IDLE * scale
        lately = LATELY * scale
        if value > bound * (1 + LARGE_GAP):
            idle = search.incumbent is not None and headway.idle >= LONG_IDLE * scale
            return idle and headway.closed(lately) < SLOW
        if work < ENOUGH_WORK * scale:
            return False
        return search.settled and not headway.will_close(SMALL_GAP, lately, self.most_work - work)


def _progress(search: Watched, elapsed_s: float) -> Progress:
    candidates, bound = search.candidates, search.bound()[0]
    return Progress(
        phase="solve",
        candidates=candidates,
        pruned=candidates - search.solved,
        solved=search.solved,
        incumbent=search.value[0] if search.incumbent is not None else None,
        bound=bound if bound != float("inf") else None,
        elapsed_s=elapsed_s,
    )
