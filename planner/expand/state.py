"""What data parallelism adds to local work: ZeRO, gradient reduction, optimizer state and its step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autoparallel.costmodel.compression import residual_bytes
from autoparallel.costmodel.graph import ITEM_BYTES
from autoparallel.costmodel.kernels import PER_TENSOR
from autoparallel.costmodel.program import BlockWork, Collective, CollectiveOp, Kernel
from autoparallel.planner.expand.axes import EXPERT_SHARD, SECONDARY
from autoparallel.planner.expand.local import TENSOR_DTYPE
from autoparallel.planner.expand.offload import host_copy
from autoparallel.planner.strategy.types import Execution, Strategy

FP32_BYTES = 4
MOST_LEVELS = 8  # of a network; a method for those that are not there says nothing
MIB = 2**20
# Numbers of optimizer state per parameter. Kind: formula. Source: torch.optim's state (Adam, AdamW:
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
    """Optimizer state and master copy, bytes per trainable parameter. The state has the dtype of what is updated: the
    master copy, else the parameter."""
    if keeps_master(execution):
        return FP32_BYTES * (STATES[execution.optimizer] + 1)
    return dtype_bytes(execution.param_dtype) * STATES[execution.optimizer]


def shard_axes(strategy: Strategy) -> tuple[str, ...]:
    """Axes that ZeRO shards over."""
    return tuple(a for a in ("dp_shard", "cp") if getattr(strategy.mesh, a) > 1)


def shard_ranks(strategy: Strategy) -> int:
    """Ranks that ZeRO shards over."""
    return strategy.mesh.dp_shard * strategy.mesh.cp


def zero_level(strategy: Strategy) -> int:
    """The level that has an effect: with one rank to shard over every level is 0."""
    return strategy.shard.zero if shard_ranks(strategy) > 1 else 0


def gradient_level(strategy: Strategy) -> int:
    """The level by which gradients are kept: FSDP2 reduces those of a step's only micro-batch at once."""
    zero = zero_level(strategy)
    return 2 if strategy.execution.fsdp2 and zero == 1 and strategy.micro_batches == 1 else zero


def keeps_shards(strategy: Strategy, shards: Shards) -> bool:
    """Whether a rank's share of the parameters stands beside the whole ones, which are gathered in the dtype of compute."""
    return strategy.execution.fsdp2 and shards.zero in (1, 2)


def bytes_per_parameter(strategy: Strategy, shards: Shards) -> float:
    """Held of a parameter on one device all through a step."""
    whole = dtype_bytes(strategy.execution.param_dtype)
    if keeps_shards(strategy, shards):
        return whole / shards.ranks + computed_bytes(strategy)
    if shards.zero < 3:
        return whole
    return whole / shards.ranks + (computed_bytes(strategy) / shards.secondary if shards.secondary else 0.0)


def bytes_per_gradient(strategy: Strategy, shards: Shards) -> float:
    """Held of the gradient of a parameter on one device all through a step. Beside FSDP2's whole gradients stands the buffer
    of shares, where there is one: for replicas, or for another dtype than the parameters'."""
    execution = strategy.execution
    item = dtype_bytes(execution.grad_dtype)
    level = min(gradient_level(strategy), 2) if shards.zero else 0
    if level == 2:
        return item / shards.ranks
    beside = level == 1 and execution.fsdp2 and keeps_share_of_gradients(strategy)
    return item * (1.0 + (1.0 / shards.ranks if beside else 0.0))


def keeps_share_of_gradients(strategy: Strategy) -> bool:
    """Whether FSDP2's shares of gradients have a buffer of their own, and are not what is reduced to: for replicas, or for another
    dtype than the parameters'."""
    execution = strategy.execution
    return strategy.mesh.dp_replicate > 1 or execution.param_dtype != execution.grad_dtype


def starts_without_gradients(strategy: Strategy) -> bool:
    """Whether what the first micro-batch makes is the sum of gradients: not where they are added to buffers, over replicas or in
    another dtype than the parameters'."""
    execution = strategy.execution
    if not execution.fsdp2 or execution.param_dtype != execution.grad_dtype:
        return False
    return strategy.mesh.dp_replicate == 1 and (zero_level(strategy) > 0 or not shard_axes(strategy))


def makes_gradients(strategy: Strategy) -> bool:
    """Whether gradients are there only when they have been made: in a step's only micro-batch that starts without."""
    return strategy.micro_batches == 1 and starts_without_gradients(strategy)


