"""From an ended search to the answer: the strategy checked and priced whole, its proof, its rivals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoparallel.planner.check import check_plan
from autoparallel.planner.explain.alternatives import alternatives
from autoparallel.planner.explain.break_even import break_evens
from autoparallel.planner.explain.choice import complexity, is_tight, simpler_because
from autoparallel.planner.explain.constraints import constraint_costs
from autoparallel.planner.explain.simplest import simplest
from autoparallel.planner.explain.tradeoffs import tradeoffs
from autoparallel.planner.outcome import GIB, Alternative, ConstraintCost, Explored, PlanResult
from autoparallel.planner.problem import Objective, Problem, objective_value
from autoparallel.planner.score import completed, score
from autoparallel.planner.search.bounds.outer import Outer
from autoparallel.planner.search.driver import Search
from autoparallel.planner.search.evaluate import TOLERANCE, Evaluation, evaluate
from autoparallel.planner.search.space.certificate import space_of
from autoparallel.planner.strategy.types import Strategy

IMPROVEMENTS = 4  # times that a rival which turns out better takes the answer's place


def result_of(
    outer: Outer, search: Search, *, work: float, explain: bool, processes: int = 1, within: float = 0.0
) -> PlanResult:
    """The answer of one search that found something; `work` goes into each kind of rejected strategy (0: none is looked for), and all of
    them are looked for in so many `processes`. Of what is `within` that share of the optimum the simplest is chosen. Its seconds are
    still to come."""
    assert search.incumbent is not None
    problem, expander = outer.problem, outer.book.expander
    search.sims.incumbent = simplest(outer, search.incumbent)
    rivals = _rivals(outer, search, work, processes) if work else ()
    best = search.sims.incumbent = simplest(outer, search.incumbent)  # a rival may have taken its place
    chosen = _chosen(outer, search, rivals, within)
    rivals = tuple(one for one in rivals if one.strategy != chosen.strategy)
    strategy = completed(expander, chosen.strategy)
    prediction = score(problem.graph, problem.cluster, strategy, expander)
    check_plan(problem, strategy, prediction, expander)
    bound, broken = search.bound(), tuple(search.sims.broken)
    proof = proof_of(
        problem, best.step_time_s, search.value[0], bound[0], optimal=not broken and not search.may_win(bound)
    )
    candidates, other = search.candidates, chosen is not best
    return PlanResult(
        strategy=strategy,
        prediction=prediction,
        status=proof.status,
        lower_bound_s=proof.lower_bound_s,
        gap=proof.gap,
        candidates=candidates,
        pruned=max(candidates - search.solved, 0),
        seconds=0.0,
        alternatives=rivals,
        constraints=_constraints(outer, best) if explain else (),
        explored=explored(outer, search),
        tradeoffs=tradeoffs(outer, chosen) if explain else (),
        break_evens=break_evens(problem, strategy) if explain else (),
        optimum=completed(expander, best.strategy) if other else None,
        optimum_s=best.step_time_s,
        instead=simpler_because(chosen.strategy, best.strategy, (is_tight(chosen), is_tight(best)))
        if other
        else "",
        space=space_of(problem),
        broken=broken,
    )


def _chosen(outer: Outer, search: Search, rivals: Sequence[Alternative], within: float) -> Evaluation:
    """The simplest of what was simulated within a share of the optimum."""
    best = search.incumbent
    assert best is not None
    problem = outer.problem
    if not within or problem.objective is Objective.MEMORY:
        return best
    limit = search.value[0] * (1.0 + within)
    near = [one for one in search.seen if outer.fits(one) and objective_value(problem, one)[0] <= limit]
    kinds = [evaluate(outer.book.expander, a.strategy) for a in rivals if a.feasible and a.value[0] <= limit]
    found = min((best, *near, *kinds), key=lambda one: (complexity(one.strategy, one), one.step_time_s))
    if complexity(found.strategy, found) == complexity(best.strategy, best):
        return best
    found = simplest(outer, found, limit=limit)
    return best if found.strategy == best.strategy else found


def _rivals(outer: Outer, search: Search, work: float, processes: int) -> tuple[Alternative, ...]:
    """The best of each other kind. Where the search was not proved, one of them may be better than what it found:
    then that is the answer, and its rivals are looked for."""
    assert search.incumbent is not None
    found = alternatives(outer, search.incumbent, search.seen, work=work, processes=processes)
    for _ in range(IMPROVEMENTS):
        better = [a for a in found if a.feasible and search.may_win(a.value)]
        if not better:
            break
        one = evaluate(outer.book.expander, better[0].strategy)
        search.seen.append(one)
        search.consider(one)
        found = alternatives(outer, search.incumbent, search.seen, work=work, processes=processes)
    return tuple(a for a in found if not a.feasible or not search.may_win(a.value))


def explored(outer: Outer, search: Search) -> tuple[Explored, ...]:
    """What a search simulated on its way."""
    return tuple(
        Explored(
            step_time_s=e.step_time_s, peak_memory_gib=e.peak_bytes / GIB,
            feasible=outer.fits(e), label=_label(e.strategy),
        )
        for e in search.seen
    )  # fmt: skip


def _constraints(outer: Outer, best: Evaluation) -> tuple[ConstraintCost, ...]:
    """What the constraints cost; an interrupt keeps those that are known."""
    found = []
    try:
        for cost in constraint_costs(outer, best):
            found.append(replace(cost, strategy=completed(outer.book.expander, cost.strategy)))
    except KeyboardInterrupt:
        pass
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How far a strategy is proved to be the best: `gap` is the share by which a better one could beat it."""

    status: str
    gap: float
    lower_bound_s: float


def proof_of(problem: Problem, step_time_s: float, value: float, bound: float, *, optimal: bool) -> Proof:
    """The proof for a strategy worth `value` where nothing is below `bound`. `lower_bound_s` is the bound on the objective
    as seconds on as many devices; the step itself where seconds come second."""
    gap = 0.0 if optimal else max(0.0, 1.0 - bound / value)
    below = TOLERANCE if optimal or problem.objective == Objective.MEMORY else gap
    return Proof(
        status="optimal" if optimal else "feasible",
        gap=gap,
        lower_bound_s=step_time_s * (1 - below),
    )


def _label(strategy: Strategy) -> str:
    mesh = strategy.mesh
    sizes = " ".join(
        f"{name}{getattr(mesh, name)}"
        for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
        if getattr(mesh, name) > 1
    )
    return f"{sizes or 'one device'} zero{strategy.shard.zero} micro{strategy.batch.micro} {strategy.recompute.mode}"
