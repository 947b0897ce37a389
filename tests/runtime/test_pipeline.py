from __future__ import annotations

from typing import Any

import pytest
import torch

from autoparallel.costmodel.program import CollectiveOp
from tests.runtime.compare import TOLERANCE
from tests.runtime.handed_bias import run_cast
from tests.runtime.harness import Processes
from tests.runtime.pipelines import exchanged, initial_state, outputs_kept, refused, run_pipeline

pytestmark = pytest.mark.distributed

DTYPE = {
    "llama": "float32", "llama_with_labels": "float32", "qwen3": "float32", "gpt2": "float64", "vit": "float64",
    "mlp": "float64", "resnet": "float64", "beside": "float64",
}  # fmt: skip
GPIPE = {"schedule": "gpipe", "stage_blocks": (2, 2)}
ONE_F_ONE_B = {"schedule": "1f1b", "stage_blocks": (2, 2)}
UNEVEN = {"schedule": "1f1b", "stage_blocks": (1, 3)}
EMPTY_FIRST = {"schedule": "1f1b", "stage_blocks": (0, 4)}
INTERLEAVED = {"schedule": "interleaved-1f1b", "virtual_stages": 2, "stage_blocks": (1, 1, 1, 1)}
FOUR = {"schedule": "1f1b", "stage_blocks": (1, 1, 1, 1)}
Case = tuple[str, dict[str, Any], dict[str, Any]]  # model, pipeline, the rest

ON_TWO: dict[str, Case] = {
    "llama, gpipe": ("llama", GPIPE, {"micro_batches": 2}),
    "llama, loss inside, 1f1b": ("llama_with_labels", ONE_F_ONE_B, {"micro_batches": 3}),
    "llama, interleaved": ("llama", INTERLEAVED, {"micro_batches": 4, "recompute": "operators"}),
    "gpt2, 1f1b, uneven": ("gpt2", UNEVEN, {"micro_batches": 4}),
    "gpt2, 1f1b, only embeddings first": ("gpt2", EMPTY_FIRST, {"micro_batches": 2}),
    "gpt2, interleaved": ("gpt2", INTERLEAVED, {"micro_batches": 2}),
    "qwen3, one micro-batch": ("qwen3", ONE_F_ONE_B, {"micro_batches": 1}),
    "vit, gpipe, full recomputation": ("vit", GPIPE, {"micro_batches": 2, "recompute": "full"}),
    "mlp, interleaved": ("mlp", INTERLEAVED, {"micro_batches": 2}),
    "resnet, 1f1b": ("resnet", ONE_F_ONE_B, {"micro_batches": 3, "recompute": "operators"}),
    "gpt2, zero bubble in a V": ("gpt2", {**INTERLEAVED, "schedule": "zbv"}, {"micro_batches": 4}),
    "llama, two pipelines in a V": (
        "llama",
        {**INTERLEAVED, "schedule": "dualpipev"},
        {"micro_batches": 4},
    ),
    "resnet, zero bubble in a V": (
        "resnet",
        {**INTERLEAVED, "schedule": "zbv"},
        {"micro_batches": 2, "recompute": "full", "attention": "unfused"},
    ),
    "mlp, zero bubble": ("mlp", {**ONE_F_ONE_B, "schedule": "zb1p"}, {"micro_batches": 3}),
    "an activation beside, interleaved": ("beside", INTERLEAVED, {"micro_batches": 2}),
    "micro-batch of one": ("llama", ONE_F_ONE_B, {"micro": 1, "micro_batches": 2}),
}
ON_FOUR: dict[str, Case] = {
    "four stages": ("llama", FOUR, {"pp": 4, "micro_batches": 4}),
    "replicas": ("gpt2", ONE_F_ONE_B, {"dp_replicate": 2, "micro_batches": 2}),
    "zero 1": ("llama", ONE_F_ONE_B, {"dp_shard": 2, "zero": 1, "micro_batches": 2}),
    "zero 2, interleaved": ("gpt2", INTERLEAVED, {"dp_shard": 2, "zero": 2, "micro_batches": 2}),
    "zero 1, zero bubble in a V": (
        "mlp",
        {**INTERLEAVED, "schedule": "zbv"},
        {"dp_shard": 2, "zero": 1, "micro_batches": 2},
    ),
    "zero 2, zero bubble": (
        "gpt2",
        {**ONE_F_ONE_B, "schedule": "zb1p"},
        {"dp_shard": 2, "zero": 2, "micro_batches": 3},
    ),
    "zero 2, zero bubble in a V, recomputed": (
        "llama",
        {**INTERLEAVED, "schedule": "zbv"},
        {"dp_shard": 2, "zero": 2, "micro_batches": 2, "recompute": "full"},
    ),
    "zero 3, zero bubble in a V": (
        "gpt2",
        {**INTERLEAVED, "schedule": "zbv"},
        {"dp_shard": 2, "zero": 3, "micro_batches": 3},
    ),
    "zero 3, two pipelines in a V, recomputed": (
        "llama",
        {**INTERLEAVED, "schedule": "dualpipev"},
        {"dp_shard": 2, "zero": 3, "micro_batches": 4, "recompute": "full"},
    ),
    "zero 3": ("vit", ONE_F_ONE_B, {"dp_shard": 2, "zero": 3, "micro_batches": 3}),
    "tensor parallel": ("llama_with_labels", ONE_F_ONE_B, {"tp": 2, "micro_batches": 2}),
    "tensor parallel, interleaved": ("gpt2", INTERLEAVED, {"tp": 2, "micro_batches": 2}),
    "tied, but sharded on one stage only": ("gpt2", ONE_F_ONE_B, {"tp": 2, "without": "lm_head"}),
    "sequence parallel": (
        "llama",
        ONE_F_ONE_B,
        {"tp": 2, "sequence_parallel": True, "micro_batches": 2, "recompute": "operators"},
    ),
    "resnet, tensor parallel": ("resnet", UNEVEN, {"tp": 2, "micro_batches": 2}),
}


