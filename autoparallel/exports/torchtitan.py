"""torchtitan: a Python module that sets a run's configuration.

Names: torchtitan 0.3, torchtitan/config/configs.py (`TrainingConfig`, `ParallelismConfig`, `CompileConfig`) and
torchtitan/distributed/activation_checkpoint.py. Its configurations are Python; it has read no TOML since 0.2.
"""

from __future__ import annotations

from autoparallel.errors import UserError
from autoparallel.exports.plan import (
    Exported,
    Plan,
    header,
    recomputed_layers,
    recomputes_all,
    refuse_length,
    refuse_samples,
    unsaid_everywhere,
    unsaid_held,
    unsaid_kernels,
    unsaid_offload,
    unsaid_order,
    unsaid_script,
    unsaid_secondary,
)
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
    "none": "None", "full": "FullAC", "selective": "SelectiveAC", "operators": "SelectiveAC",
}  # fmt: skip


def torchtitan(plan: Plan) -> Exported:
    """A function that makes a torchtitan configuration this plan's; model, data and optimizer stay the user's.

    Raises UserError for a schedule that torchtitan lacks, and for models that read no sequences.
    """
    s = plan.strategy
    refuse_samples(plan, "torchtitan")
    refuse_length(plan, "torchtitan")
    if s.mesh.pp > 1 and s.pipeline.schedule not in _SCHEDULES:
        raise UserError(
            f'{plan.path}: pipeline.schedule = "{s.pipeline.schedule}": torchtitan has {", ".join(_SCHEDULES)}; plan '
            "again with --set pipeline.schedule=1f1b"
        )
    keys = {**_parallelism(s), **_training(plan), "compile.enable": repr(s.execution.kernels == "compiled")}
    checkpointing, made_by = _checkpointing(s)
    keys["activation_checkpoint"] = checkpointing
    unsaid = _unsaid(plan)
    text = (
        header(plan, "torchtitan 0.3", unsaid)
        + _USAGE
        + made_by
        + '\n\ndef planned(config):\n    """A torchtitan `Trainer.Config`, by this plan."""\n'
        + "".join(f"    config.{key} = {value}\n" for key, value in keys.items())
        + "    return config\n"
    )
    return Exported(text=text, unsaid=tuple(unsaid))


def _checkpointing(s: Strategy) -> tuple[str, str]:
    """The value of `activation_checkpoint`, and the lines of the module that it needs."""
    source = "from torchtitan.distributed.activation_checkpoint import "
    whole = recomputed_layers(s)
    if not whole or recomputes_all(s):
        policy = "FullAC" if whole else _CHECKPOINTING[s.recompute.mode]
        return ("None", "") if policy == "None" else (f"{policy}.Config()", f"{source}{policy}\n")
    rest = _CHECKPOINTING[s.recompute.mode]
    policies = ", ".join(sorted({"FullAC", rest} - {"None"}))
    base, others = (
        ("FullAC", "module") if rest == "None" else (rest, "super()._wrap_block(module, base_fqn=base_fqn)")
    )
    chosen = _POLICY.format(
        layers=", ".join(map(str, whole)), base=base, others=others, mode=s.recompute.mode
    )
    return "PlannedAC.Config()", f"from dataclasses import dataclass\n\n{source}{policies}\n\n{chosen}"


_POLICY = """WHOLE = {{{layers}}}  # layers that are recomputed in full; the others: {mode}


class PlannedAC({base}):
    \"\"\"Recomputes each layer as this plan does.\"\"\"

    @dataclass(kw_only=True, slots=True)
    class Config({base}.Config):
        pass

    def _wrap_block(self, module, *, base_fqn=None):
        if int(base_fqn.rpartition(".")[2]) in WHOLE:
            return FullAC(FullAC.Config())._wrap_block(module, base_fqn=base_fqn)
        return {others}
"""


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
    keys = {
        # Without a pipeline, torchtitan accumulates gradients over batches of local_batch_size.
        "local_batch_size": s.batch.micro * (s.micro_batches if s.mesh.pp > 1 else 1),
        "global_batch_size": s.batch.global_,
        "seq_len": plan.seq_len,
        "dtype": "bfloat16" if _half(s) else "float32",
        "mixed_precision_param": _DTYPES.get(s.execution.dtype, "bfloat16"),
    }
    if s.offload.optimizer:
        keys["enable_cpu_offload"] = True
    if s.mesh.pp > 1 or s.mesh.ep > 1:
        keys["disable_cuda_graphs"] = True  # torchtitan refuses to capture them there
    return {f"training.{key}": repr(value) for key, value in keys.items()}


def _half(s: Strategy) -> bool:
    """Whether parameters are held in bfloat16, without a float32 copy."""
    return s.execution.param_dtype == "bf16" and not s.execution.master_weights


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


def _unsaid(plan: Plan) -> list[str]:
    s = plan.strategy
    found = [*unsaid_everywhere(plan), *unsaid_offload(s, optimizer=True), *unsaid_order(s, AXES)]
    if s.offload.optimizer:
        found.append(
            f"offload.optimizer = {s.offload.optimizer:g}: enable_cpu_offload moves all of it, and the parameters and "
            "gradients, too"
        )
    found += unsaid_secondary(s)
    found += unsaid_script(s, "execution.optimizer", "execution.attention", "execution.dropout")
    found += unsaid_script(s, "grad_sync.bucket_mib", "grad_sync.overlap")
    found += unsaid_kernels(s, compiles=True)
    if not _half(s):
        found += unsaid_held(s, "fp32", master=True)
    if s.shard.zero in (1, 2) and s.mesh.dp_shard > 1:
        found.append(f"zero = {s.shard.zero}: FSDP2 without resharding after forward is its nearest")
    if s.recompute.mode == "operators" and not recomputes_all(s):
        found.append(
            'recompute.mode = "operators": torchtitan keeps the result of every second matrix product only'
        )
    if s.recompute.mode == "selective" and not recomputes_all(s):
        found.append(
            'recompute.mode = "selective": torchtitan recomputes operators, not the attention core alone'
        )
    if s.execution.dtype not in _DTYPES:
        found.append(f'execution.dtype = "{s.execution.dtype}": bfloat16 stands below')
    if s.execution.grad_dtype != "fp32" and s.mesh.data_parallel * s.mesh.cp > 1:
        found.append(f'execution.grad_dtype = "{s.execution.grad_dtype}": gradients are reduced in float32')
    return found
