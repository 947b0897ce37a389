"""Small models of every architecture that must be captured, on the CPU with real weights."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.planner.capture import capture

SEQ = 16
SAMPLES = 2


def tokens(vocabulary: int, length: int = SEQ) -> torch.Tensor:
    return torch.arange(SAMPLES * length).reshape(SAMPLES, length) % vocabulary


def language(model: nn.Module, vocabulary: int = 96) -> tuple[nn.Module, dict[str, Any]]:
    ids = tokens(vocabulary)
    return model.train(), {"input_ids": ids, "labels": ids.clone()}


def small(name: str, layers: int = 2, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A model of `layers` layers and its inputs."""
    torch.manual_seed(0)
    return _MAKERS[name](layers, changes)


_DECODER = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96,
    "max_position_embeddings": 64, "use_cache": False, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip


def _decoder(family: str, **extra: Any) -> Any:
    def make(layers: int, changes: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
        import transformers

        config = getattr(transformers, f"{family}Config")(
            **_DECODER | {"num_hidden_layers": layers} | extra | changes
        )
        return language(getattr(transformers, f"{family}ForCausalLM")(config))

    return make


def _gpt2(layers: int, changes: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {
        "n_embd": 32, "n_layer": layers, "n_head": 4, "vocab_size": 96, "n_positions": 32, "use_cache": False,
        "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return language(GPT2LMHeadModel(GPT2Config(**settings | changes)))


def _bert(layers: int, changes: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import BertConfig, BertForMaskedLM

    settings = {
        "hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 48,
        "vocab_size": 96, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    return language(BertForMaskedLM(BertConfig(**settings | changes)))


def _t5(layers: int, changes: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import T5Config, T5ForConditionalGeneration

    settings = {
        "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": layers, "num_decoder_layers": layers, "num_heads": 4,
        "vocab_size": 96, "dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0,
    }  # fmt: skip
    return language(T5ForConditionalGeneration(T5Config(**settings | changes)))


def _vit(layers: int, changes: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import ViTConfig, ViTForImageClassification

    settings = {
        "hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 48,
        "image_size": 16, "patch_size": 4, "num_labels": 10, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    model = ViTForImageClassification(ViTConfig(**settings | changes)).train()
    return model, {
        "pixel_values": torch.randn(SAMPLES, 3, 16, 16),
        "labels": torch.zeros(SAMPLES, dtype=torch.int64),
    }


def _whisper(layers: int, changes: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    settings = {
        "d_model": 32, "encoder_layers": layers, "decoder_layers": layers, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 96,
        "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 32, "use_cache": False,
        "decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "dropout": 0.0, "suppress_tokens": None, "begin_suppress_tokens": None,
    }  # fmt: skip
    model = WhisperForConditionalGeneration(WhisperConfig(**settings | changes)).train()
    return model, {"input_features": torch.randn(SAMPLES, 8, 24), "labels": tokens(96)}


_MAKERS = {
    "llama": _decoder("Llama"),
    "mistral": _decoder("Mistral"),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3", head_dim=8),
    "gemma2": _decoder("Gemma2", head_dim=8, sliding_window=8),
    "mixtral": _decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "deepseek": _decoder(
        "DeepseekV3", num_key_value_heads=4, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8,
        qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, n_group=2, topk_group=1, n_shared_experts=1,
    ),
    "gpt2": _gpt2,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    "whisper": _whisper,
}  # fmt: skip

NAMES = tuple(_MAKERS)


def example(file: str, name: str, **arguments: Any) -> tuple[nn.Module, Any]:
    """What a factory of a file in examples/ returns."""
    path = Path(__file__).parents[2] / "examples" / file
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    result: tuple[nn.Module, Any] = getattr(module, name)(**arguments)
    return result


EXAMPLES = ("resnet", "dlrm", "mlp")


def any_small(name: str, layers: int = 2) -> tuple[nn.Module, Any]:
    """A transformers architecture or one of the examples, small."""
    if name == "mlp":
        return example("mlp.py", "mlp", features=12, width=16, depth=layers)
    if name in EXAMPLES:
        return example(f"{name}.py", f"{name}_small")
    return small(name, layers)


@cache
def captured(name: str) -> tuple[nn.Module, Any, ModelGraph]:
    """`any_small` and its graph, once for all tests that only look."""
    module, inputs = any_small(name)
    return module, inputs, capture(module, inputs, name=name)
