"""A transformers model as examples of its inputs are made for it: its settings, what its first layers read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Inputs = Mapping[str, Any]

# The sequence length where neither the user nor the model says one (kind: chosen).
DEFAULT_SEQ_LEN = 4096

# Samples in the example inputs. Capture chooses its own batch sizes.
SAMPLES = 2


@dataclass(frozen=True, slots=True)
class Model:
    """A module, its settings and the length of its sequences."""

    file: Path
    module: Any
    config: Any
    seq_len: int | None  # as the user asked

    @property
    def text(self) -> Any:
        """The settings of what reads tokens."""
        return text_settings(self.config)

    @property
    def length(self) -> int:
        longest = getattr(self.config, "max_text_len", None) or DEFAULT_SEQ_LEN
        return self.seq_len or min(_default_length(self.text), longest)

    def setting(self, *keys: str) -> Any:
        """The first of these settings that the model, or a part of it, has."""
        parts = [getattr(self.config, name, None) for name in getattr(self.config, "sub_configs", ())]
        for key in keys:
            for config in (self.config, *parts):
                if (value := getattr(config, key, None)) is not None:
                    return value
        return None


def text_settings(config: Any) -> Any:
    """The settings of what reads tokens; of two that do, an encoder and a decoder, those of the decoder."""
    try:
        return config.get_text_config()
    except ValueError:
        return config.get_text_config(decoder=True)


def _default_length(config: Any) -> int:
    for key in ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len"):
        length = getattr(config, key, None)
        if isinstance(length, int) and length > 0:
            return min(length, DEFAULT_SEQ_LEN)
    return DEFAULT_SEQ_LEN


def first_width(module: torch.nn.Module, kinds: tuple[type, ...]) -> int | None:
    """How many numbers the first layer of these kinds reads at a place: bands of sound, values of a patch."""
    for part in module.modules():
        if isinstance(part, kinds):
            weight = part.get_parameter("weight")
            return int(weight.shape[1] if weight.dim() < 4 else weight[0].numel())
    return None


def floats(model: Model, *shape: int) -> torch.Tensor:
    """Of this shape for each sample, without values, in the dtype of the model's parameters."""
    dtype = next(p.dtype for p in model.module.parameters() if p.is_floating_point())
    return torch.empty((SAMPLES, *shape), dtype=dtype, device="meta")
