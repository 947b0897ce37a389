"""Further plans of the Pareto set: time against bytes held and bytes kept, one tensor plan for a price of memory.

The first plan has every matrix of the repeated blocks sharded and takes the least time of such plans. Where memory costs
p nanoseconds per KiB, the best plan minimises

    T + p (H + K)      T: time, H: parameters, gradients and optimizer state, K: kept for the backward pass

`FASTEST` is p = 0, without the wish for sharded matrices; `LEANEST` p = infinity, time breaking ties. A plan is what its
`[[tensor]]` entries say: it is solved once more under these, so that a strategy file gives it back.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.errors import UserError
from autoparallel.planner.sharding.plan import PlanCost, TensorPlan
from autoparallel.planner.strategy.types import TensorRule

FASTEST, LEANEST = 0.0, inf  # prices of memory
# Share by which a tensor plan must be better than another in time or bytes. Kind: formula: below what decides between plans.
WORTH = 0.001
TRIES = 3  # until entries give the plan back that they were written from


def pareto_plan(
    graph: ModelGraph,
    solve: Callable[[tuple[TensorRule, ...], float | None], TensorPlan],
    given: tuple[TensorRule, ...],
    memory_price: float,
) -> TensorPlan | None:
    """The plan of `solve(entries, memory price)` at a price of memory, under the entries `given`; None where no entries
    say it, or it is better than the first plan in nothing."""
    first = whole_cost(graph, solve(given, None))
    try:
        plan = solve(given, memory_price)
        for _ in range(TRIES):
            if not worth_keeping(whole_cost(graph, plan), first):
                return None
            again = solve(plan.rules, None)
            if again.rules == plan.rules:
                return again if worth_keeping(whole_cost(graph, again), first) else None
            plan = again
    except UserError:
        return None
    return None


def whole_cost(graph: ModelGraph, plan: TensorPlan) -> PlanCost:
    """The cost of all links of the chain."""
    links = [plan.costs[link.block] for link in graph.chain]
    return PlanCost(
        time_ns=sum(c.time_ns for c in links), held_kib=sum(c.held_kib for c in links),
        kept_kib=sum(c.kept_kib for c in links),
    )  # fmt: skip


def worth_keeping(cost: PlanCost, other: PlanCost) -> bool:
    """Whether a tensor plan is better than another in time, bytes held or bytes kept."""
    return (
        cost.time_ns < other.time_ns * (1 - WORTH)
        or cost.held_kib < other.held_kib * (1 - WORTH)
        or cost.kept_kib < other.kept_kib * (1 - WORTH)
    )
