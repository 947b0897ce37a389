"""From an ended search to the answer: the strategy checked and priced whole, its proof, its rivals."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoparallel.costmodel.prediction import Prediction
from autoparallel.planner.check import check_plan
from autoparallel.planner.explain.alternatives import alternatives
from autoparallel.planner.explain.constraints import constraint_costs
from autoparallel.planner.explain.simplest import simplest
from autoparallel.planner.explain.tradeoffs import tradeoffs
from autoparallel.planner.outcome import GIB, Alternative, ConstraintCost, Explored, PlanResult
from autoparallel.planner.problem import Objective, Problem
from autoparallel.planner.score import completed, score
from autoparallel.planner.search.bounds.outer import Outer
from autoparallel.planner.search.driver import Search
from autoparallel.planner.search.evaluate import TOLERANCE, Evaluation, evaluate
from autoparallel.planner.strategy.types import Strategy

IMPROVEMENTS = 4  # times that a rival which turns out better takes the answer's place


def result_of(
    outer: Outer, search: Search, *, work: float, explain: bool, processes: int = 1
) -> PlanResult:
    """The answer of one search that found something; `work` goes into each kind of rejected strategy, and all of them are
    looked for in so many `processes`. Its seconds are still to come."""
    assert search.incumbent is not None
    problem, expander = outer.problem, outer.book.expander
    search.sims.incumbent = simplest(outer, search.incumbent)
    rivals = _rivals(outer, search, work, processes)
    search.sims.incumbent = simplest(outer, search.incumbent)  # a rival may have taken its place
    rivals = tuple(one for one in rivals if one.strategy != search.incumbent.strategy)
    strategy = completed(expander, search.incumbent.strategy)
    prediction = score(problem.graph, problem.cluster, strategy, expander)
    check_plan(problem, strategy, prediction, expander)
    bound = search.bound()
    proof = proof_of(problem, prediction, search.value[0], bound[0], optimal=not search.may_win(bound))
    candidates = search.candidates
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
        constraints=_constraints(outer, search.incumbent) if explain else (),
        explored=explored(outer, search),
        tradeoffs=tradeoffs(outer, search.incumbent) if explain else (),
    )


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


def proof_of(problem: Problem, prediction: Prediction, value: float, bound: float, *, optimal: bool) -> Proof:
    """The proof for a strategy worth `value` where nothing is below `bound`. `lower_bound_s` is the bound on the objective
    as seconds on as many devices; the step itself where seconds come second."""
    gap = 0.0 if optimal else max(0.0, 1.0 - bound / value)
    below = TOLERANCE if optimal or problem.objective == Objective.MEMORY else gap
    return Proof(
        status="optimal" if optimal else "feasible",
        gap=gap,
        lower_bound_s=prediction.step_time_s * (1 - below),
    )


def _label(strategy: Strategy) -> str:
    mesh = strategy.mesh
    sizes = " ".join(
        f"{name}{getattr(mesh, name)}"
        for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
        if getattr(mesh, name) > 1
    )
    return f"{sizes or 'one device'} zero{strategy.shard.zero} micro{strategy.batch.micro} {strategy.recompute.mode}"
