"""Recurrent layers cost what their steps cost, at any length and in little time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoparallel.planner.capture import capture
from autoparallel.planner.capture.recurrent import stepwise
from tests.work import calls

WIDTH, HIDDEN = 6, 8
SETTINGS: dict[str, dict[str, Any]] = {
    "two layers": {"num_layers": 2},
    "both ways": {"bidirectional": True, "num_layers": 2},
    "without biases": {"bias": False},
    "time first": {"batch_first": False},
}


class Series(nn.Module):
    """A recurrent layer over time, of samples that come first."""

    def __init__(self, kind: str, **settings: Any) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(WIDTH, HIDDEN, **({"batch_first": True} | settings))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x if self.layer.batch_first else x.transpose(0, 1))[0]
        assert isinstance(out, Tensor)
        return out.square().sum()


def _weights(module: nn.Module) -> tuple[int, int]:
    """Numbers in the matrices that read inputs, and in those that read states."""
    named = list(module.named_parameters())
    return (
        sum(p.numel() for name, p in named if "weight_ih" in name),
        sum(p.numel() for name, p in named if "weight_hh" in name or "weight_hr" in name),
    )


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("kind", "setting"), [*(("LSTM", one) for one in SETTINGS), ("GRU", "time first"), ("RNN", "time first")]
)
def test_flops_are_those_of_all_steps(kind: str, setting: str) -> None:
    module, steps, batch = Series(kind, **SETTINGS[setting]), 50, 3
    graph = capture(module, torch.randn(2, steps, WIDTH), name=kind)
    inputs, states = _weights(module)
    first = sum(p.numel() for n, p in module.named_parameters() if n.startswith("layer.weight_ih_l0"))
    start = states  # the first step's states are zeros without a gradient
    assert graph.model_flops(batch) == 2 * batch * (3 * steps * (inputs + states) - steps * first - start), (
        "forward, and backward but for what needs none"
    )
    assert graph.parameter_count == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("setting", [*SETTINGS, "projected"])
def test_step_by_step_is_what_torch_computes(kind: str, setting: str) -> None:
    if setting == "projected" and kind != "LSTM":
        pytest.skip("an LSTM alone projects")
    settings = {"proj_size": 4} if setting == "projected" else SETTINGS[setting]
    layer, rows = Series(kind, **settings).layer, torch.randn(2, 5, WIDTH)
    name = {"LSTM": "lstm", "GRU": "gru", "RNN": "rnn_tanh"}[kind]
    directions = 2 if layer.bidirectional else 1
    samples = rows.shape[0 if layer.batch_first else 1]
    sizes = (layer.proj_size or HIDDEN, HIDDEN)[: 2 if kind == "LSTM" else 1]
    state = [torch.randn(layer.num_layers * directions, samples, size) for size in sizes]
    given = tuple(state) if kind == "LSTM" else state[0]
    run = stepwise(
        name,
        (
            rows,
            given,
            layer._flat_weights,
            layer.bias,
            layer.num_layers,
            0.0,
            True,
            layer.bidirectional,
            layer.batch_first,
        ),
    )
    assert run is not None
    out, *last = run()
    expected, ends = layer(rows, given)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(tuple(last), ends if kind == "LSTM" else (ends,))


def test_length_costs_little() -> None:
    module = Series("LSTM")
    _, short, long = (
        calls(lambda n=n: capture(module, torch.randn(2, n, WIDTH), name="x")) for n in (40, 40, 2000)
    )
    assert long < 2 * short, f"{long:,} calls against {short:,}"
