"""Transformer layers as people write them: attention in the layer itself, fused or not, by hand or by torch's own function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    """Norm, attention, norm, MLP; all in the layer itself."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head = heads, hidden // heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v = (nn.Linear(hidden, hidden, bias=False) for _ in range(3))
        self.o, self.up, self.down = (
            nn.Linear(hidden, hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, hidden),
        )

    def parts(self, y: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values [sample, head, token, dim]."""
        return [m(y).unflatten(-1, (self.heads, self.head)).transpose(1, 2) for m in (self.q, self.k, self.v)]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def mix(self, y: Tensor) -> Tensor:
        out: Tensor = self.o(self.attend(*self.parts(y)).transpose(1, 2).flatten(2))
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class ByHand(Layer):
    """Scores, mask and softmax written out."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(self.head)
        return scores.masked_fill(hidden, -1e9).softmax(-1) @ v


class ByEinsum(Layer):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(self.head)
        return torch.einsum("bhts,bhsd->bhtd", weights.softmax(-1), v)


class Rotated(Layer):
    """Rotary positions."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        angles = torch.outer(
            torch.arange(q.shape[2], device=q.device),
            1.0 / torch.arange(1, self.head // 2 + 1, device=q.device),
        )
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)

        def rotated(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

        return super().attend(rotated(q), rotated(k), v)


class Fused(Layer):
    """One projection to queries, keys and values."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__(hidden, heads)
        del self.q, self.k, self.v
        self.qkv = nn.Linear(hidden, 3 * hidden)

    def parts(self, y: Tensor) -> Sequence[Tensor]:
        return [
            one.unflatten(-1, (self.heads, self.head)).transpose(1, 2) for one in self.qkv(y).chunk(3, -1)
        ]


class Sliced(Fused):
    """Its parts are taken one by one."""

    def parts(self, y: Tensor) -> Sequence[Tensor]:
        made, width = self.qkv(y), self.heads * self.head
        parts = (made[..., :width], made[..., width : 2 * width], made[..., 2 * width :])
        return [one.unflatten(-1, (self.heads, self.head)).transpose(1, 2) for one in parts]


class Grouped(Layer):
    """Fewer keys and values than queries."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__(hidden, heads)
        self.k, self.v = (nn.Linear(hidden, hidden // 2, bias=False) for _ in range(2))

    def parts(self, y: Tensor) -> Sequence[Tensor]:
        q, *others = (m(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for m in (self.q, self.k, self.v))
        return [q, *(one.repeat_interleave(2, 1) for one in others)]


class Parallel(Layer):
    """Attention and MLP beside each other."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        result: Tensor = x + self.mix(y) + self.down(F.gelu(self.up(y)))
        return result


class WithoutNorm(Layer):
    """Attention reads the hidden state as it is."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class TorchAttention(Layer):
    """Attention is torch's module."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__(hidden, heads)
        del self.q, self.k, self.v, self.o
        self.attention = nn.MultiheadAttention(hidden, heads, batch_first=True)

    def mix(self, y: Tensor) -> Tensor:
        length = y.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=y.device).triu(1)
        out: Tensor = self.attention(y, y, y, attn_mask=later)[0]
        return out


class TorchLayer(nn.Module):
    """The whole layer is torch's."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            hidden, heads, 4 * hidden, dropout=0.0, batch_first=True, norm_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


# And how often a hidden state is gathered, or reduced and scattered, in a step (a reduction to all is both).
OWN_BLOCKS: dict[Callable[[int, int], nn.Module], int] = {
    Layer: 8, ByHand: 8, ByEinsum: 8, Rotated: 8, Fused: 8, Sliced: 8, Grouped: 8, Parallel: 6, TorchAttention: 8, TorchLayer: 8,
}  # fmt: skip


class OwnModel(nn.Module):
    """A causal language model of such layers, with its loss."""

    def __init__(
        self, layer: Callable[[int, int], nn.Module], hidden: int, heads: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(layer(hidden, heads) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
