"""Plan a cluster that is not one regular whole: the best of the searches of its parts (`irregular.py`, `pool.py`).

A part whose placements are too many to look at is searched for a bound, every group priced at its best; then the
best strategies of that are placed by what they say (`assign.py`), and searched where they stand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from autoparallel.planner.check import check_plan
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.explain.alternatives import work_of_kinds
from autoparallel.planner.explain.constraints import ALL
from autoparallel.planner.explain.infeasible import explain_empty, explain_infeasible
from autoparallel.planner.explain.reasons import alternative
from autoparallel.planner.explain.result import explored, proof_of, result_of
from autoparallel.planner.heterogeneous.irregular import every_part
from autoparallel.planner.heterogeneous.mixed import Part
from autoparallel.planner.heterogeneous.pool import Pool, Searched
from autoparallel.planner.outcome import Alternative, Explored, InfeasiblePlan, PlanResult, SearchTimeout
from autoparallel.planner.problem import NOTHING, Problem, Value
from autoparallel.planner.score import completed, score
from autoparallel.planner.search.bounds.outer import Outer, outer_of
from autoparallel.planner.search.driver import Stopped
from autoparallel.planner.search.evaluate import TOLERANCE
from autoparallel.planner.search.headway import Watched


def plan_parts(
    problem: Problem,
    check: Callable[[Watched], None],
    *,
    explain: bool,
    within: float = 0.0,
    advise: bool = True,
    rivals: bool = True,
) -> PlanResult:
    """Search every part; the best of all, against the least of their bounds. `explain`, `within`, `advise` and `rivals` are those of
    `planner.plan.plan`."""
    expander = Expander(graph=problem.graph, cluster=problem.cluster)
    pool, stopped = Pool(outer_of=partial(_outer, expander=expander), check=check), False
    try:
        pool.run(every_part(problem))
    except (Stopped, KeyboardInterrupt):
        stopped = True
        pool.finish()
    winner = pool.winner
    if winner is None:
        raise _nothing(problem, pool, stopped=stopped, advise=advise)
    bound = pool.bound() if pool.opened else (0.0, 0.0)
    out_of_time = stopped and not pool.work_done
    work = work_of_kinds(explain=explain, out_of_time=out_of_time) if rivals else 0.0
    told = explain and not out_of_time
    return _whole(problem, winner, pool.searched, bound, work=work, explain=told, within=within)


def _outer(part: Part, expander: Expander) -> Outer | None:
    """A part's space, with the meshes and orders that want its placement; `expander` is that of any part."""
    outer = outer_of(part.problem, expander.elsewhere(part.problem.cluster))
    if outer is None or part.worth is None:
        return outer
    space = replace(outer.space, meshes=replace(outer.space.meshes, placed=part.worth))
    counts = space.counts()
    return replace(outer, space=space, counts=counts) if counts.any() else None


def _nothing(problem: Problem, pool: Pool, *, stopped: bool, advise: bool) -> Exception:
    done, errors = pool.searched, pool.errors
    if stopped or any(one.search.bound() < NOTHING for one in done):
        return SearchTimeout("no strategy found in the time given; allow more, or fix some keys")
    if done and not advise:
        return InfeasiblePlan("memory of the devices")
    if done:
        return explain_infeasible(done[-1].outer)
    return errors[0] if errors else explain_empty(problem)


def _whole(
    problem: Problem,
    winner: Searched,
    done: list[Searched],
    bound: Value,
    *,
    work: float,
    explain: bool,
    within: float,
) -> PlanResult:
    """The winner's answer as one of the whole cluster, with the other parts among what was rejected."""
    found = result_of(winner.outer, winner.search, work=work, explain=explain, within=within)
    strategy = winner.part.whole(found.strategy)
    prediction = score(problem.graph, problem.cluster, strategy)
    check_plan(problem, strategy, prediction)
    value = winner.search.value
    optimal = not bound[0] < value[0] * (1 - TOLERANCE)
    proof = proof_of(problem, found.optimum_s, value[0], bound[0], optimal=optimal)
    others = [
        one for one in (_other(one, found) for one in done if one is not winner and not one.part.loose) if one
    ]
    own = [replace(a, strategy=winner.part.whole(a.strategy)) for a in found.alternatives]
    kept: dict[str, Alternative] = {}
    for one in sorted([*others, *own], key=lambda a: a.rank):
        kept.setdefault(one.kind, one)
    plans_seen: list[Explored] = [p for one in done for p in explored(one.outer, one.search)]
    return replace(
        found, strategy=strategy, prediction=prediction, status=proof.status, gap=proof.gap,
        lower_bound_s=proof.lower_bound_s,
        optimum=winner.part.whole(found.optimum) if found.optimum is not None else None,
        candidates=sum(one.search.candidates for one in done),
        pruned=sum(max(one.search.candidates - one.search.solved, 0) for one in done),
        alternatives=tuple(kept.values()), explored=tuple(plans_seen),
        constraints=tuple(c for c in found.constraints if c.key in {*problem.constraints, ALL}),
    )  # fmt: skip


def _other(one: Searched, chosen: PlanResult) -> Alternative | None:
    """The best that another part's search saw."""
    if one.best is None:
        return None
    expander = one.outer.book.expander
    strategy = completed(expander, one.best.strategy)
    found = alternative(one.part.problem, one.part.name, strategy, chosen.prediction, expander)
    return replace(found, strategy=one.part.whole(strategy))
