"""What less memory or fewer devices would cost: the best strategies for parts of both, none beaten in all of time,
memory and price."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from autoparallel.costmodel.prediction import Prediction
from autoparallel.errors import UserError
from autoparallel.planner.outcome import GIB, TradeOff
from autoparallel.planner.problem import Problem
from autoparallel.planner.score import score
from autoparallel.planner.search.bounds.outer import Outer, build_outer, outer_of
from autoparallel.planner.search.driver import Search, after
from autoparallel.planner.search.evaluate import Evaluation
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles.hardware import Cluster

# Shares of the plan's own peak, and of the cluster's nodes (or of a single node's devices), that are tried.
MEMORY_SHARES, DEVICE_SHARES = (0.8, 0.6, 0.4, 0.25), (2, 4, 8)
WORK = 150.0  # `Search.work` spent on each. Kind: formula: a fraction of a second


def tradeoffs(outer: Outer, best: Evaluation, *, work: float = WORK) -> tuple[TradeOff, ...]:
    """The plan, and what was found for less memory and for fewer devices; those that another beats in everything
    are left out. Fastest first."""
    problem = outer.problem
    found = [_priced(problem, score_of(outer, best.strategy), best.strategy)]
    with suppress(KeyboardInterrupt):
        for one, prediction in (*_less_memory(outer, best, work), *_fewer_devices(problem, work)):
            found.append(_priced(problem, prediction, one))
    unbeaten = [a for a in found if not any(_beats(b, a) for b in found)]
    kept = {(a.step_time_s, a.peak_memory_gib, a.devices): a for a in reversed(unbeaten)}
    return tuple(sorted(kept.values(), key=lambda a: (a.step_time_s, a.peak_memory_gib)))


def score_of(outer: Outer, strategy: Strategy) -> Prediction:
    """The prediction of a strategy of the search's own problem."""
    return score(outer.problem.graph, outer.problem.cluster, strategy, outer.book.expander)


def _less_memory(outer: Outer, best: Evaluation, work: float) -> Iterator[tuple[Strategy, Prediction]]:
    for share in MEMORY_SHARES:
        capacity = best.peak_bytes * share
        smaller = build_outer(outer.problem, outer.space, outer.chain, outer.book, capacity)
        found = _search(smaller, work)
        if found is None:
            return  # nor does less
        yield found.strategy, score_of(outer, found.strategy)


def _fewer_devices(problem: Problem, work: float) -> Iterator[tuple[Strategy, Prediction]]:
    for parts in DEVICE_SHARES:
        cluster = _part_of(problem.cluster, parts)
        if cluster is None:
            continue
        with suppress(UserError):
            part = replace(problem, cluster=cluster)
            outer = outer_of(part)
            found = _search(outer, work) if outer is not None else None
            if outer is not None and found is not None:
                yield found.strategy, score_of(outer, found.strategy)


def _part_of(cluster: Cluster, parts: int) -> Cluster | None:
    """A cluster of a part of the nodes, or of the devices of the only node; None where that is no whole number."""
    if len(cluster.groups) > 1 or cluster.network is not None:
        return None
    (group,) = cluster.groups
    if group.nodes % parts == 0:
        return replace(cluster, groups=(replace(group, nodes=group.nodes // parts),))
    if group.nodes == 1 and group.devices_per_node % parts == 0:
        return replace(cluster, groups=(replace(group, devices_per_node=group.devices_per_node // parts),))
    return None


def _search(outer: Outer, work: float) -> Evaluation | None:
    frontier = Search(outer=outer, check=after(work))
    frontier.ended()
    return frontier.incumbent


def _priced(problem: Problem, prediction: Prediction, strategy: Strategy) -> TradeOff:
    return TradeOff(
        strategy=strategy, step_time_s=prediction.step_time_s, peak_memory_gib=prediction.peak_bytes / GIB,
        devices=prediction.devices, device_cost=prediction.step_time_s * problem.rate_per_s(prediction.devices),
    )  # fmt: skip


def _beats(one: TradeOff, other: TradeOff) -> bool:
    """No worse in anything, and better in something."""
    mine = (one.step_time_s, one.peak_memory_gib, one.device_cost)
    theirs = (other.step_time_s, other.peak_memory_gib, other.device_cost)
    return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))
