"""Tiny models of sequences whose code does, in shares, what DTensor and the attention kernels leave to be done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.runtime.models import LENGTH, VOCABULARY, Example, language_loss, llama, rule

WIDTH, HEADS = 32, 4


class _Attention(nn.Module):
    """A fused projection, a window written as a mask, and a learned bias per head and distance."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, 2 * LENGTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        query, key, value = (
            part.view(samples, length, HEADS, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        position = torch.arange(length, device=x.device)
        distance = position[:, None] - position[None, :]
        mask = self.bias[:, distance + LENGTH].masked_fill((distance < 0) | (distance > 4), float("-inf"))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask.unsqueeze(0))
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), _Attention()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.scale * self.down(F.silu(self.up(x)))


class _Transformer(nn.Module):
    """Positions are rows of a parameter, the head is the table of tokens, read where no module is called."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(2 * LENGTH, WIDTH))
        self.blocks = nn.ModuleList(_Block() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions[torch.arange(ids.shape[1])]
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.tokens.weight)


class _OddBlock(nn.Module):
    """What mixes neighbours, runs along the sequence, or writes into tensors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.gate = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        x = x + self.near(x.transpose(1, 2))[..., :length].transpose(1, 2)
        later = torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1)
        x = x + self.attention(x, x, x, attn_mask=later, need_weights=False)[0]
        running = x.cumsum(dim=1) / torch.arange(1, length + 1)[:, None]
        held = torch.zeros(x.shape[0], length, 2 * WIDTH, dtype=x.dtype)
        held[..., :WIDTH] = running * torch.sigmoid(self.gate)
        held[:, :, WIDTH:] = x
        x = held[..., :WIDTH] + held[..., WIDTH:].roll(1, dims=1) + x[:, :1] + x.mean(dim=1, keepdim=True)
        return F.layer_norm(x, (WIDTH,)) + self.norm(x.transpose(1, 2)).transpose(1, 2)


class _Odd(nn.Module):
    """Returns its loss: of all positions but the last, plus a penalty that no token has a part in."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(_OddBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = F.cross_entropy(
            logits[:, :-1].transpose(1, 2), ids[:, 1:], ignore_index=3, label_smoothing=0.1
        )
        return loss + 0.1 * self.head.weight.square().mean() + 0.1 * logits.logsumexp(-1).square().mean()


class _ListedBlock(nn.Module):
    """Experts as modules of their own, each called with the tokens that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        by, chosen = self.router(tokens).softmax(-1).topk(2, dim=-1)
        made, also = torch.zeros_like(tokens), torch.zeros(tokens.shape, dtype=x.dtype)
        for number, expert in enumerate(self.experts):
            row, choice = torch.where(chosen == number)
            weighted = expert(tokens[row]) * by[row, choice, None]
            made.index_add_(0, row, weighted)
            also[row] += weighted.tanh()
        return x + (made + also).view(x.shape)


class _Listed(_Transformer):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_ListedBlock() for _ in range(2))


def _sequence(module: nn.Module, batch: int, *, loss: bool) -> Example:
    ids = torch.randint(0, VOCABULARY, (batch, LENGTH))
    return Example(
        module=module,
        blocks=("blocks.0", "blocks.1"),
        inputs=ids,
        targets=ids.roll(-1, dims=1) if loss else None,
        loss_fn=(lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()))
        if loss
        else None,
        rules=lambda _: [],
    )


def listed(batch: int) -> Example:
    rules = [
        rule("blocks.*.experts.*.0", "shard(-1)", params={"weight": "shard(0)", "bias": "shard(0)"}),
        rule("blocks.*.experts.*.2", "replicate", params={"weight": "shard(1)"}),
    ]
    return replace(_sequence(_Listed(), batch, loss=True), rules=lambda _: rules)


def own(batch: int) -> Example:
    return _sequence(_Transformer(), batch, loss=True)


def odd(batch: int) -> Example:
    return _sequence(_Odd(), batch, loss=False)


def eager_llama(batch: int) -> Example:
    """Attention written out: products, a mask that is added, a softmax."""
    example = llama(batch)
    example.module.config._attn_implementation = "eager"
    return example


def bert(batch: int) -> Example:
    """Not causal, some tokens padded."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS,
        intermediate_size=48, max_position_embeddings=2 * LENGTH, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    ids = torch.randint(0, VOCABULARY, (batch, LENGTH))
    attended = torch.ones_like(ids)
    attended[::2, -3:] = 0
    labels = ids.masked_fill(torch.rand(ids.shape) > 0.5, -100)
    return Example(
        module=BertForMaskedLM(config),
        blocks=("bert.encoder.layer.0", "bert.encoder.layer.1"),
        inputs={"input_ids": ids, "attention_mask": attended},
        targets=labels,
        loss_fn=language_loss,
        rules=lambda _: [],
    )


def bert_with_labels(batch: int) -> Example:
    """The loss of some tokens only, taken inside the model."""
    example = bert(batch)
    return replace(example, inputs=example.inputs | {"labels": example.targets}, targets=None, loss_fn=None)


SEQUENCES: dict[str, Callable[[int], Example]] = {
    f.__name__: f for f in (own, odd, listed, eager_llama, bert, bert_with_labels)
}
