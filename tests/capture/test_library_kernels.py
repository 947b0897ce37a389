"""What a model's code looks for in another library is captured as the kernels of that library: one call, whatever its length, with what
it keeps."""

from __future__ import annotations

import pytest
import torch

from autoparallel.costmodel.graph import ModelGraph, Operator, OpKind
from autoparallel.planner.capture import capture
from benchmarks.coverage.composed import Composed
from benchmarks.coverage.eager import counted_flops, graph_saved_bytes, library_flops, saved_bytes
from tests.hybrid_models import VOCABULARY, hybrid

SAMPLES, STEPS = 2, 72  # more than a chunk
CALLED = {
    "mamba": {"mamba_inner_fn": "mamba_ssm"},
    "jamba": {"selective_scan_fn": "mamba_ssm", "causal_conv1d_fn": "causal_conv1d"},
    "mamba2": {"mamba_split_conv1d_scan_combined": "mamba_ssm"},
    "qwen3_next": {
        "causal_conv1d_fn": "causal_conv1d",
        "chunk_gated_delta_rule": "flash-linear-attention",
    },
}


def _library(graph: ModelGraph) -> list[Operator]:
    return [op for block in graph.blocks for op in block.operators if op.kind is OpKind.RECURRENT]


@pytest.mark.parametrize("name", CALLED)
def test_a_librarys_kernels_are_one_call_with_what_it_keeps(name: str) -> None:
    made = hybrid(name)
    ids = torch.arange(SAMPLES * STEPS).reshape(SAMPLES, STEPS) % VOCABULARY
    run = {"input_ids": ids, "labels": ids}
    graph = capture(made, run, name=name)
    calls = _library(graph)
    assert {op.target.rpartition(".")[2] for op in calls} == CALLED[name].keys()
    assert all(k.count.at(SAMPLES) == 1 for op in calls for k in (*op.forward, *op.backward))
    (told,) = (words for words in graph.warnings if "priced as in" in words)
    assert all(word in told for word in (*CALLED[name], *CALLED[name].values()))
    assert not any("a loop in Python" in words for words in graph.warnings)
    assert graph_saved_bytes(graph, SAMPLES) == saved_bytes(made, run, Composed(fused=True))
    assert graph.model_flops(SAMPLES) - library_flops(graph, SAMPLES) == counted_flops(made, run)
    assert made(**run).loss.isfinite(), "afterwards its own code runs"


def test_a_sequence_twice_as_long_is_twice_the_work() -> None:
    made, kernels = hybrid("qwen3_next"), []
    for steps in (128, 256):
        ids = torch.zeros(SAMPLES, steps, dtype=torch.long)
        graph = capture(made, {"input_ids": ids, "labels": ids}, name="x")
        kernels.append([k for op in _library(graph) for k in (*op.forward, *op.backward)])
    short, long = ([(k.flops.at(1), k.bytes_moved.at(1)) for k in found] for found in kernels)
    assert [(2 * flops, 2 * moved) for flops, moved in short] == long
