"""What torch's kernels for CPUs keep otherwise is compared in the composition that is priced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoparallel.planner.capture import capture
from benchmarks.coverage.composed import Composed, fused_attention
from benchmarks.coverage.eager import counted_flops, graph_saved_bytes, saved_bytes
from benchmarks.coverage.stepwise import stepwise

STEPS = 32  # the kernel of GPUs rounds its statistics up to as many rows


def kept_of(run: Callable[[], object]) -> Counter[int]:
    """Bytes of the storages that autograd keeps of a call, but for single numbers (the generator's seed)."""
    found: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dim():
            found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        alive.append(run())  # type: ignore[arg-type]
    return Counter(found.values())


@pytest.mark.parametrize("width", [8, 16])
@pytest.mark.parametrize("mask", ["none", "trained"])
def test_attention_keeps_what_the_kernel_of_gpus_keeps(width: int, mask: str) -> None:
    def inputs(device: str) -> list[Tensor]:
        shapes = [(2, 4, STEPS, 8), (2, 4, STEPS, 8), (2, 4, STEPS, width), (2, 4, STEPS, STEPS)]
        return [
            torch.zeros(s, device=device, requires_grad=True) for s in shapes[: 4 if mask != "none" else 3]
        ]

    query, key, value, *bias = inputs("meta")
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    expected = kept_of(lambda: kernel(query, key, value, bias[0] if bias else None, True))
    real = inputs("cpu")
    assert kept_of(lambda: fused_attention(*real)) == expected
    assert torch.equal(fused_attention(*real), F.scaled_dot_product_attention(*real))


RECURRENT: dict[str, dict[str, Any]] = {
    "two layers": {"num_layers": 2},
    "both ways": {"bidirectional": True, "num_layers": 2},
    "without biases": {"bias": False},
    "time first": {"batch_first": False},
    "projected": {"proj_size": 4},
}


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("setting", RECURRENT)
def test_step_by_step_is_what_torch_computes(kind: str, setting: str) -> None:
    if setting == "projected" and kind != "LSTM":
        pytest.skip("an LSTM alone projects")
    layer, rows = (
        getattr(nn, kind)(6, 8, **({"batch_first": True} | RECURRENT[setting])),
        torch.randn(2, 5, 6),
    )
    name = {"LSTM": "lstm", "GRU": "gru", "RNN": "rnn_tanh"}[kind]
    directions = 2 if layer.bidirectional else 1
    samples = rows.shape[0 if layer.batch_first else 1]
    sizes = (layer.proj_size or 8, 8)[: 2 if kind == "LSTM" else 1]
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


class Unlike(nn.Module):
    """Attention with keys and values of unlike widths under a bias that is trained, or with a masked query that lies head by
    head, after a recurrent layer; and every sample multiplied with every other one."""

    def __init__(
        self, *, narrow: bool = False, biased: bool = False, by_head: bool = False, recurrent: bool = False,
        contrastive: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        width = 4 if narrow else 8
        self.parts = nn.ModuleList(nn.Linear(16, 2 * w) for w in (8, 8, width))
        self.out = nn.Linear(2 * width, 16)
        self.bias = nn.Parameter(torch.randn(2, STEPS, STEPS)) if biased else None
        self.by_head = by_head
        self.against = nn.Linear(16, 16) if contrastive else None
        self.steps = nn.LSTM(16, 16, batch_first=True) if recurrent else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.steps is None else self.steps(x)[0]
        query, key, value = (part(x).unflatten(-1, (2, -1)).transpose(1, 2) for part in self.parts)
        bias = None if self.bias is None else self.bias + query.mean(-1, keepdim=True)
        if self.by_head:
            query, bias = query.contiguous(), torch.zeros(STEPS, STEPS)
        mixed = F.scaled_dot_product_attention(query, key, value, bias)
        mixed = self.out(mixed.transpose(1, 2).flatten(2))
        return mixed if self.against is None else self.against(mixed[:, 0]) @ mixed[:, 1].t()


CASES: Mapping[str, tuple[dict[str, Any], set[str]]] = {
    "as a CPU has it": ({}, set()),
    "unlike widths": ({"narrow": True}, {"attention"}),
    "a trained bias": ({"biased": True}, {"attention"}),
    "a masked query that lies head by head": ({"by_head": True}, {"attention"}),
    "samples against samples": ({"contrastive": True}, set()),
    "a recurrent layer": ({"recurrent": True}, {"lstm"}),
    "all of it": ({"narrow": True, "biased": True, "recurrent": True}, {"attention", "lstm"}),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", CASES)
def test_what_is_captured_is_what_the_composition_keeps_and_computes(case: str) -> None:
    settings, replaced = CASES[case]
    module = Unlike(**settings)
    inputs = {"x": torch.randn(2, STEPS, 16)}
    graph, mode = capture(module, inputs, name=case), Composed(fused=True)
    assert graph_saved_bytes(graph, 2) == saved_bytes(module, inputs, mode)
    assert mode.replaced == replaced
    # Without it a CPU keeps other things, or there was nothing to replace.
    assert (graph_saved_bytes(graph, 2) == saved_bytes(module, inputs)) is (not replaced)
    assert graph.model_flops(2) == counted_flops(module, inputs)
    assert not graph.warnings or "recurrent" in settings
