"""Torch's multi-head attention (`nn.MultiheadAttention`, `nn.TransformerEncoderLayer`), its heads in a dim of their own.

Torch's function joins samples and heads in one dim, [token, sample x head, size], and no device can then hold the heads
of all samples. Here they stay apart, [sample, head, token, size], over the same kernels and the same storages: heads are
divided over the ranks of tensor parallelism as in any other attention. Capture reads this form, and ranks that share
tensors or sequences run it.
"""

# The signatures are torch's.
# ruff: noqa: ARG001

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MULTI_HEAD = F.multi_head_attention_forward
_SAMPLES = 3  # dims of rows with samples: token, sample, width


def heads_apart(func: Any, args: Any, kwargs: Any) -> Callable[[], tuple[Tensor, Tensor | None]] | None:
    """What runs instead of torch's multi-head attention, and gives the same up to rounding. None for other functions, and for what
    is seldom used: keys that are added (`add_bias_kv`, `add_zero_attn`) or given (`static_k`); and for sizes that do not fit, of
    which torch's own code speaks."""
    if func is not MULTI_HEAD or not _is_plain(*args, **kwargs):
        return None
    return lambda: _by_heads(*args, **kwargs)


def _is_plain(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, heads: int, weight: Any, bias: Any, bias_k: Any, bias_v: Any,
    add_zero_attn: bool, *_: Any, **options: Any,
) -> bool:  # fmt: skip
    added = (bias_k, bias_v, options.get("static_k"), options.get("static_v"))
    return (
        not add_zero_attn and all(t is None for t in added) and _fits(query, key, embed_dim, heads, options)
    )


def _by_heads(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, heads: int, weight: Tensor | None, bias: Tensor | None,
    bias_k: None, bias_v: None, add_zero_attn: bool, dropout: float, out_weight: Tensor, out_bias: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The arguments are torch's: query [token, sample, width], key and value alike, or without a sample."""
    if options.get("use_separate_proj_weight", False):
        own = [options[f"{name}_proj_weight"] for name in "qkv"]
    else:
        assert weight is not None
        own = [weight]
    is_one = query.dim() < _SAMPLES
    parts = _projected(query, key, value, own, bias)
    q, k, v = (
        (t.unsqueeze(1) if is_one else t).unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for t in parts
    )
    hidden, is_causal = _hidden(q, k, options)
    rate = dropout if options.get("training", True) else 0.0
    weights = None
    if options.get("need_weights", True):
        scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
        weights = (scores if hidden is None else hidden + scores).softmax(-1)
        weights = F.dropout(weights, rate) if rate else weights
        result = weights @ v
        if options.get("average_attn_weights", True):
            # Where heads are on several ranks these are parts of a sum, exchanged only if somebody reads it.
            weights = weights.sum(1) / heads
    else:
        result = F.scaled_dot_product_attention(q, k, v, hidden, rate, is_causal)
    length, samples = q.shape[2], q.shape[0]
    out = F.linear(result.permute(2, 0, 1, 3).reshape(length * samples, embed_dim), out_weight, out_bias)
    out = out.view(length, samples, embed_dim)
    if is_one:
        return out.squeeze(1), None if weights is None else weights.squeeze(0)
    return out, weights


def _fits(query: Tensor, key: Tensor, embed_dim: int, heads: int, options: dict[str, Any]) -> bool:
    mask = options.get("attn_mask")
    samples = query.shape[1] if query.dim() == _SAMPLES else 1
    pairs = (query.shape[0], key.shape[0])
    fits = mask is None or tuple(mask.shape) in {pairs, (samples * heads, *pairs)}
    return (
        fits
        and query.dim() in {_SAMPLES - 1, _SAMPLES}
        and query.shape[-1] == embed_dim
        and embed_dim % heads == 0
    )


def _projected(
    query: Tensor, key: Tensor, value: Tensor, weights: Sequence[Tensor], bias: Tensor | None
) -> tuple[Tensor, ...]:
    """Queries, keys and values [token, sample, width], of three weights or one for all; then one product where all are made of one
    tensor."""
    if len(weights) == 1 and query is key is value:
        made = torch.stack(F.linear(query, weights[0], bias).chunk(3, -1))  # one storage, as torch's own
        return made[0], made[1], made[2]
    own = weights[0].chunk(3) if len(weights) == 1 else weights
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return tuple(F.linear(t, w, b) for t, w, b in zip((query, key, value), own, biases, strict=True))


def _hidden(q: Tensor, k: Tensor, options: dict[str, Any]) -> tuple[Tensor | None, bool]:
    """What is added to the scores [sample, head, query, key] (or broadcasts to them), and whether later keys are hidden besides."""
    mask, padding = options.get("attn_mask"), options.get("key_padding_mask")
    is_causal = options.get("is_causal", False)
    if is_causal and mask is None:
        raise RuntimeError(
            "is_causal tells what attn_mask is: give it, too (nn.Transformer.generate_square_subsequent_mask)"
        )
    if is_causal and padding is None and not options.get("need_weights", True):
        return None, True
    if mask is not None:
        mask = _as_numbers(mask, q)
        mask = mask[None, None] if mask.dim() < _SAMPLES else mask.unflatten(0, (q.shape[0], q.shape[1]))
    if padding is not None:
        padding = (
            _as_numbers(padding, q).view(-1, 1, 1, k.shape[2]).expand(-1, q.shape[1], -1, -1).contiguous()
        )
        mask = padding if mask is None else mask + padding
        is_causal = False
    return mask, is_causal


def _as_numbers(mask: Tensor, like: Tensor) -> Tensor:
    """A mask of flags (True: hidden) as numbers to add, of the dtype of `like`."""
    if mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)
