"""Small models of transformers whose layers go over a sequence, by the library that has kernels for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import (
    AutoModelForCausalLM,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Mamba2Config,
    MambaConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
)

VOCABULARY, WIDTH = 64, 32
_SHARED = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "use_cache": False}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "head_dim": 8,
    "mlp_only_layers": [0, 1, 2, 3], "num_experts": 0,
}  # fmt: skip

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "mamba": lambda: MambaConfig(**_SHARED, num_hidden_layers=2, state_size=4, time_step_rank=4),
    "jamba": lambda: JambaConfig(
        **_SHARED,
        **_ATTENTION,
        num_hidden_layers=4,
        mamba_d_state=4,
        mamba_dt_rank=4,
        num_experts=1,
        attn_layer_period=2,
        attn_layer_offset=1,
    ),
    "mamba2": lambda: Mamba2Config(
        **_SHARED, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8, n_groups=1, chunk_size=16
    ),
    "qwen3_next": lambda: Qwen3NextConfig(**_SHARED, **_ATTENTION, **_DELTA, num_hidden_layers=4),
    "kimi_linear": lambda: KimiLinearConfig(**_SHARED, **_ATTENTION, num_hidden_layers=2),
    "lfm2": lambda: Lfm2Config(
        **_SHARED, **_ATTENTION, num_hidden_layers=4, layer_types=["conv", "conv", "full_attention", "conv"]
    ),
}


def hybrid(name: str, **settings: Any) -> nn.Module:
    """The model, in training."""
    made: nn.Module = AutoModelForCausalLM.from_config(CONFIGS[name](), **settings)
    return made.float().train()