def made_per_gradient(strategy: Strategy, shards: Shards) -> float:
    """Of `bytes_per_gradient` what is there only once it is made."""
    return bytes_per_gradient(strategy, shards) if makes_gradients(strategy) else 0.0


def passing_per_parameter(strategy: Strategy, shards: Shards) -> int:
    """Of a unit's parameter what comes with its forward and goes with its backward: FSDP2 has it whole in the dtype of compute
    from a step's first micro-batch to its last, which here is one."""
    if strategy.micro_batches > 1 or not strategy.execution.fsdp2:
        return 0
    gathered = keeps_shards(strategy, shards) or casts_parameters(strategy)
    return computed_bytes(strategy) if gathered else 0


def adds_at_once(strategy: Strategy) -> bool:
    """Whether autograd adds a micro-batch's gradients to whole ones that FSDP2 will reduce when the step ends (ZeRO-1): where the dtypes
    of compute and of gradients are one."""
    execution = strategy.execution
    summed = execution.fsdp2 and zero_level(strategy) and gradient_level(strategy) < 2
    return bool(summed) and computed_bytes(strategy) == dtype_bytes(execution.grad_dtype)


def tied_gradient_bytes(execution: Execution) -> int:
    """Of a number of a tied tensor's gradient between the pipeline ranks that hold it: `auto_parallelize` adds up when the step
    ends, what then has the parameter's dtype."""
    return dtype_bytes(execution.param_dtype if execution.fsdp2 else execution.grad_dtype)


def waiting_gradient_bytes(strategy: Strategy) -> int:
    """Of a number of a tied tensor's gradient while it waits for that of the tensor's first use, to which autograd adds it.
    Kernels that write into the sum make none; those of a root unit are counted there (`units.as_unit`); and the only
    micro-batch of a step without replicas has no sum beside it yet, which is counted unless gradients are when they are made."""
    execution = strategy.execution
    if execution.kernels == "fused" or (execution.fsdp2 and zero_level(strategy)):
        return computed_bytes(strategy) if execution.kernels != "fused" and adds_at_once(strategy) else 0
    if strategy.micro_batches == 1 and not dense_shards(strategy).summed and not makes_gradients(strategy):
        return 0
    return computed_bytes(strategy)


