"""Numbers by mesh and order of its axes that are the same where groups are placed alike: each distinct placement is priced once."""

from __future__ import annotations

import numpy as np

from autoparallel.planner.problem import Problem
from autoparallel.planner.search.bounds.prices import PriceBook
from autoparallel.planner.search.partition.forms import Chain
from autoparallel.planner.search.space.build import Shapes, Space
from autoparallel.planner.search.space.meshes import MESH_KEYS, Ints
from autoparallel.planner.strategy.types import AXES

SHARD_AXES = ("dp_shard", "cp")
DATA_AXES = ("dp_replicate", *SHARD_AXES)


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
    ranks = np.stack([dp_shard * cp, np.where(ep > 1, dp_shard * cp * tp // ep, 0)], axis=1)
    return np.asarray(np.unique(ranks, axis=0, return_inverse=True)[1].reshape(-1))


def placements(space: Space, names: tuple[str, ...] = (), *sizes_beside: str) -> Ints:
    """For each mesh and order, a number that is the same where the groups of these axes are placed alike and these sizes are the
    same; of all groups of data parallelism, experts' among them, if none are named."""
    axes = [AXES.index(name) for name in names or DATA_AXES]
    orders, meshes = space.meshes.near.shape[:2]
    near = space.meshes.near[:, :, axes].reshape(orders * meshes, -1)
    if names:
        own = space.meshes.sizes[:, [MESH_KEYS.index(name) for name in (*names, *sizes_beside)]]
        rows = np.concatenate([near, np.tile(own, (orders, 1))], axis=1)
        return np.asarray(np.unique(rows, axis=0, return_inverse=True)[1].reshape(orders, meshes).T)
    sizes = space.meshes.sizes[:, [MESH_KEYS.index(name) for name in MESH_KEYS if name != "pp"]]
    # tp and ep say how experts are shared among the ranks of data parallelism; without experts apart tp does not.
    sizes = np.where(np.array([n == "tp" for n in MESH_KEYS if n != "pp"]) & (sizes[:, -1:] == 1), 1, sizes)
    rows = np.concatenate([near, np.tile(sizes, (orders, 1))], axis=1)
    _, number = np.unique(rows, axis=0, return_inverse=True)
    return np.asarray(number.reshape(orders, meshes).T)
