"""Six small real models with their inputs: what one process of this machine trains in well under a second."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
Inputs = dict[str, Tensor]


def _tokens(samples: int, length: int, vocabulary: int) -> Inputs:
    ids = torch.arange(samples * length).reshape(samples, length) * 7 % vocabulary
    return {"input_ids": ids, "labels": ids.clone()}


def llama(samples: int) -> tuple[nn.Module, Inputs]:
    """4 layers of 256, 8 query and 4 key-value heads, SwiGLU, vocabulary 4,096, 256 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=4096, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), _tokens(samples, 256, 4096)


def gpt2(samples: int) -> tuple[nn.Module, Inputs]:
    """4 layers of 384, 6 heads, vocabulary 8,192 (tied), 128 tokens, dropout 0.1."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=384, n_layer=4, n_head=6, vocab_size=8192, n_positions=128, attn_pdrop=0.0, use_cache=False, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    return GPT2LMHeadModel(config), _tokens(samples, 128, 8192)


def bert(samples: int) -> tuple[nn.Module, Inputs]:
    """4 layers of 256, 4 heads, vocabulary 8,192 (tied), 128 tokens, dropout 0.1."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, vocab_size=8192,
        max_position_embeddings=128, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config), _tokens(samples, 128, 8192)


def vit(samples: int) -> tuple[nn.Module, Inputs]:
    """6 layers of 192, 3 heads, images of 112 in patches of 16."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192, num_hidden_layers=6, num_attention_heads=3, intermediate_size=768, image_size=112,
        patch_size=16, num_labels=100,
    )  # fmt: skip
    inputs = {"pixel_values": torch.randn(samples, 3, 112, 112), "labels": torch.arange(samples) % 100}
    return ViTForImageClassification(config), inputs


def resnet(samples: int) -> tuple[nn.Module, Inputs]:
    """Bottlenecks (2, 2, 2, 2) of width 32, images of 64."""
    model, _ = _example("resnet")(classes=100, image_size=64, width=32)
    return model, {"images": torch.randn(samples, 3, 64, 64), "labels": torch.arange(samples) % 100}


def mlp(samples: int) -> tuple[nn.Module, Inputs]:
    """784 features, 4 layers of 512, 10 classes."""
    model, _ = _example("mlp")(features=784, width=512, depth=4, classes=10)
    return model, {"x": torch.randn(samples, 784), "labels": torch.arange(samples) % 10}


def _example(stem: str) -> Any:
    """The factory of examples/STEM.py."""
    spec = importlib.util.spec_from_file_location(f"example_{stem}", EXAMPLES / f"{stem}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, {"resnet": "resnet_small", "mlp": "mlp"}[stem])


# (maker, samples per step)
MODELS: dict[str, tuple[Callable[[int], tuple[nn.Module, Inputs]], int]] = {
    "Llama": (llama, 4),
    "GPT-2": (gpt2, 4),
    "BERT": (bert, 4),
    "ViT": (vit, 8),
    "ResNet": (resnet, 32),
    "MLP": (mlp, 128),
}


def make(name: str, samples: int | None = None) -> tuple[nn.Module, Inputs]:
    """A model in fp32 and training mode, with random weights that are always the same, and its inputs."""
    torch.manual_seed(0)
    maker, usual = MODELS[name]
    model, inputs = maker(samples or usual)
    return model.float().train(), inputs
