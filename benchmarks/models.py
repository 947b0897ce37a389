"""Decoder-only language models of the published runs, as ordinary torch modules: one class, four families.

gpt       learned positions, LayerNorm, GELU, biases
mpt       ALiBi (inside the attention kernel, so nothing here), LayerNorm, GELU, no biases
llama     rotary positions, RMSNorm, SwiGLU, no biases
nemotron  rotary positions, LayerNorm, squared ReLU, no biases
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Everything that decides a model's cost but its depth."""

    family: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden: int
    gated: bool
    vocab: int
    tied: bool
    seq_len: int
    rotary: bool
    dropout: float = 0.0
    experts: int = 0
    experts_per_token: int = 0
    fused_norm: bool = False  # RMSNorm as one kernel that keeps its input
    loss: Literal["fp32", "half", "kept"] = "fp32"  # see `LanguageModel.loss`


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of (batch, heads, length, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape, bias: bool) -> None:
        super().__init__()
        self.shape = shape
        self.qkv = nn.Linear(shape.hidden, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, bias=bias)
        self.out = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=bias)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        s = self.shape
        # Megatron's layout: each key-value head beside the query heads that share it, so that heads shard whole.
        queries = s.heads // s.kv_heads
        grouped_heads = self.qkv(x).unflatten(-1, (s.kv_heads, queries + 2, s.head_dim))
        q, k, v = grouped_heads.split([queries, 1, 1], dim=3)
        q, k, v = (t.flatten(2, 3).transpose(1, 2) for t in (q, k, v))
        if cos is not None and sin is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        dropout = s.dropout if self.training else 0.0
        grouped = s.kv_heads != s.heads
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=grouped)
        return self.out(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, shape: Shape, bias: bool) -> None:
        super().__init__()
        self.family = shape.family
        self.gate = nn.Linear(shape.hidden, shape.ffn_hidden, bias=bias) if shape.gated else None
        self.up = nn.Linear(shape.hidden, shape.ffn_hidden, bias=bias)
        self.down = nn.Linear(shape.ffn_hidden, shape.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        if self.family == "nemotron":
            return self.down(F.relu(self.up(x)).square())
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Experts(nn.Module):
    """The gated products of all experts, rows sorted by expert (grouped products, as Megatron and torchtitan run)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        gated = 2 if shape.gated else 1
        self.shape = shape
        self.up = nn.Parameter(torch.empty(shape.experts, shape.hidden, gated * shape.ffn_hidden))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.ffn_hidden, shape.hidden))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        y = F.grouped_mm(rows, self.up, offs=ends)
        if self.shape.gated:
            gate, y = y.chunk(2, dim=-1)
            return F.grouped_mm(F.silu(gate) * y, self.down, offs=ends)
        return F.grouped_mm(F.gelu(y, approximate="tanh"), self.down, offs=ends)


class MixtureOfExperts(nn.Module):
    """Each token through its `experts_per_token` best experts, weighted by the router."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = Experts(shape)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chosen = self.router(flat).float().softmax(-1).topk(self.shape.experts_per_token, dim=-1)
        expert = chosen.indices.flatten()
        order = expert.argsort()
        counts = expert.histc(bins=self.shape.experts, min=0, max=self.shape.experts - 1)
        rows = self.experts(flat[order // self.shape.experts_per_token], counts.cumsum(0).to(torch.int32))
        weighted = rows * chosen.values.flatten()[order].to(rows.dtype).unsqueeze(-1)
        mixed = torch.zeros_like(flat).index_add(0, order // self.shape.experts_per_token, weighted)
        return mixed.unflatten(0, x.shape[:2])


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        bias = shape.family == "gpt"
        norm = make_norm(shape)
        self.norm1, self.norm2 = norm(), norm()
        self.attn = Attention(shape, bias)
        self.mlp = MixtureOfExperts(shape) if shape.experts else Mlp(shape, bias)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attn(self.norm1(x), cos, sin))
        return x + self.dropout(self.mlp(self.norm2(x)))


def make_norm(shape: Shape) -> Any:
    """The family's normalisation, as a constructor. torch runs RMSNorm as several operators, LayerNorm as one."""
    if shape.family == "llama" and not shape.fused_norm:
        return lambda: nn.RMSNorm(shape.hidden)
    return lambda: nn.LayerNorm(shape.hidden, bias=shape.family in ("gpt", "nemotron"))


class LanguageModel(nn.Module):
    """Embedding, layers, norm, head, and the loss over the vocabulary."""

    def __init__(self, shape: Shape, layers: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        learned = shape.family == "gpt" and not shape.rotary
        self.positions = nn.Embedding(shape.seq_len, shape.hidden) if learned else None
        self.dropout = nn.Dropout(shape.dropout)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(layers))
        self.norm = make_norm(shape)()
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, ...]:
        place = torch.arange(self.shape.seq_len, device=tokens.device)
        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions(place)
        rotation: tuple[Tensor, ...] = ()
        if self.shape.rotary:
            half = torch.arange(0, self.shape.head_dim, 2, device=tokens.device) / self.shape.head_dim
            angles = (place[:, None] * 10_000.0 ** -half[None, :]).repeat(1, 2)
            rotation = (angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x, *rotation)
        return self.loss(self.head(self.norm(x)), labels.flatten())

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Cross-entropy of an fp32 copy of the logits; of the logits themselves ("half"); or of a copy that stays
        alive, as do the logits, in the two steps of torch's own loss ("kept")."""
        if self.shape.loss == "half":
            return F.cross_entropy(logits.flatten(0, 1), labels)
        scores = logits.float().flatten(0, 1)
        if self.shape.loss == "kept":
            return F.nll_loss(F.log_softmax(scores, dim=-1), labels), logits, scores
        return F.cross_entropy(scores, labels)


def build(shape: Shape, layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model on the meta device in bf16, and example inputs of two samples."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = LanguageModel(shape, layers).train()
            tokens, labels = (torch.zeros(2, shape.seq_len, dtype=torch.int64) for _ in range(2))
    finally:
        torch.set_default_dtype(before)
    return model, {"tokens": tokens, "labels": labels}
