"""Megatron-LM: arguments of pretrain_gpt.py and its siblings.

Names: megatron/training/arguments.py and the dataclasses that it makes arguments of (`TransformerConfig`,
`ModelParallelConfig`, megatron/training/config/), main of August 2026.
"""

from __future__ import annotations

from autoparallel.errors import UserError
from autoparallel.exports.plan import (
    Exported,
    Plan,
    base_dtype,
    bucket_elements,
    header,
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
from autoparallel.planner.strategy.runs import runs
from autoparallel.planner.strategy.types import Strategy

# Rank orders of megatron/core/parallel_state.py, "tp-cp-ep-dp-pp" and "tp-cp-ep-pp-dp", outermost first here.
_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_ORDER_PIPELINE_INSIDE = ("dp_replicate", "dp_shard", "pp", "cp", "tp")
_PRECISIONS = {
    "bf16": ["--bf16"],
    "fp16": ["--fp16"],
    "fp8": ["--bf16", "--fp8-format hybrid"],
    "mxfp8": ["--bf16", "--fp8-format e4m3", "--fp8-recipe mxfp8"],
    "nvfp4": ["--bf16", "--fp4-format e2m1", "--fp4-recipe nvfp4"],
    "fp32": [],
}
_OPTIMIZERS = {
    "adamw": ["--optimizer adam"],  # which decays weights as AdamW does
    "adam": ["--optimizer adam"],
    "sgd": ["--optimizer sgd", "--sgd-momentum 0"],
    "sgd-momentum": ["--optimizer sgd"],
}


def megatron(plan: Plan) -> Exported:
    """A shell file that sets the array MEGATRON_ARGS. Raises UserError for schedules Megatron-LM lacks, and for
    models that read no sequences."""
    s = plan.strategy
    refuse_samples(plan, "Megatron-LM")
    refuse_length(plan, "Megatron-LM")
    if s.mesh.pp > 1 and s.pipeline.schedule not in ("1f1b", "interleaved-1f1b"):
        raise UserError(
            f'{plan.path}: pipeline.schedule = "{s.pipeline.schedule}": Megatron-LM has 1f1b and interleaved-1f1b; '
            "plan again with --set pipeline.schedule=1f1b"
        )
    groups = [_sizes(plan), _pipeline(s), _precision(s), _recompute(s), _data_parallel(s), _offload(s)]
    body = "".join(f"    {flag}\n" for group in groups for flag in group)
    unsaid = _unsaid(plan)
    text = f"{header(plan, 'Megatron-LM', unsaid)}{_connections(s)}MEGATRON_ARGS=(\n{body})\n"
    return Exported(text=text, unsaid=tuple(unsaid))


def _connections(s: Strategy) -> str:
    """How many queues a device takes work from: one keeps the order of products and messages that tensor and context
    parallelism count on before Blackwell, and Megatron-FSDP refuses to start with one."""
    if s.shard.zero > 1:
        return "unset CUDA_DEVICE_MAX_CONNECTIONS\n"
    return "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" if s.mesh.tp > 1 or s.mesh.cp > 1 else ""


def _sizes(plan: Plan) -> list[str]:
    s = plan.strategy
    flags = [
        f"--tensor-model-parallel-size {s.mesh.tp}",
        f"--pipeline-model-parallel-size {s.mesh.pp}",
        f"--context-parallel-size {s.mesh.cp}",
        f"--micro-batch-size {s.batch.micro}",
        f"--global-batch-size {s.batch.global_}",
        f"--seq-length {plan.seq_len}",
    ]
    if s.mesh.ep > 1:
        # Experts are whole: without the second flag Megatron-LM would split each over tp as well.
        flags += [f"--expert-model-parallel-size {s.mesh.ep}", "--expert-tensor-parallel-size 1"]
    if s.shard.sequence_parallel:
        flags.append("--sequence-parallel")
    if _pipeline_inside(s):
        flags.append("--use-tp-pp-dp-mapping")
    return flags


def _pipeline(s: Strategy) -> list[str]:
    blocks = s.pipeline.stage_blocks
    if s.mesh.pp == 1:
        return []
    if len(set(blocks)) > 1:
        chunks = [f"t*{count}" if count else "" for count in blocks]
        chunks[0], chunks[-1] = f"E{chunks[0]}", f"{chunks[-1]}L"
        return [f"--pipeline-model-parallel-layout '{'|'.join(chunks)}'"]
    if s.pipeline.virtual_stages > 1:
        return [f"--num-layers-per-virtual-pipeline-stage {blocks[0]}"]
    return []


def _precision(s: Strategy) -> list[str]:
    flags = [*_PRECISIONS.get(s.execution.dtype, []), *_OPTIMIZERS.get(s.execution.optimizer, [])]
    base = base_dtype(s)
    if base == "bf16" and s.execution.grad_dtype == "bf16":
        flags.append("--grad-reduce-in-bf16")
    if base == "fp16" and s.execution.grad_dtype == "fp32":
        flags.append("--accumulate-allreduce-grads-in-fp32")  # which bf16 does by itself
    attention = "unfused" if s.execution.attention == "unfused" else "flash"
    dropout = f"{s.execution.dropout:g}"  # Megatron-LM's own default is 0.1
    return [
        *flags, f"--attention-backend {attention}", f"--attention-dropout {dropout}", f"--hidden-dropout {dropout}",
    ]  # fmt: skip


def _recompute(s: Strategy) -> list[str]:
    full = s.recompute.per_stage
    if recomputes_all(s):
        return ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    if any(full):
        return [
            "--recompute-granularity full", "--recompute-method block", f"--recompute-num-layers {max(full)}",
        ]  # fmt: skip
    return ["--recompute-granularity selective"] if s.recompute.mode == "selective" else []


def _data_parallel(s: Strategy) -> list[str]:
    sharding = {1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
    flags: list[str] = []
    if s.shard.zero == 1:
        flags = ["--use-distributed-optimizer"]
    elif s.shard.zero > 1:
        flags = ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {sharding[s.shard.zero]}",
                 "--use-distributed-optimizer", "--ckpt-format fsdp_dtensor"]  # fmt: skip
    if s.shard.zero and s.mesh.dp_replicate > 1:
        flags.append(f"--num-distributed-optimizer-instances {s.mesh.dp_replicate}")
    if s.grad_sync.overlap and s.mesh.data_parallel > 1:
        flags.append("--overlap-grad-reduce")
        if s.shard.zero < 2:
            flags.append(f"--ddp-bucket-size {bucket_elements(s)}")
        if s.shard.zero:
            flags.append("--overlap-param-gather")
    return flags


def _offload(s: Strategy) -> list[str]:
    """Its optimizer on the host is Adam, and needs the distributed one, which is the same where there is one replica."""
    if (
        not s.offload.optimizer
        or s.execution.optimizer not in ("adamw", "adam")
        or (s.shard.zero == 0 and s.mesh.data_parallel > 1)
    ):
        return []
    alone = [] if s.shard.zero else ["--use-distributed-optimizer"]
    share = f"--optimizer-offload-fraction {s.offload.optimizer:g}"
    return [*alone, "--use-precision-aware-optimizer", "--optimizer-cpu-offload", share]


def _unsaid(plan: Plan) -> list[str]:
    s = plan.strategy
    found = [*unsaid_everywhere(plan), *unsaid_offload(s, optimizer=bool(_offload(s))), *unsaid_secondary(s)]
    found += unsaid_kernels(s, fused=True)
    held = base_dtype(s) if base_dtype(s) in ("bf16", "fp16") else "fp32"
    found += unsaid_held(s, held, master=True)
    if (grads := s.execution.grad_dtype) not in (held, "fp32"):
        found.append(
            f'execution.grad_dtype = "{grads}": {"fp16" if held == "fp16" else "fp32"} is what they are reduced in'
        )
    if s.execution.optimizer == "adam":
        found.append('execution.optimizer = "adam": weights decay as AdamW\'s do')
    if not any(flag.startswith("--ddp-bucket-size") for flag in _data_parallel(s)):
        found += unsaid_script(s, "grad_sync.bucket_mib")
    full = s.recompute.per_stage
    if any(full) and not recomputes_all(s):
        if len(set(full)) > 1:
            found.append(f"recompute.per_stage = {runs(full)}: every chunk recomputes the most of them")
        if s.recompute.mode == "selective":
            found.append("selective recomputation of the blocks that are not recomputed in full")
    if s.recompute.mode == "operators":
        found.append(
            'recompute.mode = "operators": --recompute-granularity selective with --recompute-modules layernorm and what '
            "else your version knows is its nearest"
        )
    for key, known in (("optimizer", _OPTIMIZERS), ("dtype", _PRECISIONS)):
        if (value := getattr(s.execution, key)) not in known:
            found.append(f'execution.{key} = "{value}"')
    return [*found, *([] if _pipeline_inside(s) else unsaid_order(s, _ORDER))]


def _pipeline_inside(s: Strategy) -> bool:
    """Whether the plan's placement is the one that --use-tp-pp-dp-mapping stands for."""
    return not unsaid_order(s, _ORDER_PIPELINE_INSIDE) and bool(unsaid_order(s, _ORDER))
