"""Hand-built programs: blocks of one GEMM and one collective, for tests of the simulator."""

from __future__ import annotations

from dataclasses import replace

from autoparallel.costmodel.graph import OpKind
from autoparallel.costmodel.program import (
    Action,
    Axis,
    BlockWork,
    Collective,
    CollectiveOp,
    Kernel,
    Program,
    StageWork,
)
from autoparallel.costmodel.stage_cost import StageCost, phase

MEBI = 2**20


def gemm(tokens: int = 4096, size: int = 4096, *, backward: bool = False) -> Kernel:
    """A square linear layer over `tokens` rows."""
    return Kernel(
        kind=OpKind.GEMM,
        dtype="bf16",
        flops=2 * tokens * size * size,
        bytes_moved=2 * (2 * tokens * size + size * size),
        product=(1, tokens, size, size),
        backward=backward,
    )


def toy_block(name: str = "block", **changes: object) -> BlockWork:
    """Forward of one GEMM, backward of two; 64 MiB saved; changed as asked."""
    block = BlockWork(
        name=name,
        forward=(gemm(),),
        backward_input=(gemm(backward=True),),
        backward_weight=(gemm(backward=True),),
        saved_bytes=64 * MEBI,
        forward_temp_bytes=8 * MEBI,
        backward_temp_bytes=16 * MEBI,
        parameters=4096 * 4096,
        trainable=4096 * 4096,
    )
    return replace(block, **changes)  # type: ignore[arg-type]


def toy_stage(
    blocks: tuple[tuple[BlockWork, int], ...], *, last: bool = False, **changes: object
) -> StageWork:
    """A stage of these blocks that sends 32 MiB on, with parameters, gradients and state to match."""
    parameters = sum(block.parameters * count for block, count in blocks)
    stage = StageWork(
        blocks=blocks,
        send=None
        if last
        else Collective(op=CollectiveOp.SEND, axes=("pp",), size_bytes=32 * MEBI, label="pp"),
        optimizer=(
            Kernel(kind="optimizer", dtype="float32", flops=10 * parameters, bytes_moved=30 * parameters),
        ),
        after_step=(),
        parameter_bytes=2 * parameters,
        gradient_bytes=4 * parameters,
        optimizer_bytes=12 * parameters,
        buffer_bytes=0,
    )
    return replace(stage, **changes)  # type: ignore[arg-type]


def toy_program(
    ranks: tuple[tuple[Action, ...], ...],
    stages: tuple[StageWork, ...],
    micro_batches: int,
    *,
    axes: tuple[Axis, ...] | None = None,
    **changes: object,
) -> Program:
    """A program on a mesh of pp alone, unless told otherwise."""
    program = Program(
        ranks=ranks,
        stages=stages,
        axes=axes if axes is not None else (Axis(name="pp", size=len(ranks), stride=1),),
        micro_batches=micro_batches,
        dtype="bf16",
        overlap=True,
        model_flops=10**15,
        tokens=4096 * micro_batches,
    )
    return replace(program, **changes)  # type: ignore[arg-type]


def stage_cost(
    forward_s: float,
    backward_input_s: float,
    backward_weight_s: float = 0.0,
    *,
    send_s: float = 0.0,
    step_s: float = 0.0,
    reduce_s: float = 0.0,
    tied_s: float = 0.0,
) -> StageCost:
    """Costs in bare seconds."""
    whole = phase({"backward": backward_input_s + backward_weight_s})
    weight = phase({"backward": backward_weight_s})
    return StageCost(
        forward=phase({"forward": forward_s}),
        backward=whole,
        backward_input=phase({"backward": backward_input_s}),
        backward_weight=weight,
        last_backward=whole,
        last_backward_weight=weight,
        step=phase({"optimizer": step_s}),
        send_s=send_s,
        reduce_s=reduce_s,
        reduce_after_weight_s=reduce_s,
        tied_s=tied_s,
    )
