"""Saved bytes and FLOPs of captured graphs against what torch itself says on real tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoparallel.costmodel.graph import OpKind
from autoparallel.planner.capture import capture
from benchmarks.coverage import eager
from benchmarks.coverage.composed import Composed
from tests.capture.measured import counted_flops, show_saved
from tests.capture.models import EXAMPLES, NAMES, SAMPLES, SEQ, captured

EVERY = (*NAMES, *EXAMPLES)


def test_saved_bytes_of_bert_with_one_sample_more_follow_the_affine_sizes() -> None:
    _, _, graph = captured("bert")
    one, two, three = (eager.graph_saved_bytes(graph, b) for b in (1, 2, 3))
    assert three - two == two - one


@pytest.mark.sweep(7)
@pytest.mark.parametrize("name", EVERY)
def test_saved_bytes_are_what_autograd_keeps(name: str) -> None:
    module, inputs, graph = captured(name)
    # Attention under a bias that is trained (of positions, in T5) has no fused kernel on a CPU.
    expected = eager.saved_bytes(module, inputs, Composed(fused=True))
    assert eager.graph_saved_bytes(graph, SAMPLES) == expected, show_saved(graph)


@pytest.mark.parametrize("name", EVERY)
def test_flops_are_what_torch_counts(name: str) -> None:
    module, inputs, graph = captured(name)
    assert graph.model_flops(SAMPLES) - _experts_flops(name) == counted_flops(module, inputs)


def _experts_flops(name: str) -> int:
    """By hand, for torch does not count them: each token meets two experts, each of which multiplies by a
    (hidden, 2 · width) and a (width, hidden) matrix; forward, and two gradients of the same size."""
    hidden, top_k, tokens = 32, 2, SAMPLES * SEQ
    layers, width = {"mixtral": (2, 48), "deepseek": (1, 16)}.get(name, (0, 0))
    return layers * 3 * 2 * tokens * top_k * 3 * hidden * width


def test_attention_counts_the_full_square_however_causal() -> None:
    attention = [
        op for block in captured("llama")[2].blocks for op in block.operators if op.kind is OpKind.ATTENTION
    ]
    assert attention
    for op in attention:
        # q·k and p·v: 2 · heads · length² · (8 + 8) each sample.
        assert op.causal
        assert op.forward[0].flops.per_sample == 2 * 4 * SEQ**2 * 16
        assert op.backward[0].flops.per_sample == 2 * op.forward[0].flops.per_sample


@pytest.mark.parametrize("name", NAMES)
def test_every_product_names_letters_whose_sizes_give_its_flops(name: str) -> None:
    for block in captured(name)[2].blocks:
        for op in block.operators:
            sizes = {letter: size.at(SAMPLES) for letter, size in op.sizes}
            for kernel in (*op.forward, *op.backward):
                if kernel.kind is OpKind.GEMM and kernel.product:
                    product = 2
                    for letter in kernel.product:
                        product *= sizes[letter]
                    assert kernel.flops.at(SAMPLES) == product, (op.name, op.module, kernel)
                    assert sorted(kernel.product) == sorted("bmnk")


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("kind", ["Conv2d", "ConvTranspose2d"])
def test_gradients_of_a_convolution_of_groups_take_what_it_takes(kind: str, groups: int) -> None:
    convolution = getattr(nn, kind)(8, 16, 3, groups=groups, bias=False)
    module = nn.Sequential(nn.Conv2d(8, 8, 1), convolution)
    inputs = {"input": torch.randn(2, 8, 10, 10)}
    graph = capture(module, inputs, name=kind)
    assert graph.model_flops(2) == counted_flops(module, inputs)
    last = next(op for op in reversed(graph.blocks[-1].operators) if op.kind is OpKind.CONV)
    assert sum(k.flops.at(2) for k in last.backward) == 2 * sum(k.flops.at(2) for k in last.forward)
