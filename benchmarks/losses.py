"""A cross-entropy in one kernel, which a traced model cannot say: it keeps its logits, not a softmax of them.

Source: Dao-AILab/flash-attention, flash_attn/losses/cross_entropy.py, which llm-foundry's `fused_crossentropy` runs:
`save_for_backward(logits, lse, labels)`. The one number a row (`lse`) is left out.
"""

from __future__ import annotations

from dataclasses import replace

from autoparallel.costmodel.graph import Block, ModelGraph, Operator, OpKind


def with_fused_loss(graph: ModelGraph) -> ModelGraph:
    """The same model, its losses keeping their logits in place of a softmax of them."""
    return replace(graph, blocks=tuple(map(_fused, graph.blocks)))


def _fused(block: Block) -> Block:
    return replace(block, operators=tuple(map(_keeping_logits, block.operators)))


def _keeping_logits(operator: Operator) -> Operator:
    if operator.kind is not OpKind.CROSS_ENTROPY:
        return operator
    logits = operator.inputs[0]
    saved = tuple(replace(s, value=logits) if not s.value and s.spec.shape else s for s in operator.saved)
    return replace(operator, saved=saved)
