"""Torch's multi-head attention with heads apart gives what torch's own function gives, and keeps the same storages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autoparallel.planner.capture import capture
from autoparallel.planner.capture.heads import MULTI_HEAD, heads_apart
from benchmarks.coverage.eager import graph_saved_bytes
from tests.capture.measured import counted_flops, eager_saved_bytes, show_saved

WIDTH, HEADS, LENGTH = 16, 4, 5


class ByHeads(TorchFunctionMode):
    """Counts what it runs by heads."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        attend = heads_apart(func, args, kwargs or {})
        self.count += attend is not None
        return func(*args, **kwargs or {}) if attend is None else attend()


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def later() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def padded() -> Tensor:
    return torch.arange(LENGTH).expand(2, -1) >= torch.tensor([[LENGTH], [3]])


OWN = rows(2, LENGTH, WIDTH)
OTHERS = rows(2, 7, WIDTH, seed=1)
CALLS: dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]] = {
    "one tensor": ((OWN, OWN, OWN), {}),
    "another's keys": ((OWN, OTHERS, OTHERS), {}),
    "one sample": ((OWN[0], OWN[0], OWN[0]), {"attn_mask": later()}),
    "one sample, padded": ((OWN[0], OWN[0], OWN[0]), {"key_padding_mask": padded()[1]}),
    "later ones hidden": ((OWN, OWN, OWN), {"attn_mask": later()}),
    "causal": ((OWN, OWN, OWN), {"attn_mask": later(), "is_causal": True}),
    "padded": ((OWN, OWN, OWN), {"key_padding_mask": padded()}),
    "padded and causal": ((OWN, OWN, OWN), {"key_padding_mask": padded(), "attn_mask": later(), "is_causal": True}),
    "a bias for each head": (
        (OWN, OWN, OWN),
        {"attn_mask": rows(2 * HEADS, LENGTH, LENGTH, seed=2), "average_attn_weights": False},
    ),
}  # fmt: skip


def compare(
    module: nn.MultiheadAttention, call: Callable[[], tuple[Tensor, Tensor | None]], count: int
) -> None:
    def results() -> list[Tensor]:
        module.zero_grad()
        found = [one for one in call() if one is not None]
        torch.stack([one.square().sum() for one in found]).sum().backward()
        return [*found, *(p.grad for p in module.parameters() if p.grad is not None)]

    expected = results()
    with ByHeads() as mode:
        found = results()
    assert mode.count == count
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("needs_weights", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_those_of_torchs_own(name: str, needs_weights: bool) -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
    given, options = CALLS[name]
    compare(module, lambda: module(*given, need_weights=needs_weights, **options), 1)


def test_keys_and_values_may_have_widths_of_their_own() -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS, kdim=8, vdim=12, dtype=torch.float64)
    given = rows(LENGTH, 2, WIDTH), rows(3, 2, 8), rows(3, 2, 12)
    compare(module, lambda: module(*given), 1)


def test_weights_of_their_own_count_whatever_else_is_given() -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64)  # as WavLM calls it
    q, k, v = module.in_proj_weight.chunk(3)
    given, none = rows(LENGTH, 2, WIDTH), torch.empty(0, dtype=torch.float64)
    compare(
        module,
        lambda: MULTI_HEAD(
            given, given, given, WIDTH, HEADS, none, module.in_proj_bias, None, None, False, 0.0,
            module.out_proj.weight, module.out_proj.bias, use_separate_proj_weight=True,
            q_proj_weight=q, k_proj_weight=k, v_proj_weight=v,
        ),
        1,
    )  # fmt: skip


def test_keys_that_are_added_are_left_to_torch() -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True, add_zero_attn=True, dtype=torch.float64)
    compare(module, lambda: module(*(rows(LENGTH, 2, WIDTH),) * 3), 0)


class Model(nn.Module):
    """Attention whose weights are read, with a mask of flags and samples that are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = x * 2.0
        out = self.attention(x, x, x, attn_mask=torch.zeros(LENGTH, LENGTH), key_padding_mask=padding)
        result: Tensor = out[0].square().mean() + out[1].square().mean()
        return result


def test_capture_counts_what_torchs_own_computes_and_keeps() -> None:
    module, example = Model(), {"x": torch.randn(2, LENGTH, WIDTH), "padding": torch.zeros(2, LENGTH)}
    graph = capture(module, example, name="torch's own")
    assert graph.model_flops(2) == counted_flops(module, example)
    assert graph_saved_bytes(graph, 2) == eager_saved_bytes(module, example), show_saved(graph)
