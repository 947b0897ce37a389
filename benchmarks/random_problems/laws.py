"""What must hold of an answer, whatever the problem."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from time import process_time

from autoparallel.errors import UserError
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.problem import Problem
from autoparallel.planner.score import score
from autoparallel.planner.strategy.types import Strategy
from benchmarks.random_problems.answers import Answer, answer, isolated
from benchmarks.random_problems.choices import ALL, Choices, legal, same_but
from benchmarks.random_problems.draw import draw_strategy
from benchmarks.random_problems.keys import draw_keys
from benchmarks.random_problems.moves import neighbours
from benchmarks.random_problems.verdicts import (
    EQUAL,
    VIOLATIONS,
    Finding,
    Grade,
    better_by,
    differences,
    grade_of,
)

SAME = 1e-9  # relative difference of two sums over the same program
MOST_ACTIONS = (
    40_000  # forward passes of a schedule that is simulated here; longer ones are skipped and counted
)
SCORE_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is tried of one case."""

    keys: int = 6
    draws: int = 40
    moves: int = 120
    bounds: int = 40  # variants whose own bounds are held against simulations
    most_cpu_s: float = 45.0  # of all drawn strategies together; no more are tried then
    limit_s: float = 180.0  # of one plan
    left_out: tuple[str, ...] = ()  # keys that are not varied, beside those that the answer says it left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """What `score` says of a drawn strategy; `step_time_s` is None where it is refused, or skipped."""

    step_time_s: float | None
    devices: int = 0
    feasible: bool = False
    crashed: str = ""
    skipped: bool = False


class TooLong(Exception):
    """A strategy that takes long to simulate."""


