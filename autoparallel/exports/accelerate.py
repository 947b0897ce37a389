"""Hugging Face accelerate: the file of `accelerate launch --config_file`.

Keys: accelerate 1.10 to 1.15 (`fsdp_version: 2`, `parallelism_config`).
"""

from __future__ import annotations

from autoparallel.errors import UserError
from autoparallel.exports.launch import PORT
from autoparallel.exports.plan import (
    Exported,
    Plan,
    base_dtype,
    header,
    recomputed_layers,
    recomputes_all,
    unsaid_dtype,
    unsaid_everywhere,
    unsaid_experts,
    unsaid_held,
    unsaid_kernels,
    unsaid_offload,
    unsaid_order,
    unsaid_samples,
    unsaid_script,
    unsaid_secondary,
    unsaid_single,
)
from autoparallel.labels import recompute_label
from autoparallel.planner.strategy.types import AXES, Strategy


def accelerate(plan: Plan) -> Exported:
    """A YAML file. Raises UserError for what accelerate does not train with: pipelines, and tensor or context
    parallelism between replicas that shard nothing."""
    s = plan.strategy
    if s.mesh.pp > 1:
        raise UserError(
            f"{plan.path}: accelerate does not train with pipeline parallelism; plan again with --set mesh.pp=1, "
            "or export to torchtitan or megatron"
        )
    if s.mesh.tp * s.mesh.cp > 1 and s.mesh.dp_replicate > 1 and s.mesh.dp_shard == 1:
        raise UserError(
            f"{plan.path}: accelerate has no tensor or context parallelism within replicas that shard nothing; plan "
            "again with --set mesh.dp_replicate=1, or export to torchtitan or megatron"
        )
    sharded = s.shard.zero > 0 and s.mesh.dp_shard * s.mesh.cp > 1
    precision = "fp8" if s.execution.dtype == "fp8" else base_dtype(s)
    keys: list[tuple[str, object]] = [
        ("compute_environment", "LOCAL_MACHINE"),
        ("distributed_type", _distributed_type(plan, sharded=sharded)),
        ("mixed_precision", precision if precision in ("bf16", "fp16", "fp8") else "'no'"),
        ("num_machines", plan.nodes),
        ("num_processes", s.mesh.devices),
        ("machine_rank", 0),
        ("rdzv_backend", "c10d"),
        ("main_training_function", "main"),
        ("use_cpu", plan.on_cpu),
    ]
    text = "".join(f"{key}: {_yaml(value)}\n" for key, value in keys)
    if sharded:
        text += (
            "fsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
            f"  fsdp_reshard_after_forward: {_yaml(s.shard.zero == 3)}\n"
            f"  fsdp_activation_checkpointing: {_yaml(bool(recomputed_layers(s)))}\n"
            f"  fsdp_offload_params: {_yaml(s.offload.optimizer > 0)}\n"
            "  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
        )
    if s.mesh.tp > 1 or s.mesh.cp > 1 or sharded:
        sizes = {
            "dp_replicate": s.mesh.dp_replicate,
            "dp_shard": s.mesh.dp_shard,
            "cp": s.mesh.cp,
            "tp": s.mesh.tp,
        }
        text += "parallelism_config:\n"
        text += "".join(f"  parallelism_config_{axis}_size: {size}\n" for axis, size in sizes.items())
    unsaid = _unsaid(plan, sharded=sharded)
    return Exported(text=header(plan, "accelerate", unsaid) + _launched(plan) + text, unsaid=tuple(unsaid))


def _distributed_type(plan: Plan, *, sharded: bool) -> str:
    if sharded:
        return "FSDP"
    if plan.strategy.mesh.devices == 1:
        return "NO"
    return "MULTI_CPU" if plan.on_cpu else "MULTI_GPU"


def _launched(plan: Plan) -> str:
    where = f" --machine_rank K --main_process_ip HOST --main_process_port {PORT}" if plan.nodes > 1 else ""
    on = "On every node, K counting them from 0 at HOST: " if plan.nodes > 1 else ""
    return f"# {on}accelerate launch --config_file THIS{where} train.py ARGUMENTS\n"


def _unsaid(plan: Plan, *, sharded: bool) -> list[str]:
    s = plan.strategy
    unsaid = [*unsaid_everywhere(plan), *unsaid_order(s, AXES), *unsaid_experts(s)]
    unsaid += unsaid_offload(s, optimizer=sharded)
    if sharded and s.offload.optimizer:
        unsaid.append(
            f"offload.optimizer = {s.offload.optimizer:g}: fsdp_offload_params moves all of it, and the parameters and "
            "gradients, too"
        )
    if s.execution.dtype != "fp8":
        unsaid += unsaid_dtype(s)
    unsaid.append(
        f"batch.micro = {s.batch.micro}, gradient accumulation over {s.micro_batches} micro-batches: arguments of "
        f"your script (gradient_accumulation_steps={s.micro_batches})"
    )
    unsaid += unsaid_secondary(s)
    unsaid += _unsaid_execution(s, sharded=sharded)
    if sharded and s.shard.zero < 3:
        unsaid.append(f"zero = {s.shard.zero}: FSDP2 without resharding after forward is its nearest")
    return unsaid + _unsaid_recompute(s, sharded=sharded)


def _unsaid_execution(s: Strategy, *, sharded: bool) -> list[str]:
    """Its FSDP reduces gradients in the dtype of mixed_precision; DDP in that of the parameters, which are float32."""
    found = [*unsaid_samples(s), *unsaid_single(s), *unsaid_kernels(s)]
    found += unsaid_script(s, "execution.optimizer", "execution.attention", "execution.dropout")
    found += unsaid_script(s, "grad_sync.bucket_mib", "grad_sync.overlap")
    found += unsaid_held(s, "fp32", master=True)
    precision = base_dtype(s) if sharded and base_dtype(s) in ("bf16", "fp16") else "fp32"
    if s.execution.grad_dtype != precision:
        found.append(
            f'execution.grad_dtype = "{s.execution.grad_dtype}": gradients are reduced in {precision}'
        )
    if s.mesh.tp > 1 and s.shard.sequence_parallel:
        found.append("shard.sequence_parallel = true: set it in the model's own plan for tensor parallelism")
    return found


def _unsaid_recompute(s: Strategy, *, sharded: bool) -> list[str]:
    """Its FSDP recomputes every block or none; without FSDP nothing."""
    label = recompute_label(s)
    if not label or (sharded and recomputes_all(s)):
        return []
    if sharded and recomputed_layers(s):
        return [f"recomputation of {label}: fsdp_activation_checkpointing recomputes every block"]
    return [
        f"recomputation of {label}: switch it on in the model (gradient_checkpointing_enable), which knows every block"
    ]


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
