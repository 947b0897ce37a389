"""How many blocks a chunk must and may have."""

from __future__ import annotations

from math import ceil, floor

import numpy as np

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.planner.search.space.build import UNEVEN_CHUNKS_BLOCKS, even_share
from autoparallel.planner.search.space.candidates import Candidate
from autoparallel.planner.search.space.meshes import most_chunks
from autoparallel.planner.strategy.legal import least_blocks


def chunk_sizes(
    graph: ModelGraph, chosen: Candidate, shares: tuple[float, ...] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Blocks that each chunk must and may have: what is legal; of many blocks in many interleaved chunks an even
    share (`even_share`), or where there is none that share, one less or in an end chunk two. Over unlike devices
    such chunks get their `shares`, or one block more or less."""
    blocks, chunks = len(graph.repeated_positions), chosen.chunks
    if not blocks:
        return (0,) * chunks, (0,) * chunks
    least = least_blocks(graph, chunks)
    if chosen.virtual_stages == 1 or blocks <= UNEVEN_CHUNKS_BLOCKS:
        return least, (blocks,) * chunks
    if shares is not None:
        return (
            tuple(max(a, floor(n) - 1) for a, n in zip(least, shares, strict=True)),
            tuple(max(a, ceil(n) + 1) for a, n in zip(least, shares, strict=True)),
        )
    share, even = even_share(blocks, np.array([chunks]), most_chunks(graph))
    size = int(share[0])
    if even[0]:
        rest = blocks - (chunks - 2) * size
        ends = (max(least[0], rest - size), max(least[-1], rest - size))
        return (ends[0], *(size,) * (chunks - 2), ends[1]), (size,) * chunks
    ends = (max(least[0], size - 2), max(least[-1], size - 2))
    return (ends[0], *(max(1, size - 1),) * (chunks - 2), ends[1]), (size,) * chunks
