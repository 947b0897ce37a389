"""How many blocks a chunk must and may have."""

from __future__ import annotations

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.planner.strategy.legal import least_blocks


def chunk_sizes(graph: ModelGraph, chunks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Blocks that each chunk must and may have: what is legal."""
    blocks = len(graph.repeated_positions)
    if not blocks:
        return (0,) * chunks, (0,) * chunks
    return least_blocks(graph, chunks), (blocks,) * chunks
