"""Which differences of a dry run are told, and of which module and action."""

from __future__ import annotations

from collections import Counter

from autoparallel.costmodel.program import (
    Action,
    ActionKind,
    BlockWork,
    Collective,
    CollectiveOp,
    Program,
    StageWork,
)
from autoparallel.dryrun import compare
from autoparallel.dryrun_findings import findings
from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Pipeline, Strategy
from autoparallel.runtime.check.dryrun import LoweredStage
from autoparallel.runtime.check.messages import Message, Place

STRATEGY = Strategy(
    batch=Batch(global_=2, micro=1), mesh=Mesh(pp=2, tp=2), execution=Execution(kernels="eager"),
    pipeline=Pipeline(schedule="1f1b", stage_blocks=(1, 1)),
)  # fmt: skip
SUM = Message(op=CollectiveOp.ALL_REDUCE, axis="tp", size_bytes=1000)
GATHER = Message(op=CollectiveOp.ALL_GATHER, axis="tp", size_bytes=1000)
SIZES = {"tp": 2, "pp": 2}


def program() -> Program:
    """Two stages of a block that adds up over tp once a forward pass, and nothing else."""
    step = Collective(op=CollectiveOp.ALL_REDUCE, axes=("tp",), size_bytes=1000)
    block = BlockWork(name="Block", forward=(step,), backward_input=(), backward_weight=())
    stage = StageWork(
        blocks=((block, 1),), send=None, optimizer=(), after_step=(), parameter_bytes=1000, gradient_bytes=1000,
        optimizer_bytes=2000, buffer_bytes=0,
    )  # fmt: skip
    return Program(
        ranks=tuple((Action(i, ActionKind.STEP),) for i in (0, 1)),
        stages=(stage, stage),
        axes=(),
        micro_batches=2,
        dtype="bf16",
        overlap=True,
    )


def lowered(*, optimizer: int = 2000, extra: int = 0) -> LoweredStage:
    places = {
        SUM: Counter({Place(action="F", module="layers.3.mlp"): 2}),
        GATHER: Counter({Place(action="B", module="layers.3.attention"): extra}),
    }
    return LoweredStage(
        parameter_bytes=1000, gathered_bytes=0, gradient_bytes=1000, optimizer_bytes=optimizer,
        traffic=Counter({SUM: 2, **({GATHER: extra} if extra else {})}), places=places,
    )  # fmt: skip


def found(*stages: LoweredStage) -> list[tuple[tuple[int, ...], str, str, str]]:
    ranks = compare(STRATEGY, program(), stages)
    told = findings(STRATEGY, program(), stages, ranks, SIZES)
    return [(one.ranks, one.what, one.action, one.module) for one in told]


def test_what_is_alike_is_not_told() -> None:
    assert found(lowered(), lowered()) == []
    assert found(lowered(optimizer=2110), lowered(optimizer=1890)) == []  # less than 3 % of a rank's memory


def test_memory_beyond_three_per_cent_is_told_once_for_ranks_alike() -> None:
    told = found(lowered(optimizer=2130), lowered(optimizer=2130))
    assert told == [((0, 1), "memory of optimizer state", "STEP", "all its parameters")]


def test_a_collective_that_was_not_priced_is_told_with_its_module_and_pass() -> None:
    told = found(lowered(), lowered(extra=4))
    assert told == [((1,), "bytes sent over tp", "B", "layers.*.attention")]


def test_a_collective_that_does_not_run_is_told_with_the_block_that_was_priced() -> None:
    none = LoweredStage(
        parameter_bytes=1000, gathered_bytes=0, gradient_bytes=1000, optimizer_bytes=2000, traffic=Counter()
    )
    assert found(none, lowered()) == [((0,), "bytes sent over tp", "F", "Block")]
