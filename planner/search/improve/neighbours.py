"""Shapes near a shape: one legal move apart.

A move takes a factor from one axis of the mesh to another, or changes the size of the micro-batch, recomputation, offloading,
sequence or expert parallelism. A move of the mesh may change any one of the others along with it, since what fits depends on
both. All variants of a shape (schedule, chunks, ZeRO, placement, how gradients are synchronised) are near each other.
"""

from __future__ import annotations

import numpy as np

from autoparallel.planner.search.space.build import SCHEDULES, Space, Variants
from autoparallel.planner.search.space.candidates import Candidate
from autoparallel.planner.search.space.meshes import Bools, Ints
from autoparallel.planner.search.space.shapes import Shapes
from autoparallel.planner.search.space.syncs import Compressed

_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_OTHERS = ("micro", "sequence_parallel", "recompute", "optimizer_offloaded", "activations_offloaded", "ep")
MOST_CHANGED = 2  # axes, and of the others one beside them


def neighbours(shapes: Shapes, row: int) -> Ints:
    """The rows of the shapes that are one move from that of `row`."""
    axes, others = _changed(shapes, row)
    moved = (axes == MOST_CHANGED) & (others <= 1)
    stays = (axes == 0) & (others >= 1) & (others <= MOST_CHANGED)
    return np.flatnonzero((moved | stays) & (shapes.devices == shapes.devices[row]))


def one_key_apart(shapes: Shapes, row: int) -> Ints:
    """The rows of the shapes that differ from that of `row` in one key alone, replicas that become shards among them."""
    axes, others = _changed(shapes, row)
    data = _differs(shapes, "dp_replicate", row) & _differs(shapes, "dp_shard", row) & (axes == MOST_CHANGED)
    found = ((axes == 0) & (others == 1)) | (data & (others == 0))
    return np.flatnonzero(found & (shapes.devices == shapes.devices[row]))


def beside(space: Space, found: Variants, row: int, chosen: Candidate) -> Bools:
    """Variants of a candidate's own shape `row` that differ from it in one key, and of other shapes those that do not."""
    return key_changed(space, found, row, chosen) >= 0


def key_changed(space: Space, found: Variants, row: int, chosen: Candidate) -> Ints:
    """In which one key each variant differs from a candidate of the shape `row`, by number; -1 where in none, or in several. The level
    of ZeRO may follow where replicas become shards, compression the level, and the order of the axes the shape."""
    compressed = Compressed(gradients=chosen.compression, weights=chosen.weights, copied=chosen.copied)
    own = found.shape == row
    resharded = space.shapes.dp_shard[found.shape] != chosen.mesh.dp_shard
    schedule = found.schedule != SCHEDULES.index(chosen.schedule)
    schedule |= found.virtual_stages != chosen.virtual_stages
    order = found.order != space.meshes.orders.index(chosen.mesh.order)
    level = found.zero != chosen.zero
    compression = found.compression != space.compressions.index(compressed)
    others = [_differs(space.shapes, name, row)[found.shape] for name in _OTHERS]
    changed = np.stack(
        [*others, ~own & resharded, schedule, order & own, level & ~resharded, compression & ~level]
    )
    return np.where(changed.sum(axis=0) == 1, changed.argmax(axis=0), -1)


def _changed(shapes: Shapes, row: int) -> tuple[Ints, Ints]:
    """In how many axes each shape differs from that of `row`, and in how many of the others."""
    axes = sum(_differs(shapes, name, row).astype(np.int64) for name in _AXES)
    others = sum(_differs(shapes, name, row).astype(np.int64) for name in _OTHERS)
    return np.asarray(axes), np.asarray(others)


def _differs(shapes: Shapes, name: str, row: int) -> Bools:
    column = getattr(shapes, name)
    return np.asarray(column != column[row])
