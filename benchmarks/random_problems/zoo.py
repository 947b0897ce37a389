"""Models that no Hugging Face config describes. Imports torch: only `capture.py` reads it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.dlrm import DLRM
from examples.mlp import MLP
from examples.resnet import ResNet

Made = tuple[nn.Module, dict[str, Tensor]]


class TaperedLayer(nn.Module):
    """Norm, attention, norm, MLP of its own width."""

    def __init__(self, hidden: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, width), nn.Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (m(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(-2))
        result: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return result


class Tapered(nn.Module):
    """A causal language model with a width for each layer."""

    def __init__(self, hidden: int, heads: int, widths: list[int], vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(TaperedLayer(hidden, heads, width) for width in widths)
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def tapered(hidden: int, heads: int, widths: list[int], vocabulary: int, seq_len: int) -> Made:
    tokens = torch.zeros(2, seq_len, dtype=torch.int64)
    return Tapered(hidden, heads, widths, vocabulary).train(), {"input_ids": tokens, "labels": tokens}


def convnet(layers: list[int], width: int, image_size: int) -> Made:
    images = torch.randn(2, 3, image_size, image_size)
    model = ResNet(tuple(layers), width, 1000)
    return model.train(), {"images": images, "labels": torch.zeros(2, dtype=torch.int64)}


def recommender(tables: int, rows: int, dim: int, top: list[int]) -> Made:
    model = DLRM(tables, rows, dim, 13, bottom=(512, 256), top=tuple(top))
    return model.train(), {
        "numbers": torch.randn(64, 13),
        "categories": torch.zeros(64, tables, dtype=torch.int64),
        "clicked": torch.zeros(64),
    }


def mlp(features: int, width: int, depth: int, classes: int) -> Made:
    model = MLP(features, width, depth, classes)
    return model.train(), {"x": torch.randn(2, features), "labels": torch.zeros(2, dtype=torch.int64)}
