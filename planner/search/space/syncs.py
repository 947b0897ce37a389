"""How gradients are synchronised: compression per network level, and of gathered parameters, is searched; the bucket size
follows from the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from autoparallel.costmodel.collectives import collective_s
from autoparallel.costmodel.compression import BITS
from autoparallel.costmodel.compression import WEIGHTS as PARAMETERS
from autoparallel.planner.expand import state
from autoparallel.planner.expand.axes import mesh_axes
from autoparallel.planner.expand.schedules import SPLIT_BACKWARD
from autoparallel.planner.problem import Problem
from autoparallel.planner.strategy.types import GradSync, Strategy

MIB = 2**20
# Bucket sizes tried, MiB: torch's own (25, DistributedDataParallel) among them; larger ones for many ranks, where the hops of a
# collective cost more than the bytes of a small bucket. Kind: chosen; steps of about two.
BUCKETS_MIB = (5.0, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0, 800.0)
# Times what the best bucket takes: torch's own, or a smaller one, is then taken. Kind: choice
NO_WORSE = 1.002
LIKELY_EFFICIENCY = 0.5  # of arithmetic, to tell what a backward may hide. Kind: choice
# Methods tried where lossy ones are allowed and none is named: those that cost a small Llama less than 0.1 % of its loss
# (benchmarks/compressed_training.py) and are no longer on the wire than another (fp16, fp8). Kind: measured.
METHODS = ("bf16", "int8")
# Likewise of parameters that ZeRO-3 gathers. Kind: published. Source: ZeRO++ (Wang et al., 2023), whose qwZ is int8 by blocks.
WEIGHTS = ("int8",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """What is saved of data parallelism's messages: gradients that are compressed, by network level, and ZeRO-3's parameters; and
    the level of the network inside which backward passes gather these from a second copy (None: there is none)."""

    gradients: tuple[str, ...] = ()
    weights: str = "none"
    copied: int | None = None


def open_compressions(problem: Problem) -> tuple[Compressed, ...]:
    """What the constraints leave, none first, those that are of ZeRO-3's parameters last."""
    every = product(open_copies(problem), open_weights(problem), _open_gradients(problem))
    return tuple(Compressed(gradients=g, weights=weights, copied=copied) for copied, weights, g in every)


def open_copies(problem: Problem) -> tuple[int | None, ...]:
    """Levels of the network inside which ZeRO-3's parameters may have a second copy: all but the outermost. Of a number of ranks that
    the user names the level says nothing."""
    if problem.fixed.shard.secondary is not None:
        return (0,) if problem.fixed.shard.secondary else (None,)
    if problem.execution.parameter_gathers or problem.cluster.network is not None:
        return (None,)
    return (None, *range(len(problem.cluster.levels) - 1))


def open_weights(problem: Problem) -> tuple[str, ...]:
    """What ZeRO-3's parameters may travel as: as they are, or shorter where lossy methods are allowed."""
    fixed = problem.fixed.grad_sync.weights
    if fixed is not None:
        return (fixed,)
    if not problem.allow_lossy or problem.execution.parameter_gathers:
        return ("none",)
    bits = 8 * state.item_bytes(problem.execution)
    tried = (m for m in problem.lossy or WEIGHTS if m in BITS and m in PARAMETERS and BITS[m] < bits)
    return ("none", *dict.fromkeys(tried))


def _open_gradients(problem: Problem) -> tuple[tuple[str, ...], ...]:
    """What the constraints leave, none first; where lossy methods are allowed, each on each outer part of the
    network levels."""
    fixed = problem.fixed.compression
    if fixed is not None:
        return (fixed,)
    if not problem.allow_lossy:
        return ((),)
    levels = len(problem.cluster.levels)
    methods = problem.lossy or METHODS
    outer = (("none",) * i + (method,) * (levels - i) for method in methods for i in range(levels))
    return tuple(dict.fromkeys(((), *outer)))


def other_syncs(problem: Problem, strategy: Strategy) -> Iterator[Strategy]:
    """A strategy whose gradients go by another algorithm, or in buckets of another size; none where nothing is reduced."""
    sync = strategy.grad_sync
    if strategy.mesh.data_parallel * strategy.mesh.cp == 1:
        return
    for algorithm in open_algorithms(problem):
        if algorithm != sync.algorithm:
            yield replace(strategy, grad_sync=replace(sync, algorithm=algorithm))
    has_buckets = state.zero_level(strategy) < 3 and problem.fixed.grad_sync.bucket_mib is None
    for mib in BUCKETS_MIB if has_buckets else ():
        if mib != sync.bucket_mib:
            yield replace(strategy, grad_sync=replace(sync, bucket_mib=mib))


def open_algorithms(problem: Problem) -> tuple[str, ...]:
    """Algorithms that are tried: the library's own choice, which is never slower than a ring or a tree, and those of several
    collectives that no library chooses."""
    fixed = problem.fixed.grad_sync.algorithm
    if fixed is not None:
        return (fixed,)
    return ("auto", *(("hierarchical",) if len(problem.cluster.levels) > 1 else ()), "parameter-server")


def widest_bucket_mib(problem: Problem) -> float:
    """A size that no strategy's buckets exceed, all gradients at once: a larger one takes its network less per byte."""
    fixed = problem.fixed.grad_sync.bucket_mib
    if isinstance(fixed, int | float):
        return float(fixed)
    item = state.dtype_bytes(problem.execution.grad_dtype)
    return max(problem.graph.parameter_count * item / MIB, *BUCKETS_MIB)


def with_bucket(problem: Problem, strategy: Strategy) -> Strategy:
    """The strategy with the bucket with which a stage's last backward and the reduction beside it are likely to end first: a small
    one is on its way early, and is the last to be waited for; of large ones there are few. ZeRO-3 has no buckets."""
    mesh, sync = strategy.mesh, strategy.grad_sync
    if state.zero_level(strategy) == 3 or mesh.data_parallel * mesh.cp == 1:
        return strategy
    item = state.dtype_bytes(strategy.execution.grad_dtype)
    stages, axes = mesh.pp * strategy.pipeline.virtual_stages, mesh_axes(strategy)
    held = max(problem.graph.parameter_count // (stages * mesh.tp), 1)
    backward_s = _last_backward_s(problem, strategy)

    def ends_s(mib: float) -> float:
        count = min(round(mib * MIB) // item, held)
        last_s = sum(collective_s(c, axes, problem.cluster) for c in state.reduction_of(count, strategy))
        return max(backward_s * count / held + last_s * held / count, backward_s + last_s)

    ends = {mib: ends_s(mib) for mib in (GradSync().bucket_mib, *BUCKETS_MIB)}
    enough_s = min(ends.values()) * NO_WORSE
    best = next(mib for mib, end_s in ends.items() if end_s <= enough_s)
    return replace(strategy, grad_sync=replace(sync, bucket_mib=best))


def _last_backward_s(problem: Problem, strategy: Strategy) -> float:
    """About how long the last backward of a stage takes, or its weight gradients where these are apart: two thirds or one of its
    arithmetic, at half of the peak."""
    peak = max(problem.cluster.device.peak_flops.values())
    flops = (
        problem.step_flops / strategy.micro_batches / strategy.mesh.devices / strategy.pipeline.virtual_stages
    )
    share = 1.0 if strategy.pipeline.schedule in SPLIT_BACKWARD else 2.0
    return flops * (share / 3.0) / (peak * LIKELY_EFFICIENCY)