def price(problem: Problem, strategy: Strategy, expander: Expander | None) -> Priced:
    """`score`, and what it raises."""
    chunks = strategy.mesh.pp * strategy.pipeline.virtual_stages
    if chunks * strategy.micro_batches > MOST_ACTIONS:
        return Priced(step_time_s=None, skipped=True)

    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SCORE_LIMIT_S)
    try:
        found = score(problem.graph, problem.cluster, strategy, expander)
    except UserError:
        return Priced(step_time_s=None)
    except TooLong:
        return Priced(step_time_s=None, skipped=True)
    except Exception as error:
        return Priced(step_time_s=None, crashed=f"{type(error).__name__}: {error}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    return Priced(step_time_s=found.step_time_s, devices=found.devices, feasible=found.feasible)


def claims(problem: Problem, given: Answer) -> Iterator[Finding]:
    """The plan is legal, has what the user fixed, fits, and costs what `score` says; bound and gap agree."""
    strategy = given.strategy
    if strategy is None:
        return
    if not legal(problem, strategy):
        yield Finding(
            law="claims", grade=Grade.BROKEN, told="the plan is not legal, or not what the user fixed"
        )
    found = price(problem, strategy, None)
    if found.skipped:
        return
    if found.step_time_s is None:
        yield Finding(law="price", grade=Grade.BROKEN, told=f"score refuses the plan {found.crashed}")
    elif abs(found.step_time_s - given.step_time_s) > SAME * given.step_time_s:
        told = f"the plan is told to take {given.step_time_s:.9g} s, score says {found.step_time_s:.9g} s"
        yield Finding(law="price", grade=Grade.BROKEN, told=told, step_time_s=found.step_time_s)
    elif not found.feasible:
        yield Finding(law="claims", grade=Grade.BROKEN, told="the plan does not fit")
    if given.lower_bound_s > given.step_time_s * (1 + EQUAL):
        yield Finding(
            law="claims", grade=Grade.BROKEN, told=f"the bound {given.lower_bound_s:.6g} s is above the plan"
        )


def with_keys(
    problem: Problem, given: Answer, rng: Random, effort: Effort, tried: Counter[str]
) -> Iterator[Finding]:
    """No plan with one further key fixed is better; with one of its own keys fixed, the plan is still known to be there."""
    left_out = {*effort.left_out, *given.left_out}
    for key, value, own in draw_keys(problem, given.strategy, rng, effort.keys):
        if key in left_out:
            continue
        fixed = replace(problem, constraints={**problem.constraints, key: value})
        other, cpu_s, cut = isolated(lambda p=fixed: answer(p), effort.limit_s)
        shown = f"{key}={list(value) if isinstance(value, tuple) else value}"
        tried["keys"] += 1
        tried["most cpu of a constrained plan, ms"] = max(
            tried["most cpu of a constrained plan, ms"], int(cpu_s * 1000)
        )
        if other is None or other.status == "crashed":
            told = f"--set {shown}: {other.message if other else 'no answer'}"
            yield Finding(law="key", grade=Grade.CUT if cut else Grade.CRASHED, told=told)
            continue
        if own:
            yield from _with_own(given, other, shown)
        if other.found and (grade := grade_of(given, other.step_time_s, other.devices)) is not Grade.KEPT:
            told = f"--set {shown}: {other.step_time_s:.6g} s ({differences_of(other, given)})"
            yield Finding(
                law="key", grade=grade, told=told, step_time_s=other.step_time_s,
                better=better_by(given, other.step_time_s),
            )  # fmt: skip


def _with_own(given: Answer, other: Answer, shown: str) -> Iterator[Finding]:
    if not other.found:
        grade = Grade.BROKEN if other.status in ("infeasible", "refused") else Grade.COUNTED
        told = f"--set {shown}, which the plan has: {other.status}: {other.message.splitlines()[0]}"
        yield Finding(law="own key", grade=grade, told=told)
    elif other.devices == given.devices and other.lower_bound_s > given.step_time_s * (1 + EQUAL):
        grade = Grade.BROKEN if other.status == "optimal" else Grade.OUTSIDE
        told = f"--set {shown}, which the plan has: told that nothing is below {other.lower_bound_s:.6g} s"
        yield Finding(law="own key", grade=grade, told=told)


def differences_of(other: Answer, given: Answer) -> str:
    """What the other plan has and the given one has not."""
    return differences(other.strategy, given.strategy) if other.strategy else ""


@dataclass(slots=True)
class _Best:
    """The best strategy so far: the plan's own, until another is better."""

    step_time_s: float
    strategy: Strategy | None


def against_strategies(
    problem: Problem, given: Answer, rng: Random, effort: Effort, tried: Counter[str], choices: Choices = ALL
) -> Iterator[Finding]:
    """No complete strategy, drawn at random or by changing a key or two, is better than the plan or below the bound.

    What is better becomes the strategy whose keys are changed next; the best of each grade is told.
    """
    expander = Expander(graph=problem.graph, cluster=problem.cluster)
    started, best = process_time(), _Best(given.step_time_s or float("inf"), given.strategy)
    worst: dict[Grade, Finding] = {}
    left_out = {*effort.left_out, *given.left_out}
    for told, strategy in _drawn(problem, rng, effort, choices, best):
        if process_time() - started > effort.most_cpu_s:
            tried["ended early"] += 1
            break
        if not same_but(strategy, given.strategy, left_out):
            tried["left out"] += 1
            continue
        found = price(problem, strategy, expander)
        tried["skipped" if found.skipped else "strategies"] += 1
        if found.crashed:
            shown = f"{told}: {found.crashed} ({differences(strategy, given.strategy)})"
            worst.setdefault(Grade.CRASHED, Finding(law="strategy", grade=Grade.CRASHED, told=shown))
        if found.step_time_s is None or not found.feasible:
            continue
        tried["fit"] += 1
        grade = grade_of(given, found.step_time_s, found.devices)
        if grade is Grade.KEPT or (grade in worst and worst[grade].step_time_s <= found.step_time_s):
            continue
        worst[grade] = Finding(
            law="strategy", grade=grade, told=f"{told}: {differences(strategy, given.strategy)}",
            step_time_s=found.step_time_s, better=better_by(given, found.step_time_s),
        )  # fmt: skip
        if found.step_time_s < best.step_time_s and grade is not Grade.FEWER:
            best.step_time_s, best.strategy = found.step_time_s, strategy
    yield from worst.values()


def _drawn(
    problem: Problem, rng: Random, effort: Effort, choices: Choices, best: _Best
) -> Iterator[tuple[str, Strategy]]:
    """At random; then beside the plan, or beside the best strategy so far."""
    for _ in range(effort.draws if best.strategy else effort.draws + effort.moves):
        drawn = draw_strategy(problem, rng, choices)
        if drawn is None:
            break
        yield "at random", drawn
    for _ in range(effort.moves):
        if best.strategy is None:
            return
        beside = next(neighbours(problem, best.strategy, rng, choices), None)
        if beside is None:
            return
        yield f"changed {beside[0]}", beside[1]


def broken(findings: list[Finding]) -> list[Finding]:
    """Those that break a law."""
    return [one for one in findings if one.grade in VIOLATIONS]
