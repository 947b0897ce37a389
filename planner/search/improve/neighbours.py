"""Shapes near a shape: one legal move apart.

A move takes a factor from one axis of the mesh to another, or changes the size of the micro-batch, recomputation, offloading,
sequence or expert parallelism. A move of the mesh may change any one of the others along with it, since what fits depends on
both. All variants of a shape (schedule, chunks, ZeRO, placement, how gradients are synchronised) are near each other.
"""

from __future__ import annotations

import numpy as np

from autoparallel.planner.search.space.build import Shapes
from autoparallel.planner.search.space.meshes import Bools, Ints

_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_OTHERS = ("micro", "sequence_parallel", "recompute", "optimizer_offloaded", "activations_offloaded", "ep")
MOST_CHANGED = 2  # axes, and of the others one beside them


def neighbours(shapes: Shapes, row: int) -> Ints:
    """The rows of the shapes that are one move from that of `row`."""
    axes = sum(_differs(shapes, name, row).astype(np.int64) for name in _AXES)
    others = sum(_differs(shapes, name, row).astype(np.int64) for name in _OTHERS)
    moved = (axes == MOST_CHANGED) & (others <= 1)
    stays = (axes == 0) & (others >= 1) & (others <= MOST_CHANGED)
    return np.flatnonzero((moved | stays) & (shapes.devices == shapes.devices[row]))


def _differs(shapes: Shapes, name: str, row: int) -> Bools:
    column = getattr(shapes, name)
    return np.asarray(column != column[row])
