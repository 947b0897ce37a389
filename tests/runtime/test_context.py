"""Context parallelism: shares of the sequence give the losses and gradients of one process, whatever the code does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoparallel.costmodel.program import CollectiveOp
from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Pipeline, Shard, Strategy
from autoparallel.runtime.check.dryrun import dry_run
from autoparallel.runtime.check.messages import Message
from autoparallel.runtime.start import parallelize
from tests.runtime.compare import TOLERANCE, Difference, compare
from tests.runtime.harness import Processes
from tests.runtime.models import EXAMPLES, LENGTH, VOCABULARY
from tests.runtime.pipelines import Found, run_pipeline
from tests.runtime.sequences import SEQUENCES, WIDTH
from tests.runtime.shared import no_program

pytestmark = pytest.mark.distributed
EXAMPLES.update(SEQUENCES)

# (model, dtype, options) by number of ranks; transformers computes norms and losses of Llama and Qwen in float32.
ON_TWO: list[tuple[str, str, dict[str, Any]]] = [
    ("llama_with_labels", "float32", {"zero": 3, "recompute": "full", "micro_batches": 2}),
    ("qwen3", "float32", {"zero": 2, "recompute": "operators", "micro_batches": 2}),
    ("gpt2", "float64", {"attention": "unfused", "recompute": "full", "zero": 1, "micro_batches": 2}),
    ("eager_llama", "float32", {}),
    ("bert_with_labels", "float64", {"zero": 1}),
    ("odd", "float64", {"recompute": "full"}),
    ("listed", "float64", {}),
    ("listed", "float64", {"cp": 1, "tp": 2, "recompute": "full"}),
]
ON_FOUR: list[tuple[str, str, dict[str, Any]]] = [
    ("own", "float64", {"cp": 4, "zero": 3, "recompute": "operators", "micro_batches": 2}),
    ("odd", "float64", {"cp": 2, "dp_replicate": 2, "zero": 2}),
    (
        "bert_with_labels", "float64",
        {"cp": 2, "dp_shard": 2, "zero": 1, "order": ("cp", "pp", "dp_shard", "tp", "dp_replicate")},
    ),
    ("gpt2", "float64", {"cp": 2, "tp": 2, "zero": 3, "sequence_parallel": True, "recompute": "operators"}),
]  # fmt: skip
# Backward passes in two halves: causal attention and not, weights that are put off and (of convolutions) that are not.
IN_TWO, IN_A_V = {"stage_blocks": (2, 2)}, {"virtual_stages": 2, "stage_blocks": (1, 1, 1, 1)}
IN_HALVES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("gpt2", "float64", {"schedule": "zbv", **IN_A_V}, {"micro_batches": 3}),
    ("llama_with_labels", "float32", {"schedule": "zb1p", **IN_TWO}, {"zero": 2, "recompute": "full", "micro_batches": 2}),
    ("bert_with_labels", "float64", {"schedule": "dualpipev", **IN_A_V}, {"zero": 1, "micro_batches": 4}),
    ("odd", "float64", {"schedule": "zb1p", **IN_TWO}, {"zero": 3, "micro_batches": 2}),
]  # fmt: skip


def _piped(rank: int, world_size: int, **case: Any) -> Found | None:
    """As `_compared`, of `run_pipeline`."""
    return run_pipeline(rank, world_size, **case)


def _compared(rank: int, world_size: int, **case: Any) -> Difference | None:
    """`compare`, from a module that knows the models of sequences."""
    return compare(rank, world_size, **case)


def _check(gloo: Processes, ranks: int, name: str, dtype: str, options: dict[str, Any]) -> None:
    found = gloo.run(ranks, _compared, name=name, options=options, dtype=dtype)[0]
    limit = TOLERANCE[getattr(torch, dtype)]
    assert found.loss <= limit, found
    assert found.gradient <= limit, found


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("name", "dtype", "options"), ON_TWO)
def test_two_shares_of_the_sequence_give_the_gradients_of_one_process(
    gloo: Processes, name: str, dtype: str, options: dict[str, Any]
) -> None:
    _check(gloo, 2, name, dtype, {"cp": 2, **options})


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("name", "dtype", "options"), ON_FOUR)
def test_shares_beside_other_axes_give_the_gradients_of_one_process(
    gloo: Processes, name: str, dtype: str, options: dict[str, Any]
) -> None:
    _check(gloo, 4, name, dtype, options)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("name", "dtype", "pipeline", "options"), IN_HALVES)
def test_split_backwards_of_shares_give_the_gradients_of_one_process(
    gloo: Processes, name: str, dtype: str, pipeline: dict[str, Any], options: dict[str, Any]
) -> None:
    options = {"pp": 2, "cp": 2, **options}
    found = gloo.run(4, _piped, name=name, pipeline=pipeline, options=options, dtype=dtype)[0]
    assert max(found.loss, found.gradient, found.norm, found.state) <= TOLERANCE[getattr(torch, dtype)], found
    assert not found.missing, found


class _Dropped(nn.Module):
    """What dropout leaves of ones that are a sequence, and of ones that every rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        dropped = F.dropout(torch.ones_like(self.tokens(ids)))
        return dropped, F.dropout(torch.ones(4, WIDTH))


def _dropout(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rank)
    strategy = Strategy(batch=Batch(global_=2, micro=2), mesh=Mesh(cp=2))
    model = parallelize(_Dropped(), None, strategy, blocks=(), program=no_program)
    sequence, whole = model(torch.zeros(2, LENGTH, dtype=torch.int64))
    return sequence.detach(), whole


def test_shares_are_dropped_differently_and_what_is_whole_alike(gloo: Processes) -> None:
    (sequence, whole), other = gloo.run(2, _dropout)
    assert torch.equal(sequence, other[0])
    assert torch.equal(whole, other[1])
    first, second = sequence.chunk(2, dim=1)
    assert not torch.equal(first, second)
    assert 0.3 < (sequence == 0).double().mean() < 0.7


def test_what_runs_on_shares_is_sent_as_is_priced_in_a_dry_run() -> None:
    with torch.device("meta"):
        example = EXAMPLES["gpt2"](2)
    strategy = Strategy(
        batch=Batch(global_=4, micro=2), mesh=Mesh(cp=2, dp_shard=2), shard=Shard(zero=3),
        pipeline=Pipeline(stage_blocks=(2,)), execution=Execution(dtype="fp32", param_dtype="fp32", kernels="eager"),
    )  # fmt: skip
    (stage,) = dry_run(example.module, example.inputs, strategy, blocks=example.blocks)
    key = 2 * LENGTH * WIDTH * 4  # bytes of a key of two samples
    for op in (CollectiveOp.ALL_GATHER, CollectiveOp.REDUCE_SCATTER):
        assert stage.traffic[Message(op=op, axis="cp", size_bytes=key)] == 4
    assert any(message.axis == "dp_shard x cp" for message in stage.traffic), (
        "parameters are sharded over both"
    )
