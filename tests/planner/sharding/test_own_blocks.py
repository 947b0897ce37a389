"""Layers as people write them are divided as Megatron divides its own: by heads, with one exchange each way for attention and MLP."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autoparallel.costmodel.program import BlockWork, Collective, CollectiveOp, Kernel, Step
from autoparallel.planner.capture import capture
from autoparallel.planner.capture.rules import Rules
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Pipeline, Shard, Strategy
from autoparallel.profiles.load import load_cluster
from tests.own_blocks import OWN_BLOCKS, OwnModel

LENGTH, HIDDEN, TP, ITEM_BYTES = 1024, 1024, 4, 2
needs_parts = pytest.mark.skipif(not Rules().knows_parts(), reason="torch 2.12 or newer")


def steps(work: BlockWork) -> tuple[Step, ...]:
    return (*work.forward, *work.backward_input, *work.backward_weight)


def flops(work: BlockWork) -> int:
    return sum(one.flops * one.count for one in steps(work) if isinstance(one, Kernel))


def exchanged(work: BlockWork) -> float:
    """Hidden states gathered, or reduced and scattered."""
    found = [one for one in steps(work) if isinstance(one, Collective)]
    size = sum(one.size_bytes * (1 + (one.op is CollectiveOp.ALL_REDUCE)) for one in found)
    return size / (LENGTH * HIDDEN * ITEM_BYTES)


@needs_parts
@pytest.mark.parametrize("layer", OWN_BLOCKS, ids=lambda layer: str(layer.__name__))
def test_own_layers_are_divided_by_heads_and_exchange_no_more_than_they_must(
    layer: Callable[[int, int], nn.Module],
) -> None:
    with torch.device("meta"):
        module, ids = OwnModel(layer, HIDDEN, 8, 1024).train(), torch.zeros((2, LENGTH), dtype=torch.long)
    expander = Expander(
        capture(module, {"input_ids": ids, "labels": ids}, name="own"), load_cluster("h100-sxm:1x8")
    )

    def work(tp: int, *, sequence: bool) -> BlockWork:
        strategy = Strategy(
            batch=Batch(global_=1, micro=1), mesh=Mesh(tp=tp), shard=Shard(sequence_parallel=sequence),
            pipeline=Pipeline(stage_blocks=(2,)), execution=Execution(kernels="eager"),
        )  # fmt: skip
        return expander.work(strategy, 1, "none")

    for sequence in (False, True):
        own = work(TP, sequence=sequence)
        assert flops(own) == pytest.approx(flops(work(1, sequence=False)) / TP, rel=0.02)
        assert exchanged(own) == OWN_BLOCKS[layer]
