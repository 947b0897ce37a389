"""torchtitan: a TOML job file.

Keys: torchtitan 0.2, torchtitan/config/job_config.py (`Parallelism`, `Training`, `ActivationCheckpoint`).
"""

from __future__ import annotations

from autoparallel.exports.plan import Plan, header, unsaid_everywhere, unsaid_offload, unsaid_order
from autoparallel.planner.strategy.types import AXES, Strategy
from autoparallel.planner.strategy.write import literal

_SCHEDULES = {
    "none": "1F1B",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "zb1p": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def torchtitan(plan: Plan) -> str:
    """The tables that a torchtitan job file needs for this plan; model and data are the user's."""
    s = plan.strategy
    tables: dict[str, dict[str, object]] = {
        "parallelism": _parallelism(s),
        "training": {
            # Without a pipeline, torchtitan accumulates gradients over batches of local_batch_size.
            "local_batch_size": s.batch.micro * (s.micro_batches if s.mesh.pp > 1 else 1),
            "global_batch_size": s.batch.global_,
            "seq_len": plan.seq_len,
            "mixed_precision_param": _DTYPES.get(s.execution.dtype, "bfloat16"),
            "mixed_precision_reduce": _DTYPES.get(s.execution.grad_dtype, "float32"),
        },
        "activation_checkpoint": {"mode": {"operators": "selective"}.get(s.recompute.mode, s.recompute.mode)},
        "compile": {"enable": s.execution.kernels == "compiled"},
    }
    if s.recompute.mode in ("selective", "operators"):
        tables["activation_checkpoint"]["selective_ac_option"] = "op"
    if s.offload.optimizer:
        tables["training"]["enable_cpu_offload"] = True
    text = header(plan, "torchtitan 0.2", _unsaid(s))
    for name, keys in tables.items():
        text += f"\n[{name}]\n" + "".join(f"{key} = {literal(value)}\n" for key, value in keys.items())
    return text


def _parallelism(s: Strategy) -> dict[str, object]:
    keys: dict[str, object] = {
        "data_parallel_replicate_degree": s.mesh.dp_replicate,
        "data_parallel_shard_degree": s.mesh.dp_shard,
        "fsdp_reshard_after_forward": "always" if s.shard.zero == 3 else "never",
        "tensor_parallel_degree": s.mesh.tp,
        "context_parallel_degree": s.mesh.cp,
        "expert_parallel_degree": s.mesh.ep,
        "pipeline_parallel_degree": s.mesh.pp,
    }
    if s.mesh.pp > 1:
        blocks = s.pipeline.stage_blocks
        keys["pipeline_parallel_schedule"] = _SCHEDULES.get(s.pipeline.schedule, "1F1B")
        keys["pipeline_parallel_microbatch_size"] = s.batch.micro
        if len(set(blocks)) == 1:
            keys["pipeline_parallel_layers_per_stage"] = blocks[0]
            keys["pipeline_parallel_first_stage_less_layers"] = 0
            keys["pipeline_parallel_last_stage_less_layers"] = 0
        else:
            keys["module_fqns_per_model_part"] = _parts(blocks)
    return keys


def _parts(blocks: tuple[int, ...]) -> list[list[str]]:
    """Modules of each chunk, by the names of torchtitan's own decoders."""
    parts, first = [], 0
    for count in blocks:
        parts.append([f"layers.{i}" for i in range(first, first + count)])
        first += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


def _unsaid(s: Strategy) -> list[str]:
    found = [*unsaid_everywhere(s), *unsaid_offload(s, optimizer=True), *unsaid_order(s, AXES)]
    if 0 < s.offload.optimizer < 1:
        found.append(
            f"offload.optimizer = {s.offload.optimizer:g}: all of it is offloaded, with the parameters"
        )
    if s.shard.zero in (1, 2) and s.mesh.dp_shard > 1:
        found.append(f"zero = {s.shard.zero}: FSDP2 without resharding after forward is its nearest")
    if s.mesh.tp > 1 and not s.shard.sequence_parallel:
        found.append("sequence_parallel = false: torchtitan's tensor parallelism is sequence parallel")
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
    return found
