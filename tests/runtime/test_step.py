from __future__ import annotations

from typing import Any

import pytest
import torch

from autoparallel.planner.capture import capture
from autoparallel.runtime.limits import entered_blocks
from tests.runtime.compare import TOLERANCE, compare
from tests.runtime.harness import Processes
from tests.runtime.models import EXAMPLES

pytestmark = pytest.mark.distributed

# transformers computes norms and losses of Llama and Qwen in float32 whatever the model's dtype.
MODELS = {
    "llama": "float32", "llama_with_labels": "float32", "qwen3": "float32", "gpt2": "float64", "vit": "float64",
    "mlp": "float64", "resnet": "float64", "held": "float64",
}  # fmt: skip
ON_TWO: dict[str, dict[str, Any]] = {
    "replicated, two micro-batches": {"dp_replicate": 2, "micro_batches": 2},
    "zero 1": {"dp_shard": 2, "zero": 1, "micro_batches": 2},
    "zero 2": {"dp_shard": 2, "zero": 2, "micro_batches": 2},
    "zero 3": {"dp_shard": 2, "zero": 3, "micro_batches": 2},
    "zero 3, full recomputation": {"dp_shard": 2, "zero": 3, "recompute": "full"},
    "selective recomputation": {"dp_replicate": 2, "recompute": "selective"},
    "tensor parallel": {"tp": 2, "micro_batches": 2},
    "tensor parallel, full recomputation": {"tp": 2, "recompute": "full"},
    "sequence parallel": {"tp": 2, "sequence_parallel": True, "micro_batches": 2},
    "sequence parallel, operators recomputed": {"tp": 2, "sequence_parallel": True, "recompute": "operators"},
}
ON_FOUR: dict[str, dict[str, Any]] = {
    "hybrid, zero 3": {"dp_replicate": 2, "dp_shard": 2, "zero": 3, "micro_batches": 2},
    "hybrid, zero 1": {"dp_replicate": 2, "dp_shard": 2, "zero": 1, "micro_batches": 2},
    "tensor parallel and zero 3": {"dp_shard": 2, "tp": 2, "zero": 3, "sequence_parallel": True},
    "tensor parallel and zero 2": {"dp_shard": 2, "tp": 2, "zero": 2, "micro_batches": 2, "recompute": "operators"},
    "tensor parallel, replicated": {"dp_replicate": 2, "tp": 2, "sequence_parallel": True, "micro_batches": 2},
    "tensor parallel outermost": {
        "dp_shard": 2, "tp": 2, "zero": 3, "recompute": "selective",
        "order": ("tp", "dp_shard", "pp", "cp", "dp_replicate"),
    },
}  # fmt: skip


def _check(gloo: Processes, ranks: int, model: str, options: dict[str, Any], dtype: str) -> None:
    found = gloo.run(ranks, compare, name=model, options=options, dtype=dtype)[0]
    limit = TOLERANCE[getattr(torch, dtype)]
    assert found.loss <= limit, found
    assert found.gradient <= limit, found


@pytest.mark.sweep(10)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("options", ON_TWO.values(), ids=ON_TWO.keys())
def test_two_ranks_give_the_gradients_of_one(gloo: Processes, model: str, options: dict[str, Any]) -> None:
    _check(gloo, 2, model, options, MODELS[model])


@pytest.mark.parametrize("options", [{"dp_replicate": 2}, {"dp_shard": 2, "zero": 3}, {"tp": 2}], ids=str)
def test_complex_numbers_are_trained_like_others(gloo: Processes, options: dict[str, Any]) -> None:
    _check(gloo, 2, "spectral", {"micro_batches": 2, **options}, "float64")


@pytest.mark.parametrize(
    "options",
    [{"dp_replicate": 2}, *({"dp_shard": 2, "zero": zero} for zero in (1, 2, 3)), {"tp": 2}],
    ids=str,
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_recurrent_layers_are_trained_like_others(
    gloo: Processes, options: dict[str, Any], recompute: str
) -> None:
    _check(gloo, 2, "recurrent", {"micro_batches": 2, "recompute": recompute, **options}, "float64")


def test_operators_without_a_rule_run_on_whole_tensors(gloo: Processes) -> None:
    _check(gloo, 2, "without_rules", {"tp": 2, "recompute": "full", "micro_batches": 2}, "float64")


def test_blocks_of_which_other_code_runs_a_part_are_gathered_with_that_code(gloo: Processes) -> None:
    example = EXAMPLES["entering"](2)
    assert entered_blocks(capture(example.module, example.inputs, name="entering")) == set(example.entered)
    _check(
        gloo, 2, "entering", {"dp_shard": 2, "zero": 3, "recompute": "full", "micro_batches": 2}, "float64"
    )


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_unfused_attention_is_recomputed_unfused(gloo: Processes, recompute: str) -> None:
    _check(gloo, 2, "llama", {"tp": 2, "attention": "unfused", "recompute": recompute}, "float32")


@pytest.mark.sweep(6)
@pytest.mark.parametrize("model", ["llama", "gpt2"])  # every model: the strategies that are drawn
@pytest.mark.parametrize("options", ON_FOUR.values(), ids=ON_FOUR.keys())
def test_four_ranks_give_the_gradients_of_one(gloo: Processes, model: str, options: dict[str, Any]) -> None:
    _check(gloo, 4, model, options, MODELS[model])
