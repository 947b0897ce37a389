"""Code that looks at its data and decides nothing by it, that has itself compiled, or that goes through samples one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoparallel.costmodel.graph import OpKind
from autoparallel.planner.capture import capture
from autoparallel.planner.capture.guards import Unknown
from benchmarks.coverage import eager
from tests.capture.measured import counted_flops, show_saved

SAMPLES, WIDTH, DEPTH = 4, 8, 3


@torch.jit.script
def scripted(x: Tensor, bias: Tensor) -> Tensor:
    y = x + bias
    return y * 0.5 * (1.0 + torch.tanh(0.8 * y))


class Body(nn.Module):
    """Layers in a ModuleDict by number, as torchtitan keeps them."""

    def __init__(self, meddle: Callable[[Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(n): nn.Linear(WIDTH, WIDTH) for n in range(DEPTH)})
        self.bias, self.meddle = nn.Parameter(torch.zeros(WIDTH)), meddle
        self.log: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return self.meddle(x, self).square().mean()


def checks(x: Tensor, body: Any) -> Tensor:
    assert x.max() < 100, "too large"
    assert not torch.isnan(x).any()
    if x.abs().sum() > 1e9 or not (x.min() > -1e9).item():
        raise ValueError("too far")
    mean = x.mean().item()
    if mean > 1e9:
        raise ValueError("too far")
    body.log.append(round(100 * mean, 2))
    return x + body.bias


def script(x: Tensor, body: Any) -> Tensor:
    return scripted(x, body.bias)


def counts(x: Tensor, body: Any) -> Tensor:
    assert 16 % x.shape[0] == 0, "a queue that whole batches fit into"
    return x + body.bias


def one_by_one(x: Tensor, body: Any) -> Tensor:
    return torch.stack([F.linear(sample, body.layers["0"].weight, body.bias) for sample in x])


def matched(x: Tensor, body: Any) -> Tensor:
    """Rows that another library chooses."""
    rows = numpy.argsort(x.detach().sum(-1).cpu().numpy(), axis=-1)[:, :2].tolist()
    return torch.stack([sample[own] for sample, own in zip(x, rows, strict=True)]) + body.bias


@pytest.mark.parametrize("meddle", [checks, script, counts, one_by_one, matched])
def test_it_is_traced_and_costs_what_torch_counts(meddle: Any) -> None:
    torch.manual_seed(0)
    module, inputs = Body(meddle), {"x": torch.randn(SAMPLES, 5, WIDTH)}
    graph = capture(copy.deepcopy(module), inputs, name=meddle.__name__)
    kinds = {op.kind for block in graph.blocks for op in block.operators}
    assert OpKind.LEAF not in kinds, graph.warnings
    assert len(graph.repeated_positions) == DEPTH
    assert graph.model_flops(SAMPLES) == counted_flops(module, inputs)
    if meddle is not matched:  # which chooses by values: places are kept in another form
        assert eager.graph_saved_bytes(graph, SAMPLES) == eager.saved_bytes(module, inputs), show_saved(graph)


def test_what_is_compiled_is_captured_as_it_is_written() -> None:
    body = torch.compile(lambda x: F.gelu(x) + 1, backend="inductor")
    module, inputs = Body(lambda x, _: body(x)), {"x": torch.randn(SAMPLES, WIDTH)}
    plain = Body(lambda x, _: F.gelu(x) + 1)
    for layer in module.layers.values():
        layer.compile()
    own, other = (capture(m, inputs, name="body") for m in (module, plain))
    assert own.blocks == other.blocks


def test_autocast_in_the_models_own_code_is_told() -> None:
    def cast(x: Tensor, body: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.linear(x, body.layers["0"].weight)

    graph = capture(Body(cast), {"x": torch.randn(SAMPLES, WIDTH)}, name="cast")
    assert any("torch.autocast" in warning for warning in graph.warnings)


def test_a_number_that_nobody_knows_may_be_shown_but_not_decide() -> None:
    number = Unknown()
    assert f"{number * 2 + 1:.2f}" == "nan"
    with pytest.raises(Exception, match="depends on the values"):
        print("large" if number > 3 else "small")
    with pytest.raises(Exception, match="depends on the values"):
        range(int(number))
