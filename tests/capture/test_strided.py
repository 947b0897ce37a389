"""Which strided shardings capture offers: fused projections, followed back to their parameters; nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoparallel.costmodel.graph import ModelGraph, Operator, Size
from autoparallel.planner.capture import capture
from autoparallel.planner.capture.rules import Rules

needs_parts = pytest.mark.skipif(not Rules().knows_parts(), reason="torch 2.12 or newer")
WIDTH, HEADS = 12, 2


class Fused(nn.Module):
    def __init__(self, *, sizes: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.qkv, self.sizes = nn.Linear(WIDTH, 3 * WIDTH), sizes

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x)
        a, b, c = y.split(list(self.sizes), dim=-1) if self.sizes else y.chunk(3, dim=-1)
        return (a.sum(-1) * b.sum(-1) * c.sum(-1)).sum()


class ByView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.qkv(x).view(x.shape[0], 4, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return (a * b * c).sum()


class HeadsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x).view(x.shape[0], 4, HEADS, -1).square().sum()


def captured(module: nn.Module) -> ModelGraph:
    return capture(module, (torch.zeros(2, 4, WIDTH),), name="fused")


def strided(graph: ModelGraph) -> dict[str, list[tuple[tuple[str, ...], tuple[str, ...], tuple[Size, ...]]]]:
    """Strided shardings by operator: inputs, outputs, and what the degree must divide."""
    operators: list[Operator] = [op for block in graph.blocks for op in block.operators]
    found = {
        op.name: [
            (s.inputs, s.outputs, s.divides)
            for s in op.shardings
            if any("/" in p for p in (*s.inputs, *s.outputs))
        ]
        for op in operators
    }
    return {name: rows for name, rows in found.items() if rows}


@needs_parts
def test_a_projection_that_is_chunked_may_be_sharded_in_parts() -> None:
    found = strided(captured(Fused()))
    assert found["chunk"] == [(("S2/3",), ("S2", "S2", "S2"), (Size(WIDTH),))]
    assert (("R", "S0/3", "S0/3"), ("S2/3",), (Size(WIDTH),)) in found["linear"]


@needs_parts
def test_a_view_into_parts_and_heads_may_take_each_part_sharded() -> None:
    found = strided(captured(ByView()))
    assert found["view"] == [(("S2/3",), ("S3",), (Size(HEADS),))]
    assert any(row[0] == ("R", "S0/3", "S0/3") for row in found["linear"])


def test_parts_of_different_sizes_are_not_sharded_in_parts() -> None:
    assert strided(captured(Fused(sizes=(12, 18, 6)))) == {}


def test_plain_heads_are_no_parts() -> None:
    assert strided(captured(HeadsOnly())) == {}
