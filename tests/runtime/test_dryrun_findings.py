"""Which differences of a dry run are told, and of which module and action."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

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
from autoparallel.dryrun_peak import peak_of
from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Pipeline, Shard, Strategy
from autoparallel.runtime.check.dryrun import LoweredStage
from autoparallel.runtime.check.live_bytes import Live
from autoparallel.runtime.check.messages import Message, Place, sent_bytes

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


def test_what_a_part_of_an_axis_sends_is_counted_by_its_own_size() -> None:
    assert sent_bytes(replace(SUM, ranks=2), {"tp": 8}) == sent_bytes(SUM, {"tp": 2})


def test_parameters_that_the_only_micro_batch_gathers_are_counted_once() -> None:
    """Its forward pass saw them come; in the backward pass they are there."""
    strategy = replace(
        STRATEGY, batch=Batch(global_=2, micro=1), mesh=Mesh(pp=2, dp_shard=2), shard=Shard(zero=1)
    )
    forward = Live(begin=0, kept=700, peak=800, module="f")  # 600 of them gathered
    for backward, most in ((50, 1200.0 + 800), (500, 1200.0 + 600 + 100 + 500)):
        live = {"F": forward, "B": Live(begin=0, kept=0, peak=backward, module="b")}
        stage = LoweredStage(
            parameter_bytes=200, gathered_bytes=600, gradient_bytes=0, optimizer_bytes=1000, traffic=Counter(), live=live,
        )  # fmt: skip
        row = (Action(0, ActionKind.FORWARD, 0), Action(0, ActionKind.BACKWARD, 0))
        found = peak_of(strategy, replace(program(), ranks=(row, row)), (stage, stage), 0, (0,))
        assert found is not None
        assert found.bytes == most


def test_tied_gradients_of_other_software_are_to_blame_on_the_stack() -> None:
    sent = Collective(op=CollectiveOp.SEND, axes=("pp",), size_bytes=400, label="pp")
    planned = program()
    planned = replace(planned, stages=tuple(replace(s, tied_reduce=(sent,)) for s in planned.stages))
    half = Counter({SUM: 2, Message(op=CollectiveOp.SEND, axis="pp", size_bytes=200): 1})
    made = (replace(lowered(), traffic=half),) * 2
    for fsdp2, words in ((False, "plan again with --runnable"), (True, "the price")):
        execution = replace(STRATEGY.execution, fsdp2=fsdp2)
        strategy = replace(STRATEGY, execution=execution)
        (one,) = findings(strategy, planned, made, compare(strategy, planned, made), SIZES)
        assert one.what == "bytes sent over pp"
        assert words in one.blame, one.text
