"""Gradients of weights that are put off are those of a whole backward pass, and little is kept for them."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from autoparallel.runtime.check.live_bytes import LiveBytes
from autoparallel.runtime.gradients.put_off import backward_putting_off, can_put_off, put_off

WIDTH = 16


class Block(nn.Module):
    """Two products, a norm, and much that is kept between them."""

    def __init__(self, second: nn.Module) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), second

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(self.norm(x))
        hidden += 0.5  # as code may
        for _ in range(6):
            hidden = torch.sin(hidden)  # keeps what it reads
        return x + self.second(hidden)  # type: ignore[no-any-return]


class Stage(nn.Module):
    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH, padding_idx=3)
        self.blocks = nn.ModuleList(
            [Block(nn.Linear(4 * WIDTH, WIDTH, bias=False)), Block(Conv1D(WIDTH, 4 * WIDTH))]
        )
        self.recomputes = recomputes

    def forward(self, indices: Tensor, x: Tensor) -> Tensor:
        rows = self.table(indices)
        rows += x
        x = rows
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x


@pytest.mark.parametrize("recomputes", [False, True])
def test_halves_give_the_gradients_of_a_whole_pass(*, recomputes: bool) -> None:
    torch.manual_seed(0)
    stage = Stage(recomputes=recomputes).double()
    indices, x = torch.randint(11, (2, 5)), torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    weights = list(stage.parameters())
    assert can_put_off(stage)
    y = stage(indices, x)
    given = torch.randn_like(y)
    whole = torch.autograd.grad(y, [x, *weights], given)

    put_off(stage)
    again = torch.autograd.grad(stage(indices, x), [x, *weights], given)  # nobody asked to put off
    for ours, theirs in zip(again, whole, strict=True):
        torch.testing.assert_close(ours, theirs)

    (of_x,), half = backward_putting_off([get_gradient_edge(stage(indices, x))], [given], [x], weights)
    assert of_x is not None
    torch.testing.assert_close(of_x, whole[0])
    assert all(w.grad is None for w in weights)
    told: list[Tensor] = []
    half.run(told.append)
    assert {id(w) for w in told} == {id(w) for w in weights}
    assert len(told) == len(weights)
    dims = [w.dim() for w in told]
    assert dims == sorted(dims), "no unit waits, after its last product, for what was made long before"
    for weight, theirs in zip(weights, whole[1:], strict=True):
        torch.testing.assert_close(weight.grad, theirs)


def test_between_the_halves_only_factors_of_products_stay() -> None:
    torch.manual_seed(0)
    stage = Stage()
    put_off(stage)
    weights, rows = list(stage.parameters()), 64
    indices, x = torch.randint(11, (1, rows)), torch.randn(1, rows, WIDTH, requires_grad=True)
    given, live = torch.randn(1, rows, WIDTH), LiveBytes()

    def during(action: Callable[[], Any]) -> tuple[int, Any]:
        live.begin()
        result = action()
        gc.collect()
        return live.end().kept, result

    with live:
        edges: list[Any] = []
        forward, _ = during(lambda: edges.append(get_gradient_edge(stage(indices, x))))
        first, (_, half) = during(lambda: backward_putting_off([edges.pop()], [given], [x], weights))
        second, _ = during(half.run)
    one = rows * WIDTH * 4
    small = (
        sum(w.numel() * 4 for w in weights if w.dim() == 1) + one
    )  # gradients of norms and biases, and of x
    factors = 2 * (1 + 4 + 4 + 1) * one + one  # of two products in each block, and what arrived at the table
    assert forward > 2 * 6 * 4 * one
    assert forward + first <= factors + small
    assert forward + first > 10 * one
    assert second < 0


def test_stages_of_other_products_are_left_to_autograd() -> None:
    assert not can_put_off(nn.Sequential(nn.Linear(4, 4), nn.Conv2d(4, 64, 3)))
    assert not can_put_off(nn.Embedding(4, 4))
    tied = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    tied[1].weight = tied[0].weight
    assert not can_put_off(tied)


def test_layers_whose_weights_a_parametrization_makes_are_not_asked_for_them() -> None:
    """Each time that spectral norm is asked it changes its buffers."""
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    before = copy.deepcopy(layer.state_dict())
    assert not can_put_off(layer)
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)


def test_each_block_by_itself_must_be_of_layers_that_put_off() -> None:
    """So that it is known of a block's graph, whatever else is on its stage."""
    attention = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0)
    stage = nn.Sequential(attention, nn.Linear(64, 64))
    assert can_put_off(stage)
    assert not can_put_off(stage, ["0"])
    assert not can_put_off(stage, ["1"]), "nor what is beside the blocks"
