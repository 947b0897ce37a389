"""From which bandwidth on compressing gradients pays: for each method, where the plan's step takes as long with it as without.

Method: the plan is priced with the method on the outermost network level that its gradients cross and those outside of it,
and without, on clusters whose level is slower or faster, and the crossing is looked for by halving. Everything else of the
plan stays, so that what hides behind computation counts as hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import sqrt

from autoparallel.costmodel.topology import crossings
from autoparallel.planner.expand.expander import Expander, mesh_axes
from autoparallel.planner.outcome import BreakEven
from autoparallel.planner.problem import Problem
from autoparallel.planner.score import score
from autoparallel.planner.search.space.syncs import open_algorithms
from autoparallel.planner.strategy.types import Strategy

METHODS = ("bf16", "int8", "int4", "topk:0.01")  # explained where the user names none
AXES = ("dp_replicate", "dp_shard", "cp")
SPAN = 1000.0  # times slower and faster than the level is. Kind: choice
STEPS = 9  # halvings: 1000 x 1000 to within a few percent
MOST_ACTIONS = 3_000  # of a schedule that is simulated this often


def break_evens(problem: Problem, strategy: Strategy) -> tuple[BreakEven, ...]:
    """One for each method that is allowed, or usual; none where gradients stay inside a device, links are irregular, or
    the schedule is too long to be simulated so often."""
    mesh, cluster = strategy.mesh, problem.cluster
    summed = tuple(axis for axis in AXES if getattr(mesh, axis) > 1)
    if not summed or cluster.network is not None or 2 * strategy.micro_batches * mesh.pp > MOST_ACTIONS:
        return ()
    index = crossings(summed, mesh_axes(strategy), cluster)[-1].index
    level = cluster.levels[index]

    def pays(methods: tuple[str, ...], share: float) -> bool:
        plain = [seconds_at(problem, other, index, share) for other in uncompressed(problem, strategy)]
        with_it = seconds_at(problem, compressed(strategy, methods), index, share)
        return with_it < min(plain) * (1 - 1e-6)

    found = []
    for method in problem.lossy or METHODS:
        methods = ("none",) * index + (method,) * (len(cluster.levels) - index)
        share = _crossing(partial(pays, methods))
        found.append(
            BreakEven(
                method=method, level=level.name, bytes_per_s=level.bytes_per_s * share,
                now_bytes_per_s=level.bytes_per_s,
            )
        )  # fmt: skip
    return tuple(found)


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
