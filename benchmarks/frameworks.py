"""What the training frameworks of the published runs do where a row is silent, read in their own sources.

What they do of their own accord stands in the stacks (`profiles/stacks/`); here is what rows alone need: losses, launchers' defaults,
and what is allocated beside a program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from autoparallel.planner.strategy.types import Strategy, TensorRule
from benchmarks.beside import KEMPNERFORGE, Beside, deepspeed


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Choices of a code base that change time or memory. Defaults: Megatron-LM and DeepSpeed as of 2021.

    Those keep an fp32 master copy, accumulate bf16 gradients in fp32 and fp16 ones in fp16, and compute the
    loss on logits that stay sharded over the vocabulary.
    """

    stack: str = "plain"
    early_flash_on: tuple[str, ...] = ()  # devices on which its flash attention is of the first generation
    bucket_elements: float | None = None  # gradients reduced at once
    loss: Literal["fp32", "half", "kept"] = "fp32"  # as in `models.LanguageModel.loss`
    dropout: float = 0.0  # of attention's probabilities and after attention and MLP
    vocab: int = 0  # what its launcher runs, where a row's is an assumption
    thousand: int = 1024  # words in a k of its vocabularies
    dtype: str = ""  # that its launcher runs, whatever a row's reader took for likely
    reserved_in: str = ""  # rows whose origin says so print what torch reserved, not what it allocated
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

FRAMEWORKS = {
    name: Framework(stack=name)
    for name in (
        "megatron-2021", "megatron-2022", "megatron-core", "deepspeed", "nemo", "nemo-plain-tp", "megatron-bridge",
        "megatron-bridge-a2a", "fms-fsdp", "torchtitan", "torchtitan-async-tp", "nanotron",
    )
} | {
    "megatron-deepspeed": Framework(stack="megatron-deepspeed", beside=deepspeed),
    # mlcommons/training_results_v5.0, NVIDIA/benchmarks/llama31_405b: NeMo with tp_comm_overlap, overlap_param_gather and
    # overlap_grad_reduce (config_common.sh), as its recipes have them.
    "mlperf": Framework(stack="nemo"),
    # sail-sg/zero-bubble-pipeline-parallelism@f68d3879: its activations are 34 s b h + 5 a s^2 b bytes a layer by the authors'
    # own count (megatron/core/pipeline_parallel/mem.py), as here; by these the "GB" of its table are 1e9 bytes.
    "megatron-zb": Framework(stack="megatron-zb", vocab=32000, dropout=DROPOUT, gb_bytes=1e9),
    # sail-sg/VocabularyParallelism@6191c3b: pretrain_gpt.sh (--fp16, whose gradients are not accumulated in fp32); artifact/full_exp.sh
    # (a k of the vocabulary is 1000 words); artifact/show_result_full_exp.py (prints `max reserved`).
    "megatron-vp": Framework(dtype="fp16", thousand=1000, reserved_in="VocabularyParallelism artifact"),
    # InternLM/InternEvo: reduce_bucket_size of its 7B configurations.
    "internevo": Framework(stack="internevo", bucket_elements=512 * 2**20),
    # mosaicml/llm-foundry: `attn_impl: triton` (an early FlashAttention kernel with ALiBi) in every pretraining
    # configuration until it was removed in 2024 (c26309de5); its A100 tables are of 2023. loss_fn: fused_crossentropy,
    # whose kernel reads the half-precision logits.
    "composer-fsdp": Framework(
        stack="composer-fsdp", loss="half", early_flash_on=("a100-sxm-40gb", "a100-sxm-80gb", "h100-sxm")
    ),
    # Aleph-Alpha/scaling@737f855: core/nn/linear/column_parallel_linear.py gathers the logits (parallel_output is
    # False by default, and the language-model head does not set it); losses/cross_entropy.py computes the loss on
    # their fp32 copy, which the accuracy metric and the returned output keep.
    # examples/transformer_example/config.yml: dropout of 0.1 at the embedding, at attention's probabilities, and after attention and MLP.
    "aleph-alpha-scaling": Framework(
        stack="aleph-alpha-scaling", loss="kept", tensor=GATHERED_LOGITS, dropout=0.1
    ),
    # jzhang38/TinyLlama, pretrain/tinyllama.py: flash_attn's fused cross-entropy, which reads the half-precision logits.
    "lit-gpt": Framework(stack="lit-gpt", loss="half"),
    # IST-DASLab/llmq@b77d969, README: the loss's kernel reads bf16 logits and writes their gradients in place, chunk by chunk.
    "llmq": Framework(stack="llmq", loss="half"),
    # karpathy/llm.c, train_gpt2.cu: gradients are written over the logits by the loss's kernel.
    "llm.c": Framework(stack="llm.c", loss="half"),
    # KempnerInstitute/KempnerForge, kempnerforge/distributed/tensor_parallel.py: the head's outputs are replicated.
    "kempnerforge": Framework(stack="kempnerforge", tensor=GATHERED_LOGITS, beside=lambda _: KEMPNERFORGE),
}  # fmt: skip


def framework_of(name: str) -> Framework:
    """The framework's choices, or the defaults for one that is not listed."""
    return FRAMEWORKS.get(name, Framework())
