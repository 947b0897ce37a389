"""A fused cross-entropy keeps the logits it read: one tensor of the vocabulary, not two."""

from __future__ import annotations

from autoparallel.costmodel.graph import ModelGraph, OpKind
from autoparallel.planner.capture import capture
from autoparallel.planner.score import score
from benchmarks.accuracy import DEVICES, grown
from benchmarks.losses import with_fused_loss
from benchmarks.models import build
from benchmarks.rows import parse, read_rows

RAN_ON_40_GB = "llm_foundry_mpt:191"


def kept(graph: ModelGraph) -> list[str]:
    losses = [op for block in graph.blocks for op in block.operators if op.kind is OpKind.CROSS_ENTROPY]
    return [
        saved.value
        for op in losses
        for saved in op.saved
        if saved.spec.dtype == "bfloat16" and saved.spec.shape
    ]


def test_a_fused_loss_keeps_its_logits_and_no_softmax_of_them() -> None:
    row = next(row for row in read_rows([DEVICES.parent / "training_rows.csv"]) if row["id"] == RAN_ON_40_GB)
    run = parse(row, [DEVICES])
    traced = capture(*build(run.shape, 2), name="mpt")
    fused = with_fused_loss(traced)
    assert kept(traced) == [""]
    assert all(kept(fused))

    was, now = (score(grown(g, run.layers), run.cluster, run.strategies[0]) for g in (traced, fused))
    logits = 2 * int(row["micro_batch"]) * run.shape.seq_len * run.shape.vocab
    assert was.peak_bytes - now.peak_bytes >= 0.9 * logits
    assert now.feasible
    assert not was.feasible
    assert now.step_time_s == was.step_time_s
