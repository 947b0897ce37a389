"""What each constraint costs: the best plan without it, against the best plan with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autoparallel.planner.outcome import ConstraintCost
from autoparallel.planner.problem import Problem, objective_value
from autoparallel.planner.search.bounds.outer import Outer, outer_of
from autoparallel.planner.search.driver import Search, after
from autoparallel.planner.search.evaluate import Evaluation
from autoparallel.planner.search.tensor_plans import search_tensor_plans
from autoparallel.planner.strategy.types import Strategy

# Work (`Search.work`) that is spent on the plan without a constraint. Kind: formula: about half a second.
WORK = 400.0
ALL = "all of them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """The best strategy found without some constraints, and a bound on all of them."""

    best: Evaluation
    value: float
    bound: float
    proved: bool


def chosen_by_user(constraints: Mapping[str, object]) -> tuple[str, ...]:
    """Constraints on what the planner chooses; inputs (`batch.global`, `[execution]`) are none."""
    return tuple(k for k in constraints if k != "batch.global" and not k.startswith("execution."))


def constraint_costs(outer: Outer, best: Evaluation, *, work: float = WORK) -> Iterator[ConstraintCost]:
    """For each constraint, then for all together, what a plan without it would gain. `best` is the plan with them."""
    problem = outer.problem
    keys = chosen_by_user(problem.constraints)
    here = objective_value(problem, best)[0]
    known = [best]
    for free in [*((key,) for key in keys), *([keys] if len(keys) > 1 else [])]:
        relaxed = without(problem, free)
        found = _best(relaxed, outer, known if free == keys else [best], work)
        if found is None:
            continue
        known.append(found.best)
        key = free[0] if len(free) == 1 else ALL
        yield ConstraintCost(
            key=key,
            value=_plain(problem.constraints[key]) if len(free) == 1 else None,
            instead=setting(found.best.strategy, key) if len(free) == 1 else None,
            cost=max(here / found.value - 1.0, 0.0) if found.value else 0.0,
            at_most=max(here / found.bound - 1.0, 0.0) if found.bound else 0.0,
            proved=found.proved,
            step_time_s=found.best.step_time_s,
            strategy=found.best.strategy,
        )


def _best(problem: Problem, outer: Outer, known: Sequence[Evaluation], work: float) -> Relaxed | None:
    """The best strategy of a relaxed problem: at least as good as those `known` to be strategies of it."""
    wider = outer_of(problem, outer.book.expander)
    if wider is None:
        return None

    search = Search(outer=wider, check=after(work))
    search.consider(*known)
    ended = search.ended()
    search_tensor_plans(search, _never, ended=ended, most_work=work)
    if search.incumbent is None:
        return None
    bound = min(search.bound()[0], search.value[0])
    proved = not search.may_win(search.bound())
    value = search.value[0]
    return Relaxed(best=search.incumbent, value=value, bound=value if proved else bound, proved=proved)


def _never(search: Search) -> None:
    """No limit but that of work."""


def without(problem: Problem, keys: tuple[str, ...]) -> Problem:
    """The problem without some of its constraints."""
    return replace(problem, constraints={k: v for k, v in problem.constraints.items() if k not in keys})


def setting(strategy: Strategy, key: str) -> object:
    """What a strategy has for a key of the strategy file; None for the tensor placements."""
    section, _, name = key.partition(".")
    if section == "tensor":
        return None
    return _plain(getattr(getattr(strategy, section), f"{name}_" if name == "global" else name))


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
