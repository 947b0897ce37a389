"""DeepSpeed: a ds_config.json.

Keys: DeepSpeed configuration reference (deepspeed.ai/docs/config-json), as its main of August 2026 reads them. Pipeline stages are chosen in code
there (`PipelineModule(num_stages=…)`), so a plan with a pipeline is refused.
"""

from __future__ import annotations

import json
from typing import Any

from autoparallel.errors import UserError
from autoparallel.exports.plan import (
    Exported,
    Plan,
    base_dtype,
    bucket_elements,
    unsaid_dtype,
    unsaid_everywhere,
    unsaid_experts,
    unsaid_held,
    unsaid_kernels,
    unsaid_offload,
    unsaid_order,
    unsaid_samples,
    unsaid_script,
    unsaid_single,
)
from autoparallel.labels import recompute_label
from autoparallel.planner.strategy.types import AXES, Strategy


def deepspeed(plan: Plan) -> Exported:
    """ds_config.json; what it cannot say stands under "_autoparallel". Raises UserError for a pipeline."""
    s = plan.strategy
    if s.mesh.pp > 1 or s.mesh.cp > 1:
        raise UserError(
            f"{plan.path}: a ds_config.json cannot say pipeline or context parallelism; plan again with --set "
            "mesh.pp=1 --set mesh.cp=1, or export to torchtitan or megatron"
        )
    zero: dict[str, Any] = {
        "stage": s.shard.zero,
        "overlap_comm": s.grad_sync.overlap,
        "reduce_bucket_size": bucket_elements(s),
        "allgather_bucket_size": bucket_elements(s),
        "contiguous_gradients": True,
    }
    if s.offload.optimizer and s.mesh.data_parallel == 1:
        zero["stage"] = max(s.shard.zero, 1)  # the same on one rank, and what offloading needs
    offloads = bool(s.offload.optimizer and zero["stage"])
    unsaid = [*unsaid_everywhere(plan), *unsaid_order(s, AXES), *unsaid_dtype(s), *unsaid_experts(s)]
    unsaid += unsaid_offload(s, optimizer=offloads)
    unsaid += _unsaid_execution(s)
    if s.mesh.dp_replicate > 1 and s.shard.zero:  # its mics_shard_size was removed in 0.19
        unsaid.append(f"dp_replicate = {s.mesh.dp_replicate}: state is sharded over all ranks instead")
    if s.shard.secondary:
        zero["zero_hpz_partition_size"] = s.shard.secondary
    if offloads:
        zero["offload_optimizer"] = {"device": "cpu"}
        if zero["stage"] == 3:
            zero["offload_optimizer"]["ratio"] = s.offload.optimizer
        elif s.offload.optimizer < 1:
            unsaid.append(f"offload.optimizer = {s.offload.optimizer:g}: below ZeRO 3 all of it is offloaded")
    accumulated = s.execution.grad_dtype if zero["stage"] else _model_dtype(s)
    if accumulated != s.execution.grad_dtype:
        unsaid.append(
            f'execution.grad_dtype = "{s.execution.grad_dtype}": without ZeRO gradients are added up in {accumulated}'
        )
    if label := recompute_label(s):
        unsaid.append(f"recomputation of {label}: switch it on in the model")
    config: dict[str, Any] = {
        "train_batch_size": s.batch.global_,
        "train_micro_batch_size_per_gpu": s.batch.micro,
        "gradient_accumulation_steps": s.micro_batches,
        "bf16": {"enabled": _model_dtype(s) == "bf16"},
        "fp16": {"enabled": _model_dtype(s) == "fp16"},
        "data_types": {"grad_accum_dtype": accumulated},
        "zero_optimization": zero,
    }
    if s.mesh.tp > 1:
        config["tensor_parallel"] = {"autotp_size": s.mesh.tp}
    note = {"from": plan.path, "not_said_here": unsaid}
    text = json.dumps({"_autoparallel": note, **config}, indent=2) + "\n"
    return Exported(text=text, unsaid=tuple(unsaid))


def _unsaid_execution(s: Strategy) -> list[str]:
    found = [*unsaid_samples(s), *unsaid_single(s), *unsaid_kernels(s)]
    found += unsaid_script(s, "execution.optimizer", "execution.attention", "execution.dropout")
    found += unsaid_held(s, _model_dtype(s), master=True)
    if s.mesh.tp > 1 and s.shard.sequence_parallel:
        found.append(
            "shard.sequence_parallel = true: activations between sharded products are whole on every rank"
        )
    return found


def _model_dtype(s: Strategy) -> str:
    dtype = base_dtype(s)
    return dtype if dtype in ("bf16", "fp16") else "fp32"
