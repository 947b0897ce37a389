"""The model classes of the published runs."""

from __future__ import annotations

from dataclasses import replace

from autoparallel.costmodel.graph import OpKind
from autoparallel.planner.capture import capture
from benchmarks.models import Shape, build

SHAPE = Shape(
    family="llama", hidden=64, heads=4, kv_heads=2, head_dim=16, ffn_hidden=96, gated=True, vocab=256, tied=False,
    seq_len=32, rotary=True, experts=8, experts_per_token=2,
)  # fmt: skip


def test_a_fused_normalisation_is_one_operator_that_keeps_its_input_as_it_is() -> None:
    kept = {}
    for fused in (False, True):
        module, inputs = build(replace(SHAPE, experts=0, experts_per_token=0, fused_norm=fused), 2)
        graph = capture(module, inputs, name="norm")
        block = graph.blocks[graph.chain[graph.repeated_positions[0]].block]
        norms = [op for op in block.operators if op.kind in (OpKind.NORM, OpKind.REDUCTION)]
        assert len(norms) == 2
        kept[fused] = {s.spec.dtype for op in norms for s in op.saved if len(s.spec.shape) == 3 and s.value}
    assert kept == {False: set(), True: {"bfloat16"}}


def test_experts_count_the_products_of_the_rows_that_reach_them() -> None:
    module, inputs = build(SHAPE, 2)
    graph = capture(module, inputs, name="experts")
    assert graph.parameter_count == sum(p.numel() for p in module.parameters())
    first, *_ = graph.repeated_positions
    block = graph.blocks[graph.chain[first].block]
    grouped = [op for op in block.operators if op.kind is OpKind.GROUPED_GEMM]
    rows = SHAPE.seq_len * SHAPE.experts_per_token
    flops = sum(kernel.flops.at(1) for op in grouped for kernel in op.forward)
    assert flops == 2 * rows * 3 * SHAPE.hidden * SHAPE.ffn_hidden
