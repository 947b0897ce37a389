"""What the training frameworks of the published runs do where a row is silent, read in their own sources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from autoparallel.planner.strategy.types import Strategy, TensorRule
from benchmarks.beside import KEMPNERFORGE, Beside, deepspeed


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Choices of a code base that change time or memory. Defaults: Megatron-LM and DeepSpeed as of 2021.

    Those keep an fp32 master copy, accumulate bf16 gradients in fp32 and fp16 ones in fp16, and compute the
    loss on logits that stay sharded over the vocabulary.
    """

    early_flash_on: tuple[str, ...] = ()  # devices on which its flash attention is of the first generation
    flash: Literal["flash", "flash-v2"] = "flash"  # its flash kernel, where a row does not name another
    half_gradients: bool = False  # accumulated and reduced in the parameters' dtype
    full_parameters: bool = False  # of ZeRO-3: held in fp32, gathered in half precision
    full_reduction: bool = False  # of ZeRO-3: gradients summed in fp32
    bucket_elements: float | None = None  # gradients reduced at once
    eager: bool = False  # runs operator by operator; a normalisation is one kernel where the row says so
    sequence_parallel: bool = False  # with every tensor parallelism
    async_tp: bool = False  # gathers and scatters of sequence parallelism beside the products that need them
    in_line_tp: tuple[str, ...] = ()  # dtypes in which those gathers and scatters stand in line all the same
    async_gradients: bool = False  # tensor-parallel sums of input gradients beside the weights' products
    loss: Literal["fp32", "half", "kept"] = "fp32"  # as in `models.LanguageModel.loss`
    dropout: float = 0.0  # of attention's probabilities and after attention and MLP
    attention: Literal["", "unfused"] = ""  # what its launcher runs, where a row's kernel is an assumption
    parameter_gathers: bool = False  # of ZeRO-3, one by one
    joined_pieces: bool = False  # of those gathers
    blocking_sends: bool = False  # of messages between pipeline stages, where it runs with ZeRO
    kept_outputs: bool = False  # what a stage has sent, until its backward pass
    late_gathers: bool = False  # of ZeRO-1's updated parameters, beside the first forwards
    added_gradients: bool = False  # to the sum, by a kernel of their own
    dtensor: bool = False  # of sequence parallelism: DTensor's, along the second dim
    hidden_dispatch: bool = False  # of experts' tokens, beside the computation of another micro-batch
    merged_dispatch: bool = False  # of experts' tokens: DeepEP, HybridEP
    vocab: int = 0  # likewise
    gb_bytes: float = 2.0**30  # what its authors print as a GB of memory, where a row does not know
    beside: Callable[[Strategy], Beside] = lambda _: (
        Beside()
    )  # what it holds on a device that a program does not
    tensor: tuple[TensorRule, ...] = ()  # tensor-parallel placements that differ from Megatron's


# Where runs were launched with CUDA_LAUNCH_BLOCKING=1, by a part of their origin. Source: bigscience,
# train/tr11-176B-ml/chronicles-prequel.md, "dealing with JZ hanging on the large model", and the launchers beside it.
BLOCKING_LAUNCHES = ("train/tr11-176B-ml/",)

GATHERED_LOGITS = (TensorRule(module="head", params=(("weight", "shard(0)"),), outputs=("replicate",)),)

# --attention-dropout and --hidden-dropout of Megatron-LM's scripts where they are not given (megatron/arguments.py), and whose
# runs say that they kept them, by a part of their origin: bigscience, train/tr11-176B-ml/README.md.
DROPOUT = 0.1
DROPPING = ("bigscience-workshop/bigscience", "Oneflow-Inc/DLPerf", "DS3Lab/Decentralized_FM_alpha")

# Megatron-Bridge, perf_recipes/llama: tp_comm_overlap = False in every nvfp4 recipe. Transformer Engine refused MXFP8
# under Userbuffers until its #1711 (April 2025), and since then sends the scales in blocking collectives.
IN_LINE = ("mxfp8", "nvfp4")

