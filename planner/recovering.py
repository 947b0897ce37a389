"""`[recovery]`, chosen with the strategy: the plan whose work survives best on a cluster that fails.

What counts is the step divided by the goodput of its way to recover. Waiting, copies and planning anew cost nearly the same
under every strategy, so the fastest one is the best for them. Two ways ask for strategies of their own: replicas to drop, and
nodes that wait. Each gets searches where it could win by more than predictions can tell: the step's lower bound with the best
goodput that it could have is compared with the best found. An outer branch and bound, whose inner search is `plan`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autoparallel.costmodel.recovery import POLICIES, Recovery
from autoparallel.errors import UserError
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.outcome import GIB, Alternative, InfeasiblePlan, PlanResult, SearchTimeout
from autoparallel.planner.problem import Objective, Problem
from autoparallel.planner.recovery import RecoveryPlan, plan_recovery
from autoparallel.planner.strategy.recovery import nodes_of, per_node, recovery_problems
from autoparallel.planner.strategy.types import RecoveryRule
from autoparallel.profiles.hardware import Cluster
from autoparallel.profiles.resize import resized

_PREFIX = "recovery."
# Numbers of replicas that get a search of their own. Kind: choice; each takes as long as a plan.
MOST_REPLICAS = 3
# A search is worth its time where it could win more than this. Kind: choice; below it predictions tell no plans apart.
LEAST_GAIN = 0.02
Search = Callable[[Problem], PlanResult]


class Expanders:
    """One for each graph and cluster that is planned for, so that searches share their prices."""

    def __init__(self, first: Expander | None = None) -> None:
        self._known = [first] if first is not None else []

    def of(self, problem: Problem) -> Expander:
        """The expander of a problem's graph and cluster."""
        for known in self._known:
            if known.graph is problem.graph and known.cluster == problem.cluster:
                return known
        self._known.append(Expander(problem.graph, problem.cluster))
        return self._known[-1]


def asked_of(constraints: Mapping[str, object]) -> dict[str, Any]:
    """What the constraints say of recovery, by the keys of `RecoveryRule`."""
    return {k.removeprefix(_PREFIX): v for k, v in constraints.items() if k.startswith(_PREFIX)}


