"""`[outer]`, chosen with the strategy: whether replicas train by themselves between exchanges, and on how many islands.

An island's steps are a problem of their own: a part of the cluster, and its share of the batch. So for each number of islands
`plan`'s search finds the best strategy inside, with its bound; what the exchanges take of a mean step is added. No plan with so
many islands takes less than the inner bound and the exchange of parameters that all devices of an island share evenly; the
answer is the best over all numbers, and summed gradients where `outer.algorithm` is left open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from autoparallel.errors import UserError
from autoparallel.planner.check import check_plan
from autoparallel.planner.expand.local_updates import seconds_of
from autoparallel.planner.outcome import GIB, Alternative, InfeasiblePlan, PlanResult, SearchTimeout
from autoparallel.planner.problem import Objective, Problem
from autoparallel.planner.score import score
from autoparallel.planner.search.evaluate import TOLERANCE
from autoparallel.planner.strategy.islands import AXIS, island_cluster
from autoparallel.planner.strategy.types import AXES, Batch, Mesh, Outer, Strategy

_PREFIX = "outer."
_INSIDE = (
    "batch.global",
    "mesh.dp_replicate",
    "mesh.order",
)  # said of the whole; inside they are the island's
Search = Callable[[Problem], PlanResult]
SUMMED, LOCAL = "gradients summed in every step", "local updates (DiLoCo)"


def asks_outer(problem: Problem) -> bool:
    """Whether local updates are asked for, or allowed."""
    asked = outer_keys(problem.constraints)
    return bool(asked) and asked.get("algorithm") != "none"


def outer_keys(constraints: Mapping[str, object]) -> dict[str, Any]:
    """What the constraints say of local updates."""
    return {k.removeprefix(_PREFIX): v for k, v in constraints.items() if k.startswith(_PREFIX)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    result: PlanResult
    bound_s: float
    kind: str


def plan_outer(problem: Problem, search: Search) -> PlanResult:
    """The best plan with local updates, or without where that is left open. Raises what `search` raises, where nothing is
    found, and UserError for another objective than time."""
    if problem.objective is not Objective.TIME:
        raise UserError(
            "[outer]: local updates are searched for time alone; leave [outer] out, or write objective = time"
        )
    asked = outer_keys(problem.constraints)
    outer = Outer(
        **{**{f.name: asked[f.name] for f in fields(Outer) if f.name in asked}, "algorithm": "diloco"}
    )
    found, errors = list[_Found](), list[Exception]()
    if "algorithm" not in asked:
        try:
            result = search(without_outer(problem))
            found.append(_Found(result=result, bound_s=result.lower_bound_s, kind=SUMMED))
        except (InfeasiblePlan, SearchTimeout, UserError) as error:
            errors.append(error)
    for islands in _numbers(problem):
        try:
            found.append(_on_islands(problem, islands, outer, search))
        except (InfeasiblePlan, SearchTimeout, UserError) as error:
            errors.append(error)
    if not found:
        if errors:
            raise errors[0]
        raise UserError(
            f"[outer]: {problem.cluster.name} has no equal islands among which batch.global = {problem.global_batch} "
            "divides; change the batch, or leave [outer] out"
        )
    return _best(found)


def without_outer(problem: Problem) -> Problem:
    """The problem of gradients that are summed in every step."""
    kept = {k: v for k, v in problem.constraints.items() if not k.startswith(_PREFIX)}
    return replace(problem, constraints=kept)


def _numbers(problem: Problem) -> Iterator[int]:
    """Of islands that are alike, as many as the user fixed."""
    fixed, order = problem.fixed.mesh.dp_replicate, problem.fixed.order
    if order is not None and order[0] != AXIS:
        return
    for islands in range(2, problem.cluster.devices + 1):
        if fixed not in (None, islands) or problem.global_batch % islands:
            continue
        if island_cluster(problem.cluster, islands) is not None:
            yield islands


def _on_islands(problem: Problem, islands: int, outer: Outer, search: Search) -> _Found:
    own = island_cluster(problem.cluster, islands)
    assert own is not None

    def whole(strategy: Strategy) -> Strategy:
        order = (AXIS, *(axis for axis in strategy.mesh.order if axis != AXIS))
        return replace(
            strategy, mesh=replace(strategy.mesh, dp_replicate=islands, order=order), outer=outer,
            batch=replace(strategy.batch, global_=problem.global_batch),
        )  # fmt: skip

    refuses = problem.refuses
    order = problem.constraints.get("mesh.order")
    inside = {
        k: v
        for k, v in without_outer(problem).constraints.items()
        if k not in _INSIDE and not k.startswith("recovery.")
    }
    inside |= {"mesh.dp_replicate": 1} | ({"mesh.order": order} if order else {})
    inner = replace(
        problem, cluster=own, global_batch=problem.global_batch // islands, constraints=inside, all_devices=True,
        refuses=None if refuses is None else lambda strategy: refuses(whole(strategy)),
    )  # fmt: skip
    result = search(inner)
    strategy = whole(result.strategy)
    prediction = score(problem.graph, problem.cluster, strategy)
    check_plan(problem, strategy, prediction)
    if not prediction.feasible:
        raise InfeasiblePlan(f"memory, with what {islands} islands begin again with ([outer])")
    bound_s = result.lower_bound_s + _least_s(problem, islands, outer)
    return _Found(
        result=replace(result, strategy=strategy, prediction=prediction), bound_s=bound_s, kind=LOCAL
    )


def _least_s(problem: Problem, islands: int, outer: Outer) -> float:
    """What no exchange takes less than: all devices of an island share its parameters evenly, and islands their links."""
    each = problem.cluster.devices // islands
    trainable = sum(
        p.numel
        for link in problem.graph.chain
        for p in problem.graph.blocks[link.block].parameters
        if p.trainable and not p.tied
    )
    mesh = Mesh(dp_replicate=islands, dp_shard=each, order=(AXIS, *(axis for axis in AXES if axis != AXIS)))
    evenly = Strategy(batch=Batch(global_=islands * each, micro=1), mesh=mesh, execution=problem.execution)
    exchange_s, _ = seconds_of(outer, trainable // each, evenly, problem.cluster)
    return exchange_s


def _best(found: list[_Found]) -> PlanResult:
    best = min(found, key=lambda one: one.result.prediction.step_time_s)
    step_s = best.result.prediction.step_time_s
    bound_s = min(step_s, *(one.bound_s for one in found))
    gap = 1.0 - bound_s / step_s
    others = {
        one.kind: one
        for one in sorted(found, key=lambda one: -one.result.prediction.step_time_s)
        if one is not best
    }
    rejected = tuple(_rejected(kind, one.result, best.result) for kind, one in others.items())
    inner = best.result.alternatives if best.kind == SUMMED else ()
    return replace(
        best.result, status="optimal" if gap <= TOLERANCE else "feasible", lower_bound_s=bound_s, gap=gap if gap > TOLERANCE else 0.0,
        candidates=sum(one.result.candidates for one in found), pruned=sum(one.result.pruned for one in found),
        alternatives=(*rejected, *inner), optimum=None, optimum_s=0.0, instead="", explored=(), tradeoffs=(), break_evens=(),
        constraints=(),
    )  # fmt: skip


def _rejected(kind: str, other: PlanResult, best: PlanResult) -> Alternative:
    seconds, chosen_s = other.prediction.step_time_s, best.prediction.step_time_s
    islands = other.strategy.mesh.dp_replicate
    return Alternative(
        kind=f"{kind} on {islands} islands" if kind == LOCAL else kind, strategy=other.strategy, step_time_s=seconds,
        peak_memory_gib=other.prediction.peak_bytes / GIB, feasible=True, value=(seconds, 0.0),
        reason=f"takes {100 * (seconds / chosen_s - 1):.1f} % longer",
    )  # fmt: skip