# NeMo and Megatron-Bridge recipes: grad_reduce_in_fp32 = false, tp_comm_overlap = true, and sequence_parallel wherever
# tensor_model_parallel_size > 1; overlap_param_gather (overlap_param_sync) = true; tp_overlap_configs/userbuffers.py: bulk
# overlap of qkv_wgrad and fc1_wgrad.
NEMO = Framework(
    sequence_parallel=True,
    half_gradients=True,
    async_tp=True,
    in_line_tp=IN_LINE,
    async_gradients=True,
    late_gathers=True,
)
MEGATRON_BRIDGE = replace(NEMO, merged_dispatch=True)

FRAMEWORKS = {
    # DeepSpeed, deepspeed/runtime/pipe/p2p.py: send refuses to be asynchronous (torch.distributed.send). A run with
    # ZeRO ran in that engine, one without may have run in Megatron's own. pipe/engine.py: pipe_buffers["outputs"] until the
    # backward, which Megatron frees once they are sent (training.py: deallocate_pipeline_outputs).
    "megatron-deepspeed": Framework(
        blocking_sends=True, kept_outputs=True, added_gradients=True, beside=deepspeed
    ),
    # Megatron-LM of 2021 (arXiv:2104.04473) has no ZeRO: its ZeRO-3 runs are DeepSpeed's of that spring
    # (DeepSpeed@c83e49f9e, runtime/zero/partition_parameters.py), which fetched each parameter by itself.
    "megatron-2021": Framework(parameter_gathers=True, added_gradients=True),
    # microsoft/Megatron-DeepSpeed, examples/azure/run-175b.sh: stage3_prefetch_bucket_size 5e7, a tenth of its parameters;
    # runtime/zero/partitioned_param_coordinator.py (fetch_sub_module), stage3_max_reuse_distance 3e9.
    "deepspeed": Framework(parameter_gathers=True, joined_pieces=True, added_gradients=True),
    "nemo": NEMO,
    # mlcommons/training_results_v5.0, NVIDIA/benchmarks/llama31_405b: NeMo with tp_comm_overlap, overlap_param_gather and
    # overlap_grad_reduce (config_common.sh), as its recipes have them.
    "mlperf": NEMO,
    # NVIDIA/Megatron-LM since core 0.5, arguments.py: --overlap-param-gather and --overlap-grad-reduce, as the model zoo's
    # scripts set them; what dispatches tokens is in each row's note.
    "megatron-core": Framework(async_gradients=True, late_gathers=True),
    # Google's recipes for A3 run NeMo with ub_tp_comm_overlap = false (gpu-recipes, src/frameworks).
    "nemo-plain-tp": replace(NEMO, async_tp=False, in_line_tp=()),
    # Its mixture-of-experts recipes dispatch through HybridEP or DeepEP (moe_flex_dispatcher_backend, perf_recipes/qwen).
    "megatron-bridge": MEGATRON_BRIDGE,
    # scripts/performance/configs/qwen@5c86b2b1d: moe_a2a_overlap = True for Qwen3-235B on H100 and, in four chunks, B300.
    "megatron-bridge-a2a": replace(MEGATRON_BRIDGE, hidden_dispatch=True),
    # Megatron-LM since 2022 (02bb1f5, megatron/mpu/layers.py): async_tensor_model_parallel_allreduce by default, and the
    # same for the scatter of sequence parallelism.
    "megatron-2022": Framework(async_gradients=True),
    # sail-sg/zero-bubble-pipeline-parallelism@f68d3879 (branch arxiv, of the paper), examples/pretrain_zero_bubble.sh: fp16
    # without --use-flash-attn. Its activations are 34 s b h + 5 a s^2 b bytes a layer by the authors' own count
    # (megatron/core/pipeline_parallel/mem.py), as here; by these the "GB" of its table are 1e9 bytes.
    "megatron-zb": Framework(attention="unfused", vocab=32000, dropout=DROPOUT, gb_bytes=1e9),
    # InternLM/InternEvo: solver/optimizer/hybrid_zero_optim.py reduces gradients in the parameters' dtype;
    # reduce_bucket_size of its 7B configurations.
    "internevo": Framework(half_gradients=True, added_gradients=True, bucket_elements=512 * 2**20),
    # mosaicml/llm-foundry: `attn_impl: triton` (an early FlashAttention kernel with ALiBi) in every pretraining
    # configuration until it was removed in 2024 (c26309de5); its A100 tables are of 2023. loss_fn: fused_crossentropy,
    # whose kernel reads the half-precision logits.
    "composer-fsdp": Framework(loss="half", early_flash_on=("a100-sxm-40gb", "a100-sxm-80gb", "h100-sxm")),
    # Aleph-Alpha/scaling@737f855: core/nn/linear/column_parallel_linear.py gathers the logits (parallel_output is
    # False by default, and the language-model head does not set it); losses/cross_entropy.py computes the loss on
    # their fp32 copy, which the accuracy metric and the returned output keep; core/optimizer/parameter_group.py takes gradients as autograd left them, in bf16.
    # nn/mlp.py, nn/rotary.py, nn/norm: torch's own operators one by one, so that it also keeps what it gathers along the sequence;
    # nn/parallel_module/parallel_module.py: a stage's output stays in its buffer until its gradient has come.
    # examples/transformer_example/config.yml: dropout of 0.1 at the embedding, at attention's probabilities, and after attention and MLP.
    "aleph-alpha-scaling": Framework(
        half_gradients=True,
        added_gradients=True,
        eager=True,
        kept_outputs=True,
        loss="kept",
        tensor=GATHERED_LOGITS,
        dropout=0.1,
    ),
    # torch's scaled_dot_product_attention runs FlashAttention 2 unless told otherwise (pytorch/pytorch#138522), and
    # nothing newer before its release 2.5. IBM's fms-fsdp, fms_fsdp/policies: mixed precision over fp32 parameters.
    "fms-fsdp": Framework(flash="flash-v2", full_parameters=True),
    # jzhang38/TinyLlama, pretrain/tinyllama.py: Lightning's FSDP in bf16-mixed; flash_attn's second kernels, and its fused
    # cross-entropy, which reads the half-precision logits.
    "lit-gpt": Framework(flash="flash-v2", full_parameters=True, loss="half"),
    # IST-DASLab/llmq@b77d969, README: gradients and both moments in bf16; the loss's kernel reads bf16 logits and writes
    # their gradients in place, chunk by chunk.
    "llmq": Framework(half_gradients=True, loss="half"),
    # karpathy/llm.c, train_gpt2.cu: gradients in floatX (bf16), written over the logits by the loss's kernel.
    "llm.c": Framework(half_gradients=True, loss="half"),
    # pytorch/torchtitan, torchtitan/config: mixed_precision_param bfloat16 over fp32 parameters, mixed_precision_reduce
    # float32. Asynchronous tensor parallelism is an option (enable_async_tensor_parallel) that some runs take.
    "torchtitan": Framework(dtensor=True, flash="flash-v2", full_parameters=True, full_reduction=True),
    "torchtitan-async-tp": Framework(
        dtensor=True, flash="flash-v2", full_parameters=True, full_reduction=True, async_tp=True
    ),
    # huggingface/nanotron@9b0de5be, parallel/pipeline_parallel/state.py: a message is waited for, its shape sent before
    # it; models/llama.py: attention of the flash_attn package, which on Hopper is its second generation.
    "nanotron": Framework(flash="flash-v2", blocking_sends=True),
    # KempnerInstitute/KempnerForge, kempnerforge/distributed/parallel.py: bf16 parameters, fp32 reduction; tensor_parallel.py:
    # the head's outputs are replicated.
    "kempnerforge": Framework(
        dtensor=True,
        flash="flash-v2",
        full_reduction=True,
        tensor=GATHERED_LOGITS,
        beside=lambda _: KEMPNERFORGE,
    ),
}


def framework_of(name: str) -> Framework:
    """The framework's choices, or the defaults for one that is not listed."""
    return FRAMEWORKS.get(name, Framework())
