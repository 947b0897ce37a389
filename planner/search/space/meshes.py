"""Every mesh of a problem: sizes of the axes, and where each axis sits on the topology, as numpy columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.planner.problem import Objective, Problem
from autoparallel.planner.strategy.legal import expert_counts, head_counts, sequence_lengths, tensor_sizes
from autoparallel.planner.strategy.types import AXES
from autoparallel.profiles.hardware import Cluster

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

T = TypeVar("T")

MOST_EXPERT_SIZES = 6  # sizes of ep tried unasked; of more, every second. Kind: formula
MANY = 8  # times as many numbers as rows: then rows are sorted to find equal ones. Kind: measured
MESH_KEYS = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
LEAST_TOKENS = (
    512  # of a sequence on a rank of cp: with fewer, kernels wait for their launches. Kind: formula
)
# A step whose arithmetic takes less on half of the devices may be mostly launches and latencies, which more devices
# do not shorten: some tens of layers of some tens of kernels each. Kind: formula.
SHORT_STEP_S = 0.02
INNER_SIZES = (1, 2, 3, 4, 6, 8)  # of pp x tp x cp that `_where_more_do_not_help` tries


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """Mesh sizes, one row a mesh; `placed[i, k]`: order k is the first of those that place mesh i alike;
    `near[k, i, a, u]`: neighbours along AXES[a] inside a unit of level u, when mesh i has order k."""

    sizes: Ints  # columns MESH_KEYS
    orders: tuple[tuple[str, ...], ...]
    placed: Bools
    near: Ints
    strides: int = (
        0  # leading columns of `near` that are strides: on irregular networks orders differ by these
    )


def joined(first: Ints, *others: Ints) -> Ints:
    """One number per row that is the same where all columns are, ordered as they are; none may be negative."""
    numbers = first
    for column in others:
        numbers = numbers * (int(column.max(initial=0)) + 1) + column
    return np.asarray(numbers)


def alike(*columns: Ints) -> tuple[Ints, Ints]:
    """Rows that are equal in all columns: the first one of each kind, and of which kind each row is."""
    numbers = joined(*columns)
    if not len(numbers):
        return numbers, numbers
    largest = int(numbers.max())
    if largest >= MANY * len(numbers):
        _, first, which = np.unique(numbers, return_index=True, return_inverse=True)
        return first, which.reshape(-1)
    first_of = np.full(largest + 1, -1, dtype=np.int64)  # by number; quicker than to sort
    first_of[numbers[::-1]] = np.arange(len(numbers))[::-1]
    there = first_of >= 0
    return first_of[there], (np.cumsum(there) - 1)[numbers]


def numbered(*columns: Ints) -> Ints:
    """For each row a number that is the same where all columns are."""
    return alike(*(alike(column)[1] for column in columns))[1]


def divisors(n: int) -> tuple[int, ...]:
    """All divisors of `n`, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def most_chunks(graph: ModelGraph) -> int:
    """How many pieces the chain may be cut into: its repeated blocks, and the glue at either end."""
    repeated = len(graph.repeated_positions)
    if not graph.pipeline_cuts or not repeated:
        return 1
    return repeated + (not graph.chain[0].repeated) + (not graph.chain[-1].repeated)


def only(fixed: T | None, choices: Iterable[T]) -> tuple[T, ...]:
    """The choices, or what the user fixed instead."""
    return tuple(choices) if fixed is None else (fixed,)


def tensor_degrees(graph: ModelGraph, degrees: Iterable[int]) -> tuple[int, ...]:
    """Those of `degrees` that `planner.legal` admits: 1, and what divides the attention heads and at least one
    way to shard a parameter."""
    sizes, heads = tensor_sizes(graph), head_counts(graph)
    return tuple(
        d
        for d in degrees
        if d == 1
        or (all(h % d == 0 for h in heads) and any(all(s % d == 0 for s in group) for group in sizes))
    )