def _check(gloo: Processes, ranks: int, case: Case) -> None:
    model, pipeline, options = case
    dtype = DTYPE[model]
    found = gloo.run(
        ranks, run_pipeline, name=model, pipeline=pipeline, options={"pp": 2, **options}, dtype=dtype
    )[0]
    limit = TOLERANCE[getattr(torch, dtype)]
    assert found.gradient <= limit, found
    assert found.loss <= limit, found
    assert found.norm <= limit, found
    assert not found.missing, found
    assert found.state <= limit, found


@pytest.mark.sweep(6)
@pytest.mark.parametrize("case", ON_TWO.values(), ids=ON_TWO.keys())
def test_two_stages_give_the_gradients_of_one_process(gloo: Processes, case: Case) -> None:
    _check(gloo, 2, case)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("case", ON_FOUR.values(), ids=ON_FOUR.keys())
def test_pipelines_with_other_axes_give_the_gradients_of_one_process(gloo: Processes, case: Case) -> None:
    _check(gloo, 4, case)


@pytest.mark.parametrize("name", ["gpt2", "mlp"])
def test_a_model_built_on_meta_starts_as_in_one_process(gloo: Processes, name: str) -> None:
    (alone,) = gloo.run(1, initial_state, name=name, pipeline={}, options={})
    state = gloo.run(2, initial_state, name=name, pipeline=INTERLEAVED, options={"pp": 2})[0]
    assert state.keys() == alone.keys()
    for key, value in alone.items():
        assert torch.equal(state[key], value), key


def test_a_pipeline_that_cannot_run_is_refused_in_words(gloo: Processes) -> None:
    message = gloo.run(2, refused, pipeline={"schedule": "1f1b", "stage_blocks": (4,)})[0]
    assert "one entry for each of the 2 stages" in message


def test_what_has_been_sent_is_not_kept(gloo: Processes) -> None:
    assert gloo.run(2, outputs_kept, pipeline=GPIPE, micro_batches=4)[0] == 0


@pytest.mark.parametrize(("zero", "recompute"), [(2, "none"), (2, "full"), (3, "none"), (3, "full")])
def test_a_split_backward_gathers_and_reduces_each_unit_as_often_as_a_whole_one(
    gloo: Processes, zero: int, recompute: str
) -> None:
    options = {"pp": 2, "dp_shard": 2, "zero": zero, "micro_batches": 2, "recompute": recompute}
    split = {**ONE_F_ONE_B, "schedule": "zb1p"}
    for whole, halves in gloo.run(4, exchanged, name="gpt2", pipelines=[ONE_F_ONE_B, split], options=options):
        assert halves == whole
        assert any(message.op is CollectiveOp.REDUCE_SCATTER for message in whole)


@pytest.mark.parametrize("options", [{}, {"dp_shard": 2, "zero": 1}, {"dp_shard": 2, "zero": 2}], ids=str)
def test_weights_that_another_unit_uses_too_are_reduced_in_one_dtype(
    gloo: Processes, options: dict[str, Any]
) -> None:
    options = {"pp": 2, "micro_batches": 2, **options}
    difference, name = gloo.run(2 * options.get("dp_shard", 1), run_cast, schedule="zb1p", options=options)[0]
    assert difference <= TOLERANCE[torch.float32], name
