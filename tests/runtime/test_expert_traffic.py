"""What the program prices for experts on ranks of their own is what a step sends, and what a dry run says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from autoparallel.costmodel.program import CollectiveOp
from autoparallel.dryrun import compare
from autoparallel.planner.capture import capture
from autoparallel.planner.capture.load import keyword_inputs
from autoparallel.planner.expand.axes import EXPERT_SHARD, EXPERTS
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.score import completed
from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Pipeline, Shard, Strategy
from autoparallel.profiles import load_cluster
from autoparallel.runtime.check.dryrun import dry_run
from autoparallel.runtime.check.messages import Message, program_messages
from autoparallel.runtime.check.traffic import TrafficRecorder
from autoparallel.runtime.experts.modules import ExpertModule, expert_modules
from autoparallel.runtime.start import parallelize
from tests.runtime.expert_models import mixtral
from tests.runtime.harness import Processes
from tests.runtime.shared import no_program

SAMPLES, RANKS = 4, 4
STRATEGY = Strategy(
    batch=Batch(global_=SAMPLES, micro=1), mesh=Mesh(dp_shard=4, ep=2), shard=Shard(zero=3),
    pipeline=Pipeline(stage_blocks=(2,)),
    execution=Execution(dtype="fp32", param_dtype="fp32", master_weights=False, kernels="eager"),
)  # fmt: skip
# Torch's grouped product of tensors without values knows no other dtype.
BF16 = Execution(dtype="bf16", param_dtype="bf16", grad_dtype="bf16", kernels="eager")
OVER_TP = Mesh(dp_shard=2, tp=2, ep=2)


def _planned(strategy: Strategy) -> tuple[Expander, Strategy, tuple[ExpertModule, ...] | None]:
    example = mixtral(SAMPLES)
    graph = capture(example.module, keyword_inputs(example.module, example.inputs), name="mixtral")
    expander = Expander(graph, load_cluster(f"cpu-gloo:1x{RANKS}"))
    return expander, completed(expander, strategy), expert_modules(graph)


def _sent(rank: int, world_size: int, strategy: Strategy) -> Counter[Message]:
    example = mixtral(SAMPLES // strategy.mesh.data_parallel)
    model = parallelize(
        example.module, None, strategy, blocks=example.blocks, program=no_program, experts=example.experts
    )
    mesh = model._run.mesh
    axes = {mesh.expert_axis(axis).get_group().group_name: axis for axis in (EXPERTS, EXPERT_SHARD)}
    with TrafficRecorder(axes) as recorder:
        model.step(example.inputs, example.targets, loss_fn=example.loss_fn)
    return recorder.found


def _bytes(messages: Counter[Message], axis: str, op: CollectiveOp) -> int:
    return sum(m.size_bytes * count for m, count in messages.items() if m.axis == axis and m.op is op)


@pytest.mark.distributed
def test_a_step_sends_the_rows_and_the_experts_that_are_priced(gloo: Processes) -> None:
    expander, strategy, layers = _planned(STRATEGY)
    assert layers == mixtral(1).experts
    (priced,) = program_messages(expander.program(strategy))
    sent = gloo.run(RANKS, _sent, strategy=strategy)
    # Who receives how many rows is up to the router; all ranks together receive what they send.
    rows = sum(_bytes(found, EXPERTS, CollectiveOp.ALL_TO_ALL) for found in sent)
    assert rows == RANKS * _bytes(priced, EXPERTS, CollectiveOp.ALL_TO_ALL)
    for found in sent:
        for op in (CollectiveOp.ALL_GATHER, CollectiveOp.REDUCE_SCATTER):
            assert _bytes(found, EXPERT_SHARD, op) == _bytes(priced, EXPERT_SHARD, op), (op, found)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("mesh", [STRATEGY.mesh, OVER_TP])
def test_a_dry_run_shares_experts_and_sends_rows_as_priced(mesh: Mesh) -> None:
    expander, strategy, layers = _planned(replace(STRATEGY, mesh=mesh, execution=BF16))
    with torch.device("meta"):
        example = mixtral(1)
    lowered = dry_run(
        example.module, example.inputs, strategy, blocks=example.blocks, level_sizes=(RANKS,), experts=layers
    )
    (rank,) = compare(strategy, expander.program(strategy), lowered)
    for name in ("parameters", "optimizer"):
        pair = rank.held_bytes[name]
        assert pair.lowered == pytest.approx(pair.predicted, rel=0.01), (name, rank)
    for axis in (EXPERTS, EXPERT_SHARD):
        pair = rank.sent_bytes[axis]
        assert pair.lowered == pytest.approx(pair.predicted, rel=0.05), (axis, rank)
