"""Numbers by mesh and order of its axes that are the same where groups are placed alike: each distinct placement is priced once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoparallel.planner.expand.axes import EXPERT_AXES
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.bounds.prices import PriceBook
from autoparallel.planner.search.partition.forms import Chain
from autoparallel.planner.search.space.build import Space
from autoparallel.planner.search.space.meshes import MESH_KEYS, Ints, Meshes, inside_units, numbered
from autoparallel.planner.search.space.shapes import Shapes
from autoparallel.planner.strategy.types import AXES
from autoparallel.profiles.hardware import Cluster

SHARD_AXES = ("dp_shard", "cp")


def message_sizes(
    problem: Problem, book: PriceBook, shapes: Shapes, chain: Chain
) -> tuple[list[tuple[int, ...]], Ints]:
    """The distinct sizes of the chain's messages between neighbouring stages, in bytes, and which of them each shape has."""
    # Never fewer parts than `planner.expand.scatters_messages` has it.
    shared = (shapes.sequence_parallel > 0) | (problem.execution.kernels == "fused")
    parts = shapes.cp * np.where(shared, shapes.tp, 1)
    most = int(parts.max(initial=1)) + 1
    sizes, which = np.unique(shapes.micro * most + parts, return_inverse=True)
    dtype = problem.execution.dtype
    messages = [
        tuple(book.message_bytes(specs, dtype, *divmod(key, most)) for specs in chain.messages)
        for key in sizes.tolist()
    ]
    return messages, which.reshape(-1)


def places(space: Space, axis: str) -> tuple[list[tuple[int, int]], Ints]:
    """The distinct (size, stride) of an axis, and which of them it has by mesh and order."""
    sizes, columns = space.meshes.sizes, []
    for order in space.meshes.orders:
        inside = [MESH_KEYS.index(name) for name in order[order.index(axis) + 1 :]]
        columns.append(np.stack([sizes[:, MESH_KEYS.index(axis)], sizes[:, inside].prod(axis=1)], axis=1))
    every = np.stack(columns, axis=1).reshape(-1, 2)
    distinct, which = np.unique(every, axis=0, return_inverse=True)
    return [(size, stride) for size, stride in distinct.tolist()], which.reshape(len(sizes), -1)


def sizes_shared(space: Space) -> Ints:
    """For each mesh, a number that is the same where parameters, experts' and others, are shared among as many ranks."""
    columns = [MESH_KEYS.index(name) for name in ("dp_shard", "cp", "tp", "ep")]
    dp_shard, cp, tp, ep = space.meshes.sizes[:, columns].T
    return numbered(dp_shard * cp, np.where(ep > 1, dp_shard * cp * tp // ep, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """For each mesh and order, a number that is the same where groups have as many ranks and cross the same levels of the
    network by as many of them: what they exchange then costs the same."""

    shards: Ints  # the ranks that parameters which are no experts' are sharded over
    replicas: Ints  # those that hold the same shard
    expert_shards: Ints  # those that experts' parameters are sharded over

    @staticmethod
    def of(space: Space, cluster: Cluster) -> Groups:
        """The groups of every mesh of a space."""
        meshes = space.meshes
        if meshes.strides:  # an irregular network asks for each axis
            return Groups(
                shards=_by_axis(meshes, SHARD_AXES), replicas=_by_axis(meshes, ("dp_replicate",)),
                expert_shards=_by_axis(meshes, (*SHARD_AXES, "tp"), "ep"),
            )  # fmt: skip
        near = {name: meshes.near[:, :, AXES.index(name)] for name in AXES}
        return Groups(
            shards=_numbered(near["dp_shard"] * near["cp"]),
            replicas=_numbered(near["dp_replicate"]),
            expert_shards=_numbered(_near_expert_shards(meshes, cluster)),
        )


def _numbered(near: Ints) -> Ints:
    """By mesh and order the number of these rows, [order, mesh, column]."""
    orders, meshes, columns = near.shape
    return numbered(*near.reshape(-1, columns).T).reshape(orders, meshes).T


def _near_expert_shards(meshes: Meshes, cluster: Cluster) -> Ints:
    """The ranks that hold the same experts inside a unit of each level, [order, mesh, level]: `axes.expert_parts` in columns."""
    units = [level.size for level in cluster.levels] or [1]
    size = {name: meshes.sizes[:, MESH_KEYS.index(name)] for name in MESH_KEYS}
    parts, rest = {}, size["ep"]
    for name in EXPERT_AXES:
        parts[name] = np.gcd(rest, size[name])
        rest = rest // parts[name]
    near = np.ones((len(meshes.orders), len(meshes.sizes), len(units)), dtype=np.int64)
    for k, order in enumerate(meshes.orders):
        stride = np.ones(len(meshes.sizes), dtype=np.int64)
        for name in reversed(order):
            if name in parts:
                near[k] *= inside_units(size[name] // parts[name], stride * parts[name], units)
            stride = stride * size[name]
    near[:, size["ep"] == 1] = 0  # no experts are apart
    return near


def _by_axis(meshes: Meshes, names: tuple[str, ...], *sizes_beside: str) -> Ints:
    """Numbers of groups that are the same where each of these axes is placed alike and these sizes are the same."""
    axes = [AXES.index(name) for name in names]
    orders, number = meshes.near.shape[:2]
    near = meshes.near[:, :, axes].reshape(orders * number, -1)
    own = meshes.sizes[:, [MESH_KEYS.index(name) for name in (*names, *sizes_beside)]]
    rows = np.concatenate([near, np.tile(own, (orders, 1))], axis=1)
    return numbered(*rows.T).reshape(orders, number).T
