"""What data parallelism adds to local work: ZeRO, gradient reduction, optimizer state and its step."""

from __future__ import annotations

from autoparallel.costmodel.graph import ITEM_BYTES
from autoparallel.costmodel.program import BlockWork, Collective, CollectiveOp, Kernel
from autoparallel.planner.expand.local import TENSOR_DTYPE
from autoparallel.planner.strategy.types import Execution, Strategy

FP32_BYTES = 4
# fp32 numbers of optimizer state per parameter. Kind: formula. Source: torch.optim's state (Adam, AdamW:
# exp_avg and exp_avg_sq; SGD: momentum_buffer). Adafactor factors the second moment of a matrix into a row and
# a column: next to nothing per parameter.
STATES = {"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1, "adafactor": 0}
# FLOPs per parameter of one update. Kind: formula, the operations of torch's fused kernels counted.
UPDATE_FLOPS = {"adamw": 14, "adam": 12, "sgd": 2, "sgd-momentum": 4, "adafactor": 10}


def dtype_bytes(dtype: str) -> int:
    """Bytes of a parameter or gradient in one of the strategy's dtype names."""
    return ITEM_BYTES[TENSOR_DTYPE[dtype]]


def keeps_master(execution: Execution) -> bool:
    """Whether the optimizer holds an fp32 copy of the parameters."""
    return execution.master_weights and dtype_bytes(execution.param_dtype) < FP32_BYTES


def optimizer_bytes_per_parameter(execution: Execution) -> int:
    """Optimizer state and master copy, bytes per trainable parameter."""
    return FP32_BYTES * (STATES[execution.optimizer] + keeps_master(execution))


def shard_axes(strategy: Strategy) -> tuple[str, ...]:
    """Axes that ZeRO shards over."""
    return tuple(a for a in ("dp_shard", "cp") if getattr(strategy.mesh, a) > 1)


def shard_ranks(strategy: Strategy) -> int:
    """Ranks that ZeRO shards over."""
    return strategy.mesh.dp_shard * strategy.mesh.cp


def zero_level(strategy: Strategy) -> int:
    """The level that has an effect: with one rank to shard over every level is 0."""
    return strategy.shard.zero if shard_ranks(strategy) > 1 else 0


def share(count: int, ranks: int) -> int:
    """What one of `ranks` holds of `count`: rounded up, as padding is held too."""
    return -(-count // ranks)


def gather_of(work: BlockWork, strategy: Strategy) -> Collective | None:
    """ZeRO-3: the block's parameters, in the dtype they are computed with."""
    if zero_level(strategy) < 3 or not work.parameters:
        return None
    execution = strategy.execution
    item = min(dtype_bytes(execution.param_dtype), ITEM_BYTES[TENSOR_DTYPE[execution.dtype]])
    return Collective(
        op=CollectiveOp.ALL_GATHER, axes=shard_axes(strategy), size_bytes=work.parameters * item, label="dp"
    )


def reduction_of(trainable: int, strategy: Strategy) -> tuple[Collective, ...]:
    """Gradient synchronisation of `trainable` parameters over every rank that saw other tokens.

    ZeRO-0 all-reduces over all of them. ZeRO-1 to 3 reduce-scatter over the sharding axes, then all-reduce the
    shard over the replicas.
    """
    mesh, sync = strategy.mesh, strategy.grad_sync
    size = trainable * dtype_bytes(strategy.execution.grad_dtype)
    if not trainable:
        return ()

    def collective(op: CollectiveOp, axes: tuple[str, ...], size_bytes: int) -> Collective:
        return Collective(
            op=op, axes=axes, size_bytes=size_bytes, algorithm=sync.algorithm, compression=sync.compression,
            label="dp", item_bytes=dtype_bytes(strategy.execution.grad_dtype),
        )  # fmt: skip

    if zero_level(strategy) == 0:
        axes = tuple(a for a in ("dp_replicate", "dp_shard", "cp") if getattr(mesh, a) > 1)
        return (collective(CollectiveOp.ALL_REDUCE, axes, size),) if axes else ()
    found = [collective(CollectiveOp.REDUCE_SCATTER, shard_axes(strategy), size)]
    if mesh.dp_replicate > 1:
        shard = share(size, shard_ranks(strategy))
        found.append(collective(CollectiveOp.ALL_REDUCE, ("dp_replicate",), shard))
    return tuple(found)


def updated_gather(parameters: int, strategy: Strategy) -> tuple[Collective, ...]:
    """ZeRO-1/2: updated parameters return to every rank of the sharding group."""
    if zero_level(strategy) not in (1, 2) or not parameters:
        return ()
    size = parameters * dtype_bytes(strategy.execution.param_dtype)
    return (Collective(op=CollectiveOp.ALL_GATHER, axes=shard_axes(strategy), size_bytes=size, label="dp"),)


def optimizer_kernel(trainable: int, strategy: Strategy) -> tuple[Kernel, ...]:
    """One fused update: reads the gradient, reads and writes state and master copy, writes the parameter."""
    execution = strategy.execution
    count = share(trainable, shard_ranks(strategy) if zero_level(strategy) else 1)
    if not count:
        return ()
    parameter = dtype_bytes(execution.param_dtype)
    moved = dtype_bytes(execution.grad_dtype) + 2 * optimizer_bytes_per_parameter(execution)
    moved += parameter if keeps_master(execution) else 2 * parameter
    return (
        Kernel(
            kind="optimizer", dtype="fp32", flops=count * UPDATE_FLOPS[execution.optimizer],
            bytes_moved=count * moved,
        ),
    )  # fmt: skip


def state_bytes(parameters: int, trainable: int, strategy: Strategy) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state on one device, after ZeRO."""
    execution, zero, ranks = strategy.execution, zero_level(strategy), shard_ranks(strategy)
    held = share(parameters, ranks) if zero == 3 else parameters
    graded = share(trainable, ranks) if zero >= 2 else trainable
    stepped = share(trainable, ranks) if zero >= 1 else trainable
    on_device = 1.0 - strategy.offload.optimizer
    return (
        held * dtype_bytes(execution.param_dtype),
        graded * dtype_bytes(execution.grad_dtype),
        round(stepped * optimizer_bytes_per_parameter(execution) * on_device),
    )


def accumulation_kernel(work: BlockWork, strategy: Strategy) -> tuple[Kernel, ...]:
    """Adds a micro-batch's gradients to the sum, where the weight gradient's product does not do it itself.

    Fused kernels (Megatron's gradient accumulation fusion) write into the sum. Eager and compiled add when
    there are several micro-batches, or when the sum has another dtype.
    """
    execution = strategy.execution
    produced = ITEM_BYTES[TENSOR_DTYPE[execution.dtype]]
    summed = dtype_bytes(execution.grad_dtype)
    if execution.kernels == "fused" or not work.trainable:
        return ()
    if strategy.micro_batches == 1 and produced == summed:
        return ()
    moved = work.trainable * (produced + 2 * summed)
    return (Kernel(kind="elementwise", dtype="fp32", flops=work.trainable, bytes_moved=moved, backward=True),)
