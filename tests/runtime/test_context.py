"""Context parallelism: shares of the sequence give the losses and gradients of one process, whatever the code does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.runtime.compare import TOLERANCE, Difference, compare
from tests.runtime.harness import Processes
from tests.runtime.models import EXAMPLES
from tests.runtime.sequences import SEQUENCES

pytestmark = pytest.mark.distributed
EXAMPLES.update(SEQUENCES)

# (model, dtype, options) by number of ranks; transformers computes norms and losses of Llama and Qwen in float32.
ON_TWO: list[tuple[str, str, dict[str, Any]]] = [
    ("llama_with_labels", "float32", {"zero": 3, "recompute": "full", "micro_batches": 2}),
    ("qwen3", "float32", {"zero": 2, "recompute": "selective", "micro_batches": 2}),
    ("gpt2", "float64", {"attention": "unfused", "recompute": "full", "zero": 1, "micro_batches": 2}),
    ("eager_llama", "float32", {}),
    ("bert", "float64", {"recompute": "full"}),
    ("bert_with_labels", "float64", {"zero": 1}),
    ("own", "float64", {"recompute": "selective"}),
    ("odd", "float64", {"recompute": "full"}),
]
ON_FOUR: list[tuple[str, str, dict[str, Any]]] = [
    ("own", "float64", {"cp": 4, "zero": 3, "recompute": "selective", "micro_batches": 2}),
    ("odd", "float64", {"cp": 2, "dp_replicate": 2, "zero": 2}),
    (
        "bert_with_labels", "float64",
        {"cp": 2, "dp_shard": 2, "zero": 1, "order": ("cp", "pp", "dp_shard", "tp", "dp_replicate")},
    ),
    ("gpt2", "float64", {"cp": 2, "tp": 2, "zero": 3, "sequence_parallel": True, "recompute": "full"}),
]  # fmt: skip


def _differences(
    rank: int, world_size: int, cases: list[tuple[str, str, dict[str, Any]]]
) -> list[Difference | None]:
    return [compare(rank, world_size, name, options, dtype) for name, dtype, options in cases]


def _check(gloo: Processes, ranks: int, cases: list[tuple[str, str, dict[str, Any]]]) -> None:
    for case, found in zip(cases, gloo.run(ranks, _differences, cases=cases)[0], strict=True):
        limit = TOLERANCE[getattr(torch, case[1])]
        assert found.loss <= limit, (case, found)
        assert found.gradient <= limit, (case, found)


def test_two_shares_of_the_sequence_give_the_gradients_of_one_process(gloo: Processes) -> None:
    _check(gloo, 2, [(name, dtype, {"cp": 2, **options}) for name, dtype, options in ON_TWO])


def test_shares_beside_data_parallelism_give_the_gradients_of_one_process(gloo: Processes) -> None:
    _check(gloo, 4, ON_FOUR)
