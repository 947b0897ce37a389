"""From which bandwidth on compressing gradients pays, or parameters that ZeRO-3 gathers: for each method, where the plan's
step takes as long with it as without.

Method: the plan is priced with the method on the outermost network level that its gradients cross and those outside of it
(of parameters on all levels), and without, on clusters whose level is slower or faster, and the crossing is looked for by halving. Everything else of the
plan stays, so that what hides behind computation counts as hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import sqrt

from autoparallel.costmodel.compression import WEIGHTS
from autoparallel.costmodel.topology import crossings
from autoparallel.planner.expand.expander import Expander, mesh_axes
from autoparallel.planner.outcome import BreakEven
from autoparallel.planner.problem import Problem
from autoparallel.planner.score import score
from autoparallel.planner.search.space.syncs import open_algorithms
from autoparallel.planner.strategy.types import Strategy

METHODS = ("bf16", "int8", "int4", "topk:0.01")  # explained where the user names none
OF_WEIGHTS = ("int8",)  # likewise
SHARDING = ("dp_shard", "cp")
AXES = ("dp_replicate", *SHARDING)
SPAN = 1000.0  # times slower and faster than the level is. Kind: choice
STEPS = 9  # halvings: 1000 x 1000 to within a few percent
MOST_ACTIONS = 3_000  # of a schedule that is simulated this often


def break_evens(problem: Problem, strategy: Strategy) -> tuple[BreakEven, ...]:
    """One for each method that is allowed, or usual; none where gradients stay inside a device, links are irregular, or
    the schedule is too long to be simulated so often."""
    mesh, cluster = strategy.mesh, problem.cluster
    if cluster.network is not None or 2 * strategy.micro_batches * mesh.pp > MOST_ACTIONS:
        return ()

    def crossed(axes: tuple[str, ...]) -> int | None:
        several = tuple(axis for axis in axes if getattr(mesh, axis) > 1)
        return crossings(several, mesh_axes(strategy), cluster)[-1].index if several else None

    def found(key: str, method: str, index: int, plain: list[Strategy], coded: Strategy) -> BreakEven:
        level = cluster.levels[index]
        share = _crossing(partial(_pays, problem, index, plain, coded))
        return BreakEven(
            method=method, level=level.name, bytes_per_s=level.bytes_per_s * share,
            now_bytes_per_s=level.bytes_per_s, key=key,
        )  # fmt: skip

    all_of_them = []
    if (index := crossed(AXES)) is not None:
        plain = uncompressed(problem, strategy)
        for method in problem.lossy or METHODS:
            methods = ("none",) * index + (method,) * (len(cluster.levels) - index)
            all_of_them.append(
                found("grad_sync.compression", method, index, plain, compressed(strategy, methods))
            )
    if strategy.shard.zero == 3 and (index := crossed(SHARDING)) is not None:
        for method in [m for m in problem.lossy or OF_WEIGHTS if m in WEIGHTS and m != "none"]:
            coded, bare = (gathered(strategy, m) for m in (method, "none"))
            all_of_them.append(found("grad_sync.weights", method, index, [bare], coded))
    return tuple(all_of_them)


def _pays(problem: Problem, level: int, plain: list[Strategy], coded: Strategy, share: float) -> bool:
    """Whether a step is shorter coded where the level has `share` times its bandwidth."""
    without_s = min(seconds_at(problem, other, level, share) for other in plain)
    return seconds_at(problem, coded, level, share) < without_s * (1 - 1e-6)


def gathered(strategy: Strategy, method: str) -> Strategy:
    """The strategy with its parameters gathered so."""
    return replace(strategy, grad_sync=replace(strategy.grad_sync, weights=method))


def compressed(strategy: Strategy, methods: tuple[str, ...]) -> Strategy:
    """The strategy with other methods, by network level."""
    return replace(strategy, grad_sync=replace(strategy.grad_sync, compression=methods))


def seconds_at(problem: Problem, strategy: Strategy, level: int, share: float) -> float:
    """Seconds of a step where the level with this index has `share` times its bandwidth."""
    cluster, levels = problem.cluster, list(problem.cluster.levels)
    levels[level] = replace(levels[level], bytes_per_s=levels[level].bytes_per_s * share)
    other = replace(cluster, levels=tuple(levels))
    return score(problem.graph, other, strategy, Expander(graph=problem.graph, cluster=other)).step_time_s


def uncompressed(problem: Problem, strategy: Strategy) -> list[Strategy]:
    """The plan without compression, by every algorithm that the search tries: different methods on the levels run level
    by level, which may be a gain of its own."""
    plain = compressed(strategy, ())
    algorithms = dict.fromkeys((plain.grad_sync.algorithm, *open_algorithms(problem)))
    return [replace(plain, grad_sync=replace(plain.grad_sync, algorithm=a)) for a in algorithms]


def _crossing(pays: Callable[[float], bool]) -> float:
    """The largest share of the bandwidth at which it pays, as if it paid at all smaller ones."""
    low, high = 1 / SPAN, SPAN
    if not pays(low):
        return 0.0
    if pays(high):
        return float("inf")
    for _ in range(STEPS):
        middle = sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return sqrt(low * high)