def share(count: int, ranks: int) -> int:
    """What one of `ranks` holds of `count`: rounded up, as padding is held too."""
    return -(-count // ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Where ZeRO keeps one kind of parameters: its level, the axes and number of ranks that it shards over,
    the axes over which the level 0 sums gradients, and the ranks that share a second copy (0: there is none)."""

    zero: int
    axes: tuple[str, ...]
    ranks: int
    summed: tuple[str, ...]
    secondary: int = 0

    @property
    def in_backward(self) -> Shards:
        """Where a backward pass gathers parameters from."""
        return replace(self, axes=(SECONDARY,), ranks=self.secondary) if self.secondary else self


def dense_shards(strategy: Strategy) -> Shards:
    """Parameters that all ranks of dp_shard * cp hold alike."""
    summed = tuple(a for a in ("dp_replicate", "dp_shard", "cp") if getattr(strategy.mesh, a) > 1)
    return Shards(
        zero=zero_level(strategy), axes=shard_axes(strategy), ranks=shard_ranks(strategy), summed=summed,
        secondary=strategy.shard.secondary,
    )  # fmt: skip


def expert_shards(strategy: Strategy) -> Shards:
    """Experts under mesh.ep > 1: dp_shard * cp * tp / ep ranks hold the same ones. To FSDP2 one rank that holds them alone is a unit as
    well where it casts them (`runtime/gradients/fsdp.py`)."""
    mesh = strategy.mesh
    ranks = mesh.dp_shard * mesh.cp * mesh.tp // mesh.ep
    axes = (EXPERT_SHARD,) if ranks > 1 else ()
    replicas = ("dp_replicate",) if mesh.dp_replicate > 1 else ()
    execution = strategy.execution
    casts = execution.fsdp2 and computed_bytes(strategy) < dtype_bytes(execution.param_dtype)
    return Shards(
        zero=zero_level(strategy) if ranks > 1 or casts else 0,
        axes=axes,
        ranks=ranks,
        summed=(*replicas, *axes),
    )


def computed_bytes(strategy: Strategy) -> int:
    """Bytes of a parameter in the dtype that it is computed with."""
    return item_bytes(strategy.execution)


def item_bytes(execution: Execution) -> int:
    """As `computed_bytes`."""
    return min(dtype_bytes(execution.param_dtype), ITEM_BYTES[TENSOR_DTYPE[execution.dtype]])


def reduction_of(trainable: int, strategy: Strategy, experts: int = 0) -> tuple[Collective, ...]:
    """Gradient synchronisation of `trainable` parameters, `experts` of them experts', over every rank that saw
    other tokens.

    ZeRO-0 all-reduces over all of them. ZeRO-1 to 3 reduce-scatter over the sharding axes, then all-reduce the
    shard over the replicas.
    """
    return (
        *_reduction(trainable - experts, dense_shards(strategy), strategy),
        *(_reduction(experts, expert_shards(strategy), strategy) if experts else ()),
    )


def _reduction(
    trainable: int, shards: Shards, strategy: Strategy, *, at_end: bool = False
) -> tuple[Collective, ...]:
    sync = strategy.grad_sync
    size = trainable * dtype_bytes(strategy.execution.grad_dtype)
    if not trainable:
        return ()

    def collective(op: CollectiveOp, axes: tuple[str, ...], size_bytes: int) -> Collective:
        return Collective(
            op=op, axes=axes, size_bytes=size_bytes, algorithm=sync.algorithm, compression=sync.compression,
            label="dp", item_bytes=dtype_bytes(strategy.execution.grad_dtype),
        )  # fmt: skip

    if shards.zero == 0:
        return (collective(CollectiveOp.ALL_REDUCE, shards.summed, size),) if shards.summed else ()
    scatter = collective(CollectiveOp.REDUCE_SCATTER, shards.axes, size)
    if strategy.mesh.dp_replicate == 1 or (replicas_at_end(strategy) and not at_end):
        return (scatter,)
    replicas = collective(CollectiveOp.ALL_REDUCE, ("dp_replicate",), share(size, shards.ranks))
    return (replicas,) if at_end else (scatter, replicas)


def replicas_at_end(strategy: Strategy) -> bool:
    """Whether shards of gradients that arrive with every micro-batch are summed over the replicas once a step."""
    several = gradient_level(strategy) >= 2 and strategy.micro_batches > 1
    return strategy.execution.fsdp2 and several and strategy.mesh.dp_replicate > 1


def replica_reduction(trainable: int, strategy: Strategy, experts: int = 0) -> tuple[Collective, ...]:
    """The sum over the replicas that is due when the last micro-batch is done, where `replicas_at_end`."""
    if not replicas_at_end(strategy):
        return ()
    kinds = ((trainable - experts, dense_shards(strategy)), (experts, expert_shards(strategy)))
    return tuple(
        c for n, shards in kinds if shards.zero for c in _reduction(n, shards, strategy, at_end=True)
    )


def updates_per_parameter(strategy: Strategy) -> tuple[float, float]:
    """The share of a dense and of an expert's parameter that one rank updates."""
    dense, experts = (
        1.0 / shards.ranks if shards.zero else 1.0
        for shards in (dense_shards(strategy), expert_shards(strategy))
    )
    return dense, experts


def optimizer_kernel(trainable: int, strategy: Strategy, experts: int = 0) -> tuple[Kernel, ...]:
    """One fused update: reads the gradient, reads and writes state and master copy, writes the parameter. State
    on the host comes to the device and goes back, piece by piece, both ways at once."""
    kinds = ((trainable - experts, dense_shards(strategy)), (experts, expert_shards(strategy)))
    return update_kernels(sum(share(n, shards.ranks if shards.zero else 1) for n, shards in kinds), strategy)


def bytes_per_update(execution: Execution) -> int:
    """Read and written to update one parameter."""
    parameter = dtype_bytes(execution.param_dtype)
    moved = dtype_bytes(execution.grad_dtype) + 2 * optimizer_bytes_per_parameter(execution)
    return moved + (parameter if keeps_master(execution) else 2 * parameter)


def update_kernels(count: int, strategy: Strategy) -> tuple[Kernel, ...]:
    """The update of `count` parameters on this device."""
    execution = strategy.execution
    if not count:
        return ()
    update = Kernel(
        kind="optimizer", dtype="fp32", flops=count * UPDATE_FLOPS[execution.optimizer],
        bytes_moved=count * bytes_per_update(execution),
    )  # fmt: skip
    offloaded = round(count * optimizer_bytes_per_parameter(execution) * strategy.offload.optimizer)
    return (update, host_copy(offloaded, beside=False)) if offloaded else (update,)


def per_tensor_updates(tensors: int, strategy: Strategy) -> tuple[Kernel, ...]:
    """What an eager optimizer takes for each of its `tensors`, whatever their size."""
    if strategy.execution.kernels != "eager" or not tensors:
        return ()
    return (Kernel(kind=PER_TENSOR, dtype="fp32", flops=0, bytes_moved=0, count=tensors),)


def state_bytes(
    parameters: int, trainable: int, strategy: Strategy, experts: tuple[int, int] = (0, 0)
) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state on one device, after ZeRO; `experts` are the parameters
    and trainable ones among them that are experts'."""
    execution = strategy.execution
    kinds = (
        (parameters - experts[0], trainable - experts[1], dense_shards(strategy)),
        (*experts, expert_shards(strategy)),
    )
    held = sum(math.ceil(n * bytes_per_parameter(strategy, s)) for n, _, s in kinds)
    graded = sum(math.ceil(t * bytes_per_gradient(strategy, s)) for _, t, s in kinds)
    stepped = sum(share(t, s.ranks) if s.zero >= 1 else t for _, t, s in kinds)
    on_device = 1.0 - strategy.offload.optimizer
    return (
        held,
        graded,
        round(stepped * optimizer_bytes_per_parameter(execution) * on_device),
    )


def offloaded_state_bytes(trainable: int, strategy: Strategy, experts: int = 0) -> int:
    """Bytes of optimizer state that one device keeps on its host, after ZeRO; `experts` of the parameters are experts'."""
    kinds = ((trainable - experts, dense_shards(strategy)), (experts, expert_shards(strategy)))
    stepped = sum(share(t, s.ranks) if s.zero >= 1 else t for t, s in kinds)
    return round(stepped * optimizer_bytes_per_parameter(strategy.execution) * strategy.offload.optimizer)


def accumulation_kernel(work: BlockWork, strategy: Strategy) -> tuple[Kernel, ...]:
    """Adds a micro-batch's gradients to the sum, where the weight gradient's product does not do it itself.

    Fused kernels (Megatron's gradient accumulation fusion) write into the sum, but under `added_gradients`. Others add when
    there are several micro-batches, or when the sum has another dtype; ZeRO-2 and 3 their shard of it, which has been reduced.
    """
    execution = strategy.execution
    produced = ITEM_BYTES[TENSOR_DTYPE[execution.dtype]]
    summed = dtype_bytes(execution.grad_dtype)
    if (execution.kernels == "fused" and not execution.added_gradients) or not work.trainable:
        return ()
    if strategy.micro_batches == 1 and produced == summed:
        return ()
    kinds = (
        (work.trainable - work.expert_trainable, dense_shards(strategy)),
        (work.expert_trainable, expert_shards(strategy)),
    )
    added = sum(share(count, shards.ranks) if shards.zero >= 2 else count for count, shards in kinds)
    moved = added * (produced + 2 * summed)
    return (Kernel(kind="elementwise", dtype="fp32", flops=added, bytes_moved=moved, backward=True),)


def casts_parameters(strategy: Strategy) -> bool:
    """Whether a copy of the parameters in the dtype of compute stands beside them; gathered ones are in it already."""
    sharded = zero_level(strategy) >= (1 if strategy.execution.fsdp2 else 3)
    return computed_bytes(strategy) < dtype_bytes(strategy.execution.param_dtype) and not sharded


def stage_buffers(parameters: int, trainable: int, gradient_bytes: int, strategy: Strategy) -> int:
    """Buffers alive for the whole step: compressed copies of a bucket, what error feedback keeps, and parameters
    cast for compute."""
    execution, sync = strategy.execution, strategy.grad_sync
    found = 0
    if sync.compresses and strategy.mesh.data_parallel > 1:
        found += min(round(sync.bucket_mib * MIB), gradient_bytes)
        whole = trainable * dtype_bytes(execution.grad_dtype)
        found += max(residual_bytes(method, whole) for method in sync.compression)
    compute = ITEM_BYTES[TENSOR_DTYPE[execution.dtype]]
    if casts_parameters(strategy):
        found += parameters * compute
    return found
