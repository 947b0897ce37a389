"""What a device holds beside the live tensors of a program: the part of a measured peak that a strategy does not say.

Two things. A training framework allocates what a program of ours does not (`Beside`, read in its sources). And nvidia-smi
counts the process, not its tensors: the CUDA context, NCCL's buffers, and what the caching allocator has taken and cannot
use, for it never merges blocks of two segments (c10/cuda/CUDACachingAllocator.cpp). That is `reserve_bytes` of the device,
which the planner sets aside, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoparallel.costmodel.prediction import Prediction, StageMemory
from autoparallel.planner.expand import state
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles.hardware import Device
from benchmarks.models import Shape

HALF_BYTES, FP32_BYTES = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What a framework holds on each device, in bytes for each parameter of its pipeline rank but `bucket_elements`."""

    per_parameter: int = 0
    per_own_parameter: int = 0  # for each one that the rank updates: all of them, or with ZeRO its share
    per_whole_gradient: int = (
        0  # with ZeRO-3 over several micro-batches: for each parameter of the pipeline rank
    )
    bucket_elements: int = 0  # gradients copied to be reduced at once
    per_largest: int = 0  # for each element of the rank's largest parameter


# deepspeed/runtime/zero/stage_1_and_2.py@v0.6.0, step: the averaged gradients of the own partition are flattened in half
# precision, and copied to fp32; config_utils: reduce_bucket_size 5e8.
ZERO_1 = Beside(per_own_parameter=HALF_BYTES + FP32_BYTES, bucket_elements=500_000_000)
# deepspeed/runtime/fp16/fused_optimizer.py@v0.6.0, step: every gradient in fp32, and these once more flattened.
ZERO_0 = Beside(per_parameter=2 * FP32_BYTES)
# deepspeed/runtime/bf16_optimizer.py: gradients stay in half precision after they are added to the fp32 ones, which are not
# sharded; update_hp_grads casts each to fp32 before it is added, a block of memory that no smaller ones can be merged to;
# engine.py, buffered_allreduce_fallback: elements_per_buffer 5e8.
BF16 = Beside(per_parameter=HALF_BYTES, bucket_elements=500_000_000, per_largest=FP32_BYTES)


# KempnerInstitute/KempnerForge, training/grad.py, maybe_no_sync: gradients are reduced after the last micro-batch alone, and
# wait for it whole, in the dtype of the reduction (torch/distributed/fsdp/_fully_shard/_fsdp_param.py,
# unsharded_accumulated_grad). Its shares of gradients and AdamW's two moments are bf16, as its parameters, where programs count
# fp32. metrics/memory.py: its GB are GiB.
KEMPNERFORGE = Beside(per_whole_gradient=FP32_BYTES, per_own_parameter=-3 * HALF_BYTES)


def deepspeed(strategy: Strategy) -> Beside:
    """The optimizer that DeepSpeed's pipeline engine takes for a dtype and a level of ZeRO."""
    if strategy.execution.dtype == "bf16":
        return BF16
    return ZERO_1 if strategy.shard.zero else ZERO_0


def held_bytes(prediction: Prediction, strategy: Strategy, beside: Beside, shape: Shape) -> float:
    """Live bytes of the fullest device with what the framework holds."""
    return max(
        _on_rank(stage, strategy, beside) + beside.per_largest * _largest_parameter(stage, strategy, shape)
        for stage in prediction.memory
    )


def _largest_parameter(stage: StageMemory, strategy: Strategy, shape: Shape) -> int:
    """Elements of the largest parameter that a rank holds: of the embedding or head, or of an MLP."""
    outer = stage.stage in (0, strategy.mesh.pp - 1)
    widths = (shape.ffn_hidden, shape.vocab if outer else 0)
    return max(widths) * shape.hidden // strategy.mesh.tp


def shown_bytes(held: float, kind: str, device: Device) -> float:
    """What is printed of `held` bytes, by how it was measured."""
    return held + device.reserve_bytes if kind == "nvidia-smi" else held


def _on_rank(stage: StageMemory, strategy: Strategy, beside: Beside) -> float:
    execution, zero = strategy.execution, state.zero_level(strategy)
    shares = state.shard_ranks(strategy) if zero else 1
    parameters = stage.parameters / state.dtype_bytes(execution.param_dtype) * (shares if zero == 3 else 1)
    micros = strategy.batch.global_ // (strategy.batch.micro * strategy.mesh.data_parallel)
    own = parameters / shares
    return (
        stage.peak
        + beside.per_parameter * parameters
        + beside.per_own_parameter * own
        + beside.per_whole_gradient * (parameters if zero == 3 and micros > 1 else 0)
        + min(beside.bucket_elements, parameters) * state.dtype_bytes(execution.grad_dtype)
    )