def without_recovery(problem: Problem) -> Problem:
    """The problem of the inner search."""
    kept = {k: v for k, v in problem.constraints.items() if not k.startswith(_PREFIX)}
    return problem if len(kept) == len(problem.constraints) else replace(problem, constraints=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A plan with a way to recover. `value`: seconds (or price) of a step over the goodput."""

    result: PlanResult
    planned: RecoveryPlan
    way: Recovery
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """Which way to recover is wanted for a problem whose fastest plan is `result`, and what plans another one."""

    problem: Problem
    result: PlanResult
    asked: Mapping[str, Any]  # keys of `[recovery]` that the user gave
    search: Search
    known: Expanders


def with_recovery(problem: Problem, result: PlanResult, search: Search, known: Expanders) -> PlanResult:
    """The result with its way to recover, or one that recovers better. `search` plans another problem; what it raises is
    taken for nothing found. Raises UserError where no strategy recovers as the constraints say."""
    asked = asked_of(problem.constraints)
    if problem.cluster.failures is None:
        return _as_asked(problem, result, asked) if asked else result
    question = _Question(problem=problem, result=result, asked=asked, search=search, known=known)
    found = list(_own(question))
    for other in (_replicated, _spared):
        best = min((one.value for one in found), default=float("inf"))
        found += other(question, best)
    if not found:
        return _as_asked(problem, result, asked)
    best_one = min(found, key=lambda one: one.value)
    rule = replace(best_one.planned.rule(best_one.way), **asked)
    answer = _with_rule(problem, best_one.result, rule)
    if best_one.result is result:
        return answer
    fastest = _alternative(result, best_one, next((o for o in found if o.result is result), None))
    return replace(answer, alternatives=(fastest, *answer.alternatives))


def _as_asked(problem: Problem, result: PlanResult, asked: Mapping[str, Any]) -> PlanResult:
    return _with_rule(problem, result, RecoveryRule(**asked))


def _with_rule(problem: Problem, result: PlanResult, rule: RecoveryRule) -> PlanResult:
    strategy = replace(result.strategy, recovery=rule)
    if problems := list(recovery_problems(problem.cluster, strategy)):
        raise UserError("\n".join(problems))
    return replace(result, strategy=strategy)


def _own(question: _Question) -> Iterator[_Found]:
    """The ways that the fastest plan itself has."""
    problem, result, asked = question.problem, question.result, question.asked
    planned = _planned(problem, result, question.known)
    for policy in _policies(asked):
        way = planned.way(policy)
        idle = problem.cluster.nodes - planned.saved.nodes
        if way is None or (policy == "spares" and way.spares > idle) or not _agrees(way, asked):
            continue
        yield _found(problem, result, planned, way)


def _replicated(question: _Question, best: float) -> Iterator[_Found]:
    """The fastest plan with replicas to drop, where the fastest of all has none."""
    problem, result, asked = question.problem, question.result, question.asked
    mesh = result.strategy.mesh
    if "drop-replica" not in _policies(asked) or mesh.dp_replicate > 1:
        return
    if not _alike(problem.cluster):
        return
    if "mesh.dp_replicate" in problem.constraints:
        return
    expander, gain = question.known.of(problem), _least_gain(asked)
    least = best / (1 + gain)
    for replicas in _divisors(nodes_of(problem.cluster, mesh.devices))[:MOST_REPLICAS]:
        bound = plan_recovery(expander, result.strategy, result.prediction, replicas=replicas)
        way = bound.way("drop-replica") if bound else None
        if way is None or _worth(problem, result.lower_bound_s, mesh.devices, way.goodput) >= least:
            continue
        held = replace(problem, constraints={**problem.constraints, "mesh.dp_replicate": replicas})
        for one in _searched(question, held, "drop-replica"):
            least = min(least, one.value / (1 + gain))
            yield one


def _least_gain(asked: Mapping[str, Any]) -> float:
    """What is asked for by name is looked for, however little it wins."""
    return 0.0 if "policy" in asked else LEAST_GAIN


def _divisors(nodes: int) -> list[int]:
    """Numbers of replicas that are whole nodes each, the fewest first: they shard the most."""
    return [n for n in range(2, nodes + 1) if nodes % n == 0]


def _spared(question: _Question, best: float) -> Iterator[_Found]:
    """A plan for the nodes that do not wait, where the fastest takes all: with as many spares as would pay if work were in
    proportion to the nodes."""
    problem, result, asked = question.problem, question.result, question.asked
    cluster = problem.cluster
    if "spares" not in _policies(asked) or problem.all_devices or not _alike(cluster):
        return
    if problem.constraints.get("mesh.placement"):
        return
    planned = _planned(problem, result, question.known)
    way, nodes = planned.way("spares"), planned.saved.nodes
    spares = asked.get("spares", way.spares if way else 0)
    if way is None or not isinstance(spares, int) or not spares or nodes + spares <= cluster.nodes:
        return
    fewer = cluster.nodes - spares
    if fewer < 1:
        return
    goodput = way.goodput * (nodes + way.spares) / nodes
    bound = _worth(problem, result.lower_bound_s, fewer * per_node(cluster), goodput) * nodes / fewer
    if "policy" not in asked and bound * (1 + LEAST_GAIN) >= best:
        return
    smaller = replace(problem, cluster=_smaller(cluster, fewer))
    yield from _searched(question, smaller, "spares", spares)


def _searched(
    question: _Question, other: Problem, policy: str, spares: int | None = None
) -> Iterator[_Found]:
    try:
        result = question.search(without_recovery(other))
    except (InfeasiblePlan, SearchTimeout, UserError):
        return
    planned = _planned(other, result, question.known)
    way = planned.way(policy)
    if way is None:
        return
    if spares is not None and way.spares != spares:
        way = planned.with_spares(spares)
    yield _found(question.problem, result, planned, way)


def _alike(cluster: Cluster) -> bool:
    """Whether nodes are: which of them fails, or waits, is then all the same."""
    return len(cluster.groups) == 1 and cluster.network is None


def _smaller(cluster: Cluster, nodes: int) -> Cluster:
    return resized(cluster, nodes * per_node(cluster), per_node(cluster))


def _policies(asked: Mapping[str, Any]) -> tuple[str, ...]:
    return (str(asked["policy"]),) if "policy" in asked else POLICIES


def _agrees(way: Recovery, asked: Mapping[str, Any]) -> bool:
    copies = int(way.policy == "peers")
    return bool(asked.get("spares", way.spares) == way.spares and asked.get("peers", copies) == copies)


def _planned(problem: Problem, result: PlanResult, known: Expanders) -> RecoveryPlan:
    every_s = asked_of(problem.constraints).get("checkpoint_every_s", 0.0)
    assert isinstance(every_s, int | float)
    planned = plan_recovery(known.of(problem), result.strategy, result.prediction, every_s=float(every_s))
    assert planned is not None, "only asked where the cluster states failures"
    return planned


def _found(problem: Problem, result: PlanResult, planned: RecoveryPlan, way: Recovery) -> _Found:
    # A way's goodput counts nodes that wait as devices that could work; here what the step's own devices do is asked.
    goodput = way.goodput * (planned.saved.nodes + way.spares) / planned.saved.nodes
    devices = result.strategy.mesh.devices + way.spares * per_node(problem.cluster)
    value = _worth(problem, result.prediction.step_time_s, devices, goodput)
    return _Found(result=result, planned=planned, way=way, value=value)


def _worth(problem: Problem, step_s: float, devices: int, goodput: float) -> float:
    if goodput <= 0:
        return float("inf")
    seconds = step_s / goodput
    return seconds * problem.rate_per_s(devices) if problem.objective is Objective.COST else seconds


def _alternative(result: PlanResult, chosen: _Found, own: _Found | None) -> Alternative:
    """The fastest plan, whose work does not survive as well."""
    step_s, what = result.prediction.step_time_s, chosen.way.policy
    reason = f"does not allow {what}, which was asked for"
    if own is not None:
        reason = (
            f"shorter steps, but with failures {own.way.policy} keeps {100 * own.way.goodput:.1f} % of them"
            + f": {100 * (own.value / chosen.value - 1):.1f} % worse than {what}"
        )
    return Alternative(
        kind="the fastest step", strategy=result.strategy, step_time_s=step_s,
        peak_memory_gib=result.prediction.peak_bytes / GIB, feasible=True, reason=reason, value=(step_s, 0.0),
    )  # fmt: skip
