"""torchtitan: a Python module that sets a run's configuration.

Names: torchtitan 0.3, torchtitan/config/configs.py (`TrainingConfig`, `ParallelismConfig`, `CompileConfig`) and
torchtitan/distributed/activation_checkpoint.py. Its configurations are Python; it has read no TOML since 0.2.
"""

from __future__ import annotations

from autoparallel.errors import UserError
from autoparallel.exports.plan import Plan, header, unsaid_everywhere, unsaid_offload, unsaid_order
from autoparallel.planner.strategy.types import AXES, Strategy

_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "zb1p": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_CHECKPOINTING = {
    "none": "None", "full": "FullAC.Config()", "selective": "SelectiveAC.Config()", "operators": "SelectiveAC.Config()",
}  # fmt: skip


def torchtitan(plan: Plan) -> str:
    """A function that makes a torchtitan configuration this plan's; model, data and optimizer stay the user's.

    Raises UserError for a schedule that torchtitan lacks.
    """
    s = plan.strategy
    if s.mesh.pp > 1 and s.pipeline.schedule not in _SCHEDULES:
        raise UserError(
            f'{plan.path}: pipeline.schedule = "{s.pipeline.schedule}": torchtitan has {", ".join(_SCHEDULES)}; plan '
            "again with --set pipeline.schedule=1f1b"
        )
    keys = {**_parallelism(s), **_training(plan), "compile.enable": repr(s.execution.kernels == "compiled")}
    checkpointing = _CHECKPOINTING[s.recompute.mode]
    keys["activation_checkpoint"] = checkpointing
    policy = checkpointing.partition(".")[0]
    return (
        header(plan, "torchtitan 0.3", _unsaid(s))
        + _USAGE
        + (f"from torchtitan.distributed.activation_checkpoint import {policy}\n" if policy != "None" else "")
        + '\n\ndef planned(config):\n    """A torchtitan `Trainer.Config`, by this plan."""\n'
        + "".join(f"    config.{key} = {value}\n" for key, value in keys.items())
        + "    return config\n"
    )


_USAGE = """#
# Save this as autoparallel_plan.py, and beside it my_run.py:
#     from autoparallel_plan import planned
#     from torchtitan.models.llama3.config_registry import llama3_8b  # or your own
#
#     def run():
#         return planned(llama3_8b())
#
# torchrun ... -m torchtitan.train --module my_run --config run
"""


def _training(plan: Plan) -> dict[str, str]:
    s = plan.strategy
    half = s.execution.param_dtype == "bf16" and not s.execution.master_weights
    keys = {
        # Without a pipeline, torchtitan accumulates gradients over batches of local_batch_size.
        "local_batch_size": s.batch.micro * (s.micro_batches if s.mesh.pp > 1 else 1),
        "global_batch_size": s.batch.global_,
        "seq_len": plan.seq_len,
        "dtype": "bfloat16" if half else "float32",
        "mixed_precision_param": _DTYPES.get(s.execution.dtype, "bfloat16"),
    }
    if s.offload.optimizer:
        keys["enable_cpu_offload"] = True
    if s.mesh.pp > 1 or s.mesh.ep > 1:
        keys["disable_cuda_graphs"] = True  # torchtitan refuses to capture them there
    return {f"training.{key}": repr(value) for key, value in keys.items()}


def _parallelism(s: Strategy) -> dict[str, str]:
    keys: dict[str, object] = {
        "data_parallel_replicate_degree": s.mesh.dp_replicate,
        "data_parallel_shard_degree": s.mesh.dp_shard,
        "fsdp_reshard_after_forward": "always" if s.shard.zero == 3 else "never",
        "tensor_parallel_degree": s.mesh.tp,
        "context_parallel_degree": s.mesh.cp,
        "expert_parallel_degree": s.mesh.ep,
        "pipeline_parallel_degree": s.mesh.pp,
    }
    if s.mesh.tp > 1:
        keys["enable_sequence_parallel"] = s.shard.sequence_parallel
    if s.mesh.pp > 1:
        keys["pipeline_parallel_schedule"] = _SCHEDULES[s.pipeline.schedule]
        keys["pipeline_parallel_microbatch_size"] = s.batch.micro
        keys["module_fqns_per_model_part"] = _parts(s.pipeline.stage_blocks)
    return {f"parallelism.{key}": repr(value) for key, value in keys.items()}


def _parts(blocks: tuple[int, ...]) -> list[list[str]]:
    """Modules of each chunk, by the names of torchtitan's own decoders."""
    parts, first = [], 0
    for count in blocks:
        parts.append([f"layers.{i}" for i in range(first, first + count)])
        first += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return parts


def _unsaid(s: Strategy) -> list[str]:
    found = [*unsaid_everywhere(s), *unsaid_offload(s, optimizer=True), *unsaid_order(s, AXES)]
    if 0 < s.offload.optimizer < 1:
        found.append(
            f"offload.optimizer = {s.offload.optimizer:g}: all of it is offloaded, with the parameters"
        )
    if s.shard.zero in (1, 2) and s.mesh.dp_shard > 1:
        found.append(f"zero = {s.shard.zero}: FSDP2 without resharding after forward is its nearest")
    if s.recompute.mode == "operators":
        found.append(
            'recompute.mode = "operators": torchtitan keeps the result of every second matrix product only'
        )
    if s.recompute.mode == "selective":
        found.append(
            'recompute.mode = "selective": torchtitan recomputes operators, not the attention core alone'
        )
    if any(s.recompute.per_stage):
        found.append(f"recompute.per_stage = {list(s.recompute.per_stage)}")
    if s.execution.dtype not in _DTYPES:
        found.append(f'execution.dtype = "{s.execution.dtype}": bfloat16 stands below')
    if s.execution.grad_dtype != "fp32" and s.mesh.data_parallel * s.mesh.cp > 1:
        found.append(f'execution.grad_dtype = "{s.execution.grad_dtype}": gradients are reduced in float32')
    return found
