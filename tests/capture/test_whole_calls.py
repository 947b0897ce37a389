"""What a model's code has torch do at once: checkpoints of its own, `torch.vmap`, and derivatives in the forward pass."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.checkpoint import checkpoint

from autoparallel.planner.capture import capture
from benchmarks.coverage import eager
from tests.capture.measured import counted_flops, show_saved

DEPTH, SAMPLES, WIDTH = 5, 4, 16  # deep enough that blocks are stood in for


class _Layer(nn.Module):
    """Attention, an MLP, and perhaps a checkpoint of both in its own forward."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.own = own

    def _run(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.mlp(x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=False) if self.own else self._run(x)


class _Checkpointed(nn.Module):
    """Layers that a checkpoint is around, or that have one in them."""

    def __init__(self, around: str) -> None:
        super().__init__()
        self.around, self.first = around, nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(_Layer(own=around == "inside") for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            if self.around == "inside":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.around == "reentrant")
        return x.square().mean()


class _Ensemble(nn.Module):
    """Several small models at once, each with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stacked = nn.ParameterDict({"weight": torch.randn(3, 8, WIDTH), "bias": torch.randn(3, 8)})
        self.body = nn.Linear(WIDTH, WIDTH)
        vars(self)["one"] = nn.Linear(WIDTH, 8, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        each = vmap(lambda own, given: functional_call(self.one, own, (given,)).tanh(), in_dims=(0, None))
        return each(dict(self.stacked), x).square().mean()


class _Physics(nn.Module):
    """A loss of second derivatives by its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_(True)
        u = self.first(2 * x)  # torch.utils.flop_counter cannot follow a leaf into a module
        for layer in self.layers:
            u = torch.tanh(layer(u))
        u = self.last(u)
        (first,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
        (second,) = torch.autograd.grad(first, x, torch.ones_like(first), create_graph=True)
        return (second + u * first).square().mean()


MODELS = {
    "checkpoints inside": (partial(_Checkpointed, "inside"), (SAMPLES, 6, WIDTH)),
    "checkpoints around": (partial(_Checkpointed, "around"), (SAMPLES, 6, WIDTH)),
    "checkpoints with a backward pass of their own": (
        partial(_Checkpointed, "reentrant"),
        (SAMPLES, 6, WIDTH),
    ),
    "ensemble": (_Ensemble, (SAMPLES, WIDTH)),
    "derivatives": (_Physics, (SAMPLES, WIDTH)),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_costs_and_keeps_what_torch_counts(name: str) -> None:
    make, shape = MODELS[name]
    module = make()
    inputs = {"x": torch.randn(shape)}
    graph = capture(copy.deepcopy(module), inputs, name=name)
    assert graph.parameter_count == sum(p.numel() for p in module.parameters())
    assert not any("not used" in warning for warning in graph.warnings), graph.warnings
    assert eager.graph_saved_bytes(graph, SAMPLES) == eager.saved_bytes(module, inputs), show_saved(graph)
    assert graph.model_flops(SAMPLES) == counted_flops(module, inputs)
