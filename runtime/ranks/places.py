"""Which ranks stand together along which axes of a mesh, from the strategy alone. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autoparallel.planner.expand.axes import EXPERT_SHARD, EXPERTS, expert_parts
from autoparallel.planner.strategy.islands import is_local
from autoparallel.planner.strategy.types import AXES, Mesh, Strategy

Ranks = npt.NDArray[np.int64]
EXPERT_AXES = ("pp", "dp_replicate", EXPERT_SHARD, EXPERTS)


def sharding_axes(sizes: Mesh, zero: int) -> tuple[str, ...]:
    """Axes of more than one rank that ZeRO shards over; none at level 0."""
    return tuple(a for a in ("dp_shard", "cp") if zero and getattr(sizes, a) > 1)


def unit_axes(sizes: Mesh, zero: int, *, casts: bool) -> tuple[str, ...]:
    """Axes over which FSDP2 has its units: those that ZeRO shards over; without any one rank by itself, where parameters are
    cast to what they are computed in (`casts`), which it does once for all micro-batches."""
    return sharding_axes(sizes, zero) or (("dp_shard",) if casts and sizes.dp_shard == 1 else ())


def replica_axes(sizes: Mesh, zero: int) -> tuple[str, ...]:
    """Axes of more than one rank along which gradients differ and parameters are held whole, or in equal shares."""
    sharded = sharding_axes(sizes, zero)
    return tuple(a for a in ("dp_replicate", "cp") if getattr(sizes, a) > 1 and a not in sharded)


def summed_axes(strategy: Strategy) -> tuple[str, ...]:
    """Of `replica_axes` those along which gradients are summed: replicas that train by themselves (`[outer]`) do not."""
    found = replica_axes(strategy.mesh, strategy.shard.zero)
    return tuple(axis for axis in found if axis != "dp_replicate") if is_local(strategy) else found


def secondary_groups(sizes: Mesh, ranks: int) -> tuple[list[list[int]], list[list[int]]]:
    """The ranks of every group that shares a second copy of the parameters, `ranks` neighbours along dp_shard; and of every one
    whose ranks have the same share of their copies."""
    apart = np.moveaxis(mesh_ranks(sizes), AXES.index("dp_shard"), -1)
    apart = apart.reshape(*apart.shape[:-1], -1, ranks)
    return rows_along(apart, [apart.ndim - 1]), rows_along(apart, [apart.ndim - 2])


def joined_name(axes: Sequence[str]) -> str:
    """The name of the mesh axis that several are joined to."""
    return "_".join(axes)


def mesh_ranks(sizes: Mesh) -> Ranks:
    """Ranks by position along `AXES`."""
    ranks = np.arange(sizes.devices).reshape([getattr(sizes, axis) for axis in sizes.order])
    return np.ascontiguousarray(ranks.transpose([sizes.order.index(axis) for axis in AXES]))


def expert_ranks(sizes: Mesh) -> Ranks:
    """Ranks by position along `EXPERT_AXES`: of tp, cp and dp_shard the inner parts hold different experts, as
    `planner.expand.axes.expert_parts` prices it, and the outer ones the same. Ranks ascend along every axis, as
    process groups count them."""
    parts = expert_parts(sizes)
    split = [n for axis in sizes.order for n in _outer_and_inner(getattr(sizes, axis), parts.get(axis, 1))]
    shared = [n for n, axis in enumerate(sizes.order) if axis in parts]
    first = [2 * sizes.order.index(axis) for axis in ("pp", "dp_replicate")]
    dims = [*first, *(2 * n for n in shared), *(2 * n + 1 for n in shared), *(n + 1 for n in first)]
    ranks = np.arange(sizes.devices).reshape(split).transpose(dims)
    return np.ascontiguousarray(ranks.reshape(sizes.pp, sizes.dp_replicate, -1, sizes.ep))


def _outer_and_inner(size: int, inner: int) -> tuple[int, int]:
    return size // inner, inner


def groups_along(sizes: Mesh, *axes: str) -> list[list[int]]:
    """The ranks of every group along `axes`, in the same order on every rank."""
    return rows_along(mesh_ranks(sizes), [AXES.index(axis) for axis in axes])


def rows_along(ranks: Ranks, dims: Sequence[int]) -> list[list[int]]:
    """The ranks along some dims, one list for each position along the others."""
    last = list(range(ranks.ndim - len(dims), ranks.ndim))
    moved = np.moveaxis(ranks, list(dims), last)
    count = int(np.prod([ranks.shape[dim] for dim in dims]))
    found: list[list[int]] = moved.reshape(-1, count).tolist()
    return found
