"""Plan a cluster that is not one regular whole: the best of the searches of its parts (`space/irregular.py`).

A part whose placements are too many to look at is searched for a bound, every group priced at its best; then the
best strategies of that are placed by what they say (`space/assign.py`), and searched where they stand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from autoparallel.errors import UserError
from autoparallel.planner.check import check_plan
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.explain.alternatives import EXPLAINED_WORK, WORK, WORK_WHEN_STOPPED
from autoparallel.planner.explain.constraints import ALL
from autoparallel.planner.explain.infeasible import explain_empty, explain_infeasible
from autoparallel.planner.explain.reasons import alternative
from autoparallel.planner.explain.result import explored, proof_of, result_of
from autoparallel.planner.heterogeneous.assign import assign, talks
from autoparallel.planner.heterogeneous.irregular import every_part, on_nodes
from autoparallel.planner.heterogeneous.mixed import Part
from autoparallel.planner.outcome import Alternative, Explored, InfeasiblePlan, PlanResult, SearchTimeout
from autoparallel.planner.problem import NOTHING, Problem, Value, objective_value
from autoparallel.planner.score import completed, score
from autoparallel.planner.search.bounds.outer import Outer, outer_of
from autoparallel.planner.search.driver import Search, Stopped
from autoparallel.planner.search.evaluate import TOLERANCE, Evaluation
from autoparallel.planner.search.space.candidates import Candidate
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles.hardware import Cluster

MOST_PLACED = (
    4  # placements that are searched of those that are too many to look at. Kind: formula: seconds each
)
OTHERS = (
    0.4  # of the work of a search, for all placements but the most promising, which has all. Kind: formula
)
FEW = 3  # fewer placements of one network are searched without a glance at all. Kind: formula
GLANCE = 100.0  # work (`Search.work`) that tells which placements to search first. Kind: formula
MOST_ASSIGNED = 8  # strategies that are placed to find them
BOUND_SHARE = 0.5  # of the work, for the bound of placements that are too many to look at; the rest is theirs. Kind: choice
MOST_BEGINS = (
    24  # strategies of that bound's search, the best ones, that are simulated on each placement. Kind: choice
)

Begins = tuple[tuple[Candidate, Strategy], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """A part whose search has ended, its best strategy included if it is better than any before it."""

    part: Part
    outer: Outer
    search: Search
    bound: Value  # of all its strategies
    best: Evaluation | None  # the fastest that it simulated and that fits


def plan_parts(
    problem: Problem,
    check: Callable[[Search], None],
    *,
    explain: bool,
    share: Callable[[float, float], None],
    within: float = 0.0,
    advise: bool = True,
) -> PlanResult:
    """Search every part; the best of all, against the least of their bounds."""
    expander = Expander(graph=problem.graph, cluster=problem.cluster)
    promising = _promising_first(every_part(problem), expander, check)
    waiting = deque[tuple[Part, Searched | None, Begins]]((*one, ()) for one in promising)
    done: list[Searched] = []
    errors: list[UserError] = []
    stopped, value = False, NOTHING
    while waiting:
        part, glanced, begins = waiting.popleft()
        try:
            outer = glanced.outer if glanced is not None else _outer(part, expander)
            if outer is None:
                continue
            if part.worth is None:
                parts = 1 + len(waiting)
                share(parts / BOUND_SHARE if part.loose else parts, sum(one.search.work for one in done))
            else:
                share(1.0 if not done else (1 + len(waiting)) / OTHERS, 0.0)
            seen = glanced.search.seen if glanced is not None else ()
            found = _search(part, outer, check, NOTHING if part.loose else value, seen, begins)
        except UserError as error:  # such as a device that does not compute in the dtype
            errors.append(error)
            continue
        except KeyboardInterrupt:
            stopped = True
            break
        done.append(found)
        if part.loose:
            waiting.extendleft((one, None, begins) for one, begins in _placed(found))
        else:
            value = min(value, found.search.value)
    if not stopped:
        _go_on(done, value, share)
    winners = [one for one in done if one.search.incumbent is not None and not one.part.loose]
    if not winners:
        raise _nothing(problem, done, errors, stopped=stopped, advise=advise)
    bound = (0.0, 0.0) if stopped and waiting else _bound(done)
    work = WORK_WHEN_STOPPED if stopped else EXPLAINED_WORK if explain else WORK
    told = explain and not stopped
    return _whole(problem, min(winners, key=_value), done, bound, work=work, explain=told, within=within)


def _value(winner: Searched) -> Value:
    assert winner.search.incumbent is not None
    return objective_value(winner.outer.problem, winner.search.incumbent)


def _go_on(done: list[Searched], value: Value, share: Callable[[float, float], None]) -> None:
    """What is left of the work goes to the parts that were stopped, the one with the least bound first."""
    for before in sorted(done, key=lambda one: one.bound):
        others = sum(one.search.work for one in done if one is not before)
        if before.part.loose or not before.search.may_win(before.bound):
            continue
        share(1.0, others)
        found = _run(before.part, before.search, value)
        done.remove(before)
        done.append(found)
        value = min(value, found.search.value)


def _promising_first(
    found: tuple[Part, ...], expander: Expander, check: Callable[[Search], None]
) -> list[tuple[Part, Searched | None]]:
    """Parts by the best strategy that a glance finds, with what it saw: what the first one finds is what the others have to beat.
    Placements of one network come after other parts, and stay where they are if they are few."""
    placed = sum(part.worth is not None for part in found)
    others = sum(part.worth is None and not part.loose for part in found)

    def glanced(part: Part) -> bool:
        return placed >= FEW if part.worth is not None else others > 1 and not part.loose

    def glance(search: Search) -> None:
        check(search)
        if search.work >= GLANCE:
            raise Stopped

    glances: list[tuple[Part, Searched | None]] = []
    for part in found:
        seen = None
        if glanced(part):
            with suppress(UserError, KeyboardInterrupt):
                outer = _outer(part, expander)
                seen = _search(part, outer, glance, NOTHING) if outer is not None else None
        glances.append((part, seen))

    def promise(one: tuple[Part, Searched | None]) -> tuple[bool, Value]:
        part, seen = one
        return part.worth is not None, (0.0, 0.0) if seen is None else seen.search.value

    return sorted(glances, key=promise)


def _bound(done: list[Searched]) -> Value:
    """What no strategy of any part goes below: a loose part's bound is that of all its placements."""
    loose = [one.part.problem.cluster for one in done if one.part.loose]
    counted = [
        one.bound for one in done
        if one.part.loose or not any(_same_nodes(one.part.problem.cluster, cluster) for cluster in loose)
    ]  # fmt: skip
    return min(counted, default=NOTHING)