def _thinned(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Of many sizes every second, the largest among them, and one."""
    if len(sizes) <= MOST_EXPERT_SIZES:
        return sizes
    return tuple(sorted({1, *sizes[::-2]}))


def _mesh_sizes(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Sizes of pp, dp_replicate, dp_shard, cp, tp, ep whose product (ep aside) is a device count in use."""
    graph = problem.graph
    fixed = problem.fixed.sizes
    parts = tuple(sorted({d for count in device_counts(problem) for d in divisors(count)}))
    choices = {key: only(fixed[key], parts) for key in MESH_KEYS}
    lengths, experts = sequence_lengths(graph), expert_counts(graph)
    if fixed["cp"] is None:
        shortest = min(lengths, default=0)
        choices["cp"] = tuple(
            d for d in parts if d == 1 or (shortest >= d * LEAST_TOKENS and all(n % d == 0 for n in lengths))
        )
    if fixed["ep"] is None:
        choices["ep"] = _thinned(
            tuple(d for d in parts if d == 1 or (experts and all(n % d == 0 for n in experts)))
        )
    choices["pp"] = tuple(p for p in choices["pp"] if p <= most_chunks(graph))
    choices["tp"] = tensor_degrees(graph, choices["tp"])
    whole = device_counts(problem)
    for pp, tp, cp, ep in product(choices["pp"], choices["tp"], choices["cp"], choices["ep"]):
        for devices in whole:
            rest, odd = divmod(devices, pp * tp * cp)
            if odd or not rest:
                continue
            for replicate in choices["dp_replicate"]:
                shard, odd = divmod(rest, replicate)
                if odd or (problem.global_batch % rest) or shard not in only(fixed["dp_shard"], (shard,)):
                    continue
                if shard * cp * tp % ep == 0:
                    yield (pp, replicate, shard, cp, tp, ep)


def device_counts(problem: Problem) -> tuple[int, ...]:
    """How many devices a strategy may use: see the module's docstring."""
    total = _usable(problem)
    sizes = [problem.fixed.sizes[key] for key in AXES]
    known = [size for size in sizes if size is not None]
    if len(known) == len(sizes) or (len(known) == len(sizes) - 1 and sizes[AXES.index("cp")] is None):
        used = int(np.prod(known))
        return (used,) if used <= total else ()
    if problem.all_devices:
        return (total,)
    others = (*_where_more_do_not_help(problem, total), *_inner_parts(problem, total))
    if problem.objective == Objective.COST:
        return tuple(sorted({*divisors(total), *others}))
    return tuple(dict.fromkeys((total, *others)))


def _inner_parts(problem: Problem, total: int) -> tuple[int, ...]:
    """Devices that the inner levels of the network join: where the outer ones are slow, these alone may take less time."""
    cluster = problem.cluster
    if cluster.network is not None or len(cluster.groups) > 1:
        return ()
    return tuple(level.size for level in cluster.levels if 1 < level.size < total)


def _where_more_do_not_help(problem: Problem, total: int) -> tuple[int, ...]:
    """Fewer devices than all, where the batch does not divide among all of them: for a few products of pp, tp and
    cp, the most devices whose data-parallel ranks get equal shares of the batch. More than half of all, but where
    the batch has fewer sequences than there are devices, and a step little work for each."""
    batch = problem.global_batch
    if batch % total == 0:
        return ()
    counts = {k * max(d for d in divisors(batch) if d * k <= total) for k in INNER_SIZES if k <= total}
    little = batch < total and _work_s(problem, total / 2) < SHORT_STEP_S
    return tuple(sorted((n for n in counts if n < total and (little or n > total / 2)), reverse=True))


def _work_s(problem: Problem, devices: float) -> float:
    """Seconds of a step's arithmetic at the peak of so many devices."""
    peak = max(problem.cluster.device.peak_flops.values())
    return problem.step_flops / (devices * peak)


def _usable(problem: Problem) -> int:
    """Devices of the cluster; of the groups that the user names for the pipeline ranks, as many for each rank."""
    groups = problem.fixed.groups
    if not groups:
        return problem.cluster.devices
    have = problem.cluster.groups
    return len(groups) * min(have[g].devices // groups.count(g) for g in groups)


def build_meshes(problem: Problem) -> Meshes:
    """Every mesh that is legal and respects the constraints, and its placements."""
    sizes = np.array(sorted(set(_mesh_sizes(problem))), dtype=np.int64).reshape(-1, len(MESH_KEYS))
    fixed = problem.fixed.order
    irregular = problem.cluster.network is not None
    orders = (fixed,) if fixed is not None else _orders(sizes)
    if (
        irregular and fixed is None
    ):  # whichever nodes take part, tensor parallelism stays inside them if it can
        orders = tuple(order for order in orders if order[-1] == "tp")
    if problem.fixed.groups and fixed is None:  # each pipeline rank has devices of one group
        orders = tuple(order for order in orders if order[0] == "pp")
    near = neighbours(sizes, orders, problem.cluster)
    if irregular:
        near = np.concatenate([_strides(sizes, orders), near], axis=-1)
    placed = distinct_orders(sizes, near)
    return Meshes(sizes=sizes, orders=orders, placed=placed, near=near, strides=2 * irregular)


def _strides(sizes: Ints, orders: tuple[tuple[str, ...], ...]) -> Ints:
    """By order, mesh and axis: the distance between neighbours (0 where an axis has one rank), and that along tp,
    of which experts take parts."""
    found = np.zeros((len(orders), len(sizes), len(AXES), 2), dtype=np.int64)
    for k, order in enumerate(orders):
        stride = np.ones(len(sizes), dtype=np.int64)
        for axis in reversed(order):
            size = sizes[:, MESH_KEYS.index(axis)]
            found[k, :, AXES.index(axis), 0] = np.where(size > 1, stride, 0)
            stride = stride * size
        found[k, :, :, 1] = found[k, :, AXES.index("tp"), 0][:, None]
    return found


def _orders(sizes: Ints) -> tuple[tuple[str, ...], ...]:
    """Permutations of the axes that are ever larger than one, the usual order first."""
    used = [axis for axis in AXES if len(sizes) and sizes[:, MESH_KEYS.index(axis)].max() > 1]
    slots = [AXES.index(axis) for axis in used]
    found = []
    for order in permutations(used):
        if {"cp", "tp"} <= set(order) and order.index("tp") != order.index("cp") + 1:
            continue
        axes = list(AXES)
        for slot, axis in zip(slots, order, strict=True):
            axes[slot] = axis
        found.append(tuple(axes))
    return tuple(found)


def neighbours(sizes: Ints, orders: tuple[tuple[str, ...], ...], cluster: Cluster) -> Ints:
    """`Meshes.near`: what `costmodel.topology.crossings` prices collectives by."""
    units = [level.size for level in cluster.levels] or [1]
    near = np.zeros((len(orders), len(sizes), len(AXES), len(units)), dtype=np.int64)
    for k, order in enumerate(orders):
        stride = np.ones(len(sizes), dtype=np.int64)
        for axis in reversed(order):
            size = sizes[:, MESH_KEYS.index(axis)]
            near[k, :, AXES.index(axis)] = inside_units(size, stride, units)
            stride = stride * size
    return near


def inside_units(size: Ints, stride: Ints, units: Sequence[int]) -> Ints:
    """Neighbours along axes of these sizes and strides inside a unit of each level, [axis, level], the outermost level last."""
    found = np.zeros((len(size), len(units)), dtype=np.int64)
    for u, unit in enumerate(units):
        aligned = np.gcd(size, np.maximum(unit // stride, 1))
        inside = (u == len(units) - 1) & (stride * size <= unit)
        found[:, u] = np.where(inside, size, np.where(unit % stride, 1, aligned))
    return found


def distinct_orders(sizes: Ints, near: Ints) -> Bools:
    """For each mesh, the orders that place it in a new way; none where a group would leave the network.

    Two orders place a mesh alike when every axis has as many neighbours in a unit of each level.
    """
    whole = sizes[:, [MESH_KEYS.index(axis) for axis in AXES]]
    placed = np.ones((len(sizes), len(near)), dtype=np.bool_)
    for k in range(len(near)):
        placed[:, k] = (near[k, :, :, -1] == whole).all(axis=1)
        for earlier in range(k):
            placed[:, k] &= ~(near[k] == near[earlier]).all(axis=(1, 2))
    return placed
