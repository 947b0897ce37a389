"""Recurrent layers cost what their steps cost, at any length and in little time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoparallel.costmodel.graph import ModelGraph, Operator, OpKind
from autoparallel.costmodel.kernels import host_s, kernel_s
from autoparallel.costmodel.program import Kernel
from autoparallel.planner.capture import capture
from autoparallel.profiles import load_device
from tests.work import calls

WIDTH, HIDDEN, STEPS, BATCH = 6, 8, 50, 3
SETTINGS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "two layers": {"num_layers": 2},
    "both ways": {"bidirectional": True, "num_layers": 3, "dropout": 0.1},
    "without biases": {"bias": False},
    "time first": {"batch_first": False},
    "projected": {"proj_size": 4, "num_layers": 2},
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


def _operator(graph: ModelGraph) -> Operator:
    (found,) = [op for block in graph.blocks for op in block.operators if op.kind is OpKind.RECURRENT]
    return found


@pytest.mark.parametrize(
    ("kind", "setting"), [*(("LSTM", one) for one in SETTINGS), ("GRU", "time first"), ("GRU", "both ways"), ("RNN", "time first")]
)  # fmt: skip
def test_flops_are_those_of_all_steps(kind: str, setting: str) -> None:
    module = Series(kind, **SETTINGS[setting])
    graph = capture(module, torch.randn(2, STEPS, WIDTH), name=kind)
    inputs, states = _weights(module)
    first = sum(p.numel() for n, p in module.named_parameters() if n.startswith("layer.weight_ih_l0"))
    start = sum(
        p.numel() for n, p in module.named_parameters() if "weight_hh" in n
    )  # the first step's states need none
    assert graph.model_flops(BATCH) == 2 * BATCH * (3 * STEPS * (inputs + states) - STEPS * first - start), (
        "forward, and backward but for what needs none"
    )
    assert graph.parameter_count == sum(p.numel() for p in module.parameters())
    assert not graph.warnings


def test_what_waits_for_the_step_before_is_launched_step_by_step_and_all_else_once() -> None:
    graph = capture(Series("LSTM", num_layers=2), torch.randn(2, STEPS, WIDTH), name="x")
    operator = _operator(graph)
    forward = Counter({(k.kind, k.product): k.count.at(BATCH) for k in operator.forward})
    assert forward == {
        (OpKind.GEMM, "brgi"): 1, (OpKind.GEMM, "brgj"): 1, (OpKind.GEMM, "bsgp"): 2 * STEPS, (OpKind.ELEMENTWISE, ""): 2 * STEPS,
    }  # fmt: skip
    weights = [k.count.at(BATCH) for k in operator.backward if k.gradient_of == "weight"]
    assert sum(weights) == 6, (
        "the gradients of four matrices and of two layers' biases, each of all steps at once"
    )
    assert dict(operator.sizes)["r"].at(BATCH) == STEPS * BATCH


def test_no_python_stands_between_steps_whatever_launches_the_models_own_kernels() -> None:
    device = load_device("h100-sxm")
    step = Kernel(
        kind=OpKind.ELEMENTWISE, dtype="bf16", flops=0, bytes_moved=1024, count=STEPS, in_library=True
    )
    for kernels in ("eager", "fused", "compiled"):
        assert host_s(step, device, kernels) == STEPS * device.constants["launch_s.compiled"]
        assert kernel_s(step, device, kernels) <= kernel_s(replace(step, in_library=False), device, kernels)


@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell"])
def test_a_cell_of_its_own_runs_one_kernel_over_its_gates(kind: str) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = getattr(nn, kind)(WIDTH, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            made = self.cell(x)
            return (made if isinstance(made, Tensor) else made[0]).square().sum()

    graph = capture(Own(), torch.randn(2, WIDTH), name=kind)
    (cell,) = [op for block in graph.blocks for op in block.operators if "cell" in op.target]
    assert Counter(k.kind for k in cell.forward) == {OpKind.GEMM: 2, OpKind.ELEMENTWISE: 1}
    assert sum(k.kind is OpKind.ELEMENTWISE and k.bytes_moved.per_sample > 0 for k in cell.backward) == 1


def test_length_costs_nothing() -> None:
    module = Series("LSTM")
    _, short, long = (
        calls(lambda n=n: capture(module, torch.randn(2, n, WIDTH), name="x")) for n in (40, 40, 2000)
    )
    assert long < 1.1 * short, f"{long:,} calls against {short:,}"
