"""Experts in a loop over those that were hit are traced, each with an equal share of the tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autoparallel.costmodel.graph import OpKind
from autoparallel.planner.capture import capture, values
from benchmarks.coverage.eager import graph_saved_bytes as saved_bytes
from tests.capture.measured import counted_flops, eager_saved_bytes, show_saved

WIDTH, TOKENS, EACH = 8, 24, 2


class _Experts(nn.Module):
    """A router, and experts that each have a module."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.SiLU(), nn.Linear(16, WIDTH)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, WIDTH)
        weights, chosen = self.router(rows).softmax(-1).topk(EACH, dim=-1)
        return self.mixed(rows, weights, chosen).view(x.shape)

    def mixed(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        raise NotImplementedError


class OverThoseHit(_Experts):
    """As Mixtral's first code: those hit by a mask, tokens of each by `where`, added up in place."""

    def mixed(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        mask = functional.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        out = torch.zeros_like(rows)
        for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            slot, token = torch.where(mask[expert].squeeze(0))
            out.index_add_(
                0,
                token,
                self.experts[expert](rows[None, token].reshape(-1, WIDTH)) * weights[token, slot, None],
            )
        return out


class ByAMaskOfAMask(_Experts):
    """As NLLB's code: the flags of a router are taken for its choices, and a tensor says which expert."""

    def mixed(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        flags = functional.one_hot(chosen, len(self.experts)).sum(dim=1)
        mask = functional.one_hot(flags, len(self.experts)).permute(2, 1, 0)
        out = torch.zeros_like(rows)
        for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            slot, token = torch.where(mask[expert].squeeze(0))
            out.index_add_(
                0,
                token,
                self.experts[expert[0]](rows[None, token].reshape(-1, WIDTH))
                * weights[token, slot % EACH, None],
            )
        return out


class Named(_Experts):
    """Experts by the names that they have in a dictionary."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.experts = nn.ModuleDict({f"expert_{i}": expert for i, expert in enumerate(self.experts)})  # type: ignore[assignment]

    def mixed(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for number in torch.unique(chosen):
            token, slot = torch.where(chosen == number)
            expert = self.experts[f"expert_{number}"]  # type: ignore[index]
            out.index_add_(0, token, expert(rows[token]) * weights[token, slot, None])
        return out


class Counted(_Experts):
    """As DeepSeek's own code: tokens counted by expert, those without any left out."""

    def mixed(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        for index, expert in enumerate(self.experts):
            if not counts[index]:
                continue
            token, slot = torch.where(chosen == index)
            out[token] += expert(rows[token]) * weights[token, slot, None]
        return out


class Masked(_Experts):
    """As DeepSeek's code for training: every token as often as it has experts, those of one by a mask."""

    def mixed(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        copies, flat = rows.repeat_interleave(EACH, dim=0), chosen.view(-1)
        out = torch.empty_like(copies)
        for index, expert in enumerate(self.experts):
            out[flat == index] = expert(copies[flat == index])
        return (out.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


class OfOneParameter(nn.Module):
    """Experts that are rows of one parameter: rounds of a loop that are all alike."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, experts), experts
        self.into = nn.Parameter(torch.randn(experts, 16, WIDTH))
        self.out_of = nn.Parameter(torch.randn(experts, WIDTH, 16))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, WIDTH)
        weights, chosen = self.router(rows).softmax(-1).topk(EACH, dim=-1)
        with torch.no_grad():
            mask = functional.one_hot(chosen, self.experts).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        out = torch.zeros_like(rows)
        for expert in hit:
            expert = expert[0]
            if expert == self.experts:
                continue
            slot, token = torch.where(mask[expert])
            inner = functional.silu(functional.linear(rows[token], self.into[expert]))
            out.index_add_(
                0, token, functional.linear(inner, self.out_of[expert]) * weights[token, slot, None]
            )
        return out.view(x.shape)


@pytest.mark.parametrize(
    ("kind", "experts"),
    [
        (OverThoseHit, 4),
        (ByAMaskOfAMask, 4),
        (Named, 4),
        (Counted, 4),
        (Masked, 4),
        (OfOneParameter, 4),
        (OfOneParameter, 48),
    ],
)
def test_experts_in_a_loop_cost_what_they_cost_when_all_are_hit(kind: type[nn.Module], experts: int) -> None:
    torch.manual_seed(0)
    tokens = TOKENS * experts
    layers = nn.Sequential(kind(experts), kind(experts))
    x = torch.randn(2, tokens, WIDTH)
    graph = capture(layers, x, name="experts")
    assert OpKind.LEAF not in {op.kind for block in graph.blocks for op in block.operators}
    assert [warning for warning in graph.warnings if "made equally often" in warning], graph.warnings
    assert graph.parameter_count == sum(p.numel() for p in layers.parameters())
    assert graph.model_flops(2) == counted_flops(layers, {"input": x})
    assert saved_bytes(graph, 2) == eager_saved_bytes(layers, {"input": x}), show_saved(graph)


def test_flags_of_layers_before_make_room_for_those_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(ByAMaskOfAMask(16) for _ in range(4)))
    x = torch.randn(2, TOKENS * 256, WIDTH)
    wanted = capture(layers, x, name="experts")
    of_one_layer = (
        (1 + 8) * 5 * TOKENS * 256 * 16 * 16
    )  # bytes, of flags and numbers, of the most samples that are traced
    monkeypatch.setattr(values, "_MOST_HELD_BYTES", 3 * of_one_layer // 2)
    assert capture(layers, x, name="experts") == wanted


class Padded(nn.Module):
    """Rows of zeros are padding; each letter lasts as many frames as it says; some layers are left out by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.lasts = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        mask = x.square().sum(-1).ne(0)
        frames = self.lasts(x).ceil().sum(dim=1).long().max()
        x = self.inner(x) if mask.all() else self.inner(x[mask])
        for layer in self.layers:
            if np.random.uniform(0, 1) >= 0.5:
                x = layer(x)
        return x.repeat_interleave(2, dim=1)[:, :frames]


def test_numbers_that_nobody_knows_are_no_zeros_last_one_frame_and_leave_no_layer_out() -> None:
    x = torch.randn(3, TOKENS, WIDTH)
    graph = capture(Padded(), x[:2], name="padded")
    assert [op.kind for block in graph.blocks for op in block.operators].count(OpKind.LEAF) == 0
    assert [warning for warning in graph.warnings if "every choice is priced" in warning]
    assert len(graph.repeated_positions) == 8
    last = graph.blocks[graph.chain[-1].block].operators[-1]
    assert last.outputs[0].shape[1].at(3) == TOKENS, last
