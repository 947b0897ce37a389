"""A plain multi-layer perceptron of equal layers.

autoparallel plan examples/mlp.py:mlp --model-arg width=8192 --cluster h100-sxm:1x8 -o strategy.toml
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    """A linear layer and its activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class MLP(nn.Module):
    """`depth` equal layers between an input and an output layer."""

    def __init__(self, features: int, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.input = nn.Linear(features, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.output = nn.Linear(width, classes)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        x = torch.relu(self.input(x))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.output(x)
        return logits if labels is None else nn.functional.cross_entropy(logits, labels)


def mlp(
    features: int = 784, width: int = 4096, depth: int = 8, classes: int = 10
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The network and two labelled samples; with the labels, `forward` returns the loss."""
    model = MLP(features, width, depth, classes)
    return model.train(), {"x": torch.randn(2, features), "labels": torch.zeros(2, dtype=torch.int64)}