def _same_nodes(one: Cluster, other: Cluster) -> bool:
    return one.groups == other.groups and one.network is not None and other.network is not None


def _placed(loose: Searched) -> Iterator[tuple[Part, Begins]]:
    """The part on the nodes that suit its best strategies, as each of them talks; and the best of each candidate, to begin with
    there."""
    network, outer = loose.part.problem.cluster.network, loose.outer
    assert network is not None
    fitting = sorted(filter(outer.fits, loose.search.seen), key=partial(objective_value, outer.problem))
    found: dict[tuple[int, ...], None] = {}
    for one in fitting[:MOST_ASSIGNED]:
        found.setdefault(assign(network, talks(outer.book.expander.program(one.strategy), network)))
        if len(found) == MOST_PLACED:
            break
    known = loose.search.sims.candidates
    best = sorted(known, key=lambda one: objective_value(outer.problem, known[one]))[:MOST_BEGINS]
    begins = tuple((one, known[one].strategy) for one in best)
    yield from ((on_nodes(loose.part, placement), begins) for placement in reversed(found))


def _outer(part: Part, expander: Expander) -> Outer | None:
    """A part's space, with the meshes and orders that want its placement; `expander` is that of any part."""
    outer = outer_of(part.problem, expander.elsewhere(part.problem.cluster))
    if outer is None or part.worth is None:
        return outer
    space = replace(outer.space, meshes=replace(outer.space.meshes, placed=part.worth))
    counts = space.counts()
    return replace(outer, space=space, counts=counts) if counts.any() else None


def _search(
    part: Part,
    outer: Outer,
    check: Callable[[Search], None],
    value: Value,
    seen: Sequence[Evaluation] = (),
    begins: Begins = (),
) -> Searched:
    """Search a part below a value; `seen` are strategies that are known of it, `begins` such as are simulated first."""
    search = Search(outer=outer, check=check, below=value)
    search.seen.extend(seen)
    search.consider(*seen)
    for chosen, strategy in begins:
        search.sims.try_elsewhere(chosen, strategy)
    return _run(part, search, value)


def _run(part: Part, search: Search, value: Value) -> Searched:
    """Search a part below a value, from where an earlier search of it was stopped."""
    outer, search.sims.value = search.outer, min(search.sims.value, value)
    search.ended()
    bound = search.bound()
    value_of = partial(objective_value, outer.problem)
    best = min(filter(outer.fits, search.seen), default=None, key=value_of)
    if not search.may_win(bound):
        bound = min(search.value, value)
    return Searched(part=part, outer=outer, search=search, bound=bound, best=best)


def _nothing(
    problem: Problem, done: list[Searched], errors: list[UserError], *, stopped: bool, advise: bool
) -> Exception:
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
