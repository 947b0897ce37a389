"""A recommender after DLRM (Naumov et al., "Deep Learning Recommendation Model", 2019): embedding tables for
categories, a bottom MLP for numbers, pairwise interactions, a top MLP and a binary loss.

    autoparallel plan examples/dlrm.py:dlrm --model-arg tables=26 --cluster h100-sxm:1x8 -o strategy.toml
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


def mlp(sizes: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """Each sample has `dense` numbers and one category for each of `tables` embedding tables."""

    def __init__(
        self, tables: int, rows: int, dim: int, dense: int, bottom: tuple[int, ...], top: tuple[int, ...]
    ) -> None:
        super().__init__()
        # One category a table and sample: an EmbeddingBag of one, which DTensor could not shard.
        self.embeddings = nn.ModuleList(nn.Embedding(rows, dim) for _ in range(tables))
        self.bottom = mlp((dense, *bottom, dim))
        pairs = (tables + 1) * tables // 2
        self.top = mlp((dim + pairs, *top, 1))
        first, second = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.register_buffer("first", first)
        self.register_buffer("second", second)

    def forward(self, numbers: Tensor, categories: Tensor, clicked: Tensor | None = None) -> Tensor:
        dense = self.bottom(numbers)
        looked_up = [table(categories[:, i]) for i, table in enumerate(self.embeddings)]
        features = torch.stack([dense, *looked_up], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        interactions = products[:, self.first, self.second]
        logits: Tensor = self.top(torch.cat([dense, interactions], dim=1)).squeeze(1)
        if clicked is None:
            return logits
        return nn.functional.binary_cross_entropy_with_logits(logits, clicked)


def dlrm(
    tables: int = 26, rows: int = 1_000_000, dim: int = 128, dense: int = 13, samples: int = 64
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The MLPerf shape of DLRM, with tables of equal size; with `clicked`, `forward` returns the loss."""
    model = DLRM(tables, rows, dim, dense, bottom=(512, 256), top=(1024, 1024, 512, 256))
    return model.train(), {
        "numbers": torch.randn(samples, dense),
        "categories": torch.zeros(samples, tables, dtype=torch.int64),
        "clicked": torch.zeros(samples),
    }


def dlrm_small() -> tuple[nn.Module, dict[str, Tensor]]:
    """The same network, small enough for a test on a CPU."""
    model = DLRM(4, 50, 8, 5, bottom=(16,), top=(16, 8))
    return model.train(), {
        "numbers": torch.randn(2, 5),
        "categories": torch.zeros(2, 4, dtype=torch.int64),
        "clicked": torch.zeros(2),
    }
