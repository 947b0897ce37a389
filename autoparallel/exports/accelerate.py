"""Hugging Face accelerate: the file of `accelerate launch --config_file`.

Keys: accelerate 1.10 and later (`fsdp_version: 2`, `parallelism_config`).
"""

from __future__ import annotations

from autoparallel.errors import UserError
from autoparallel.exports.plan import (
    Plan,
    base_dtype,
    header,
    unsaid_dtype,
    unsaid_everywhere,
    unsaid_experts,
    unsaid_offload,
    unsaid_order,
)
from autoparallel.planner.strategy.types import AXES


def accelerate(plan: Plan) -> str:
    """A YAML file. Raises UserError for a pipeline, which accelerate does not train with."""
    s = plan.strategy
    if s.mesh.pp > 1:
        raise UserError(
            f"{plan.path}: accelerate does not train with pipeline parallelism; plan again with --set mesh.pp=1, "
            "or export to torchtitan or megatron"
        )
    full = s.recompute.mode == "full"
    precision = "fp8" if s.execution.dtype == "fp8" else base_dtype(s)
    keys: list[tuple[str, object]] = [
        ("compute_environment", "LOCAL_MACHINE"),
        ("distributed_type", ("MULTI_CPU" if plan.on_cpu else "MULTI_GPU") if not s.shard.zero else "FSDP"),
        ("mixed_precision", precision if precision in ("bf16", "fp16", "fp8") else "no"),
        ("num_machines", plan.nodes),
        ("num_processes", s.mesh.devices),
        ("machine_rank", 0),
        ("rdzv_backend", "c10d"),
        ("main_training_function", "main"),
        ("use_cpu", plan.on_cpu),
    ]
    text = "".join(f"{key}: {_yaml(value)}\n" for key, value in keys)
    if s.shard.zero:
        text += (
            "fsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
            f"  fsdp_reshard_after_forward: {_yaml(s.shard.zero == 3)}\n"
            f"  fsdp_activation_checkpointing: {_yaml(full)}\n"
            f"  fsdp_offload_params: {_yaml(s.offload.optimizer > 0)}\n"
            "  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
        )
    if s.mesh.tp > 1 or s.mesh.cp > 1 or s.shard.zero:
        sizes = {
            "dp_replicate": s.mesh.dp_replicate,
            "dp_shard": s.mesh.dp_shard,
            "cp": s.mesh.cp,
            "tp": s.mesh.tp,
        }
        text += "parallelism_config:\n"
        text += "".join(f"  parallelism_config_{axis}_size: {size}\n" for axis, size in sizes.items())
    unsaid = [*unsaid_everywhere(s), *unsaid_order(s, AXES), *unsaid_experts(s)]
    unsaid += unsaid_offload(s, optimizer=bool(s.shard.zero))
    if precision != "fp8":
        unsaid += unsaid_dtype(s)
    unsaid.append(
        f"batch.micro = {s.batch.micro}, gradient accumulation over {s.micro_batches} micro-batches: arguments of "
        f"your script (gradient_accumulation_steps={s.micro_batches})"
    )
    if s.shard.zero in (1, 2):
        unsaid.append(f"zero = {s.shard.zero}: FSDP2 without resharding after forward is its nearest")
    if (
        s.recompute.mode in ("selective", "operators")
        or any(s.recompute.per_stage)
        or (full and not s.shard.zero)
    ):
        unsaid.append(f'recompute.mode = "{s.recompute.mode}", per_stage = {list(s.recompute.per_stage)}')
    return header(plan, "accelerate", unsaid) + text


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
