"""DTensor rules that torch lacks, registered through its public (experimental) interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication, register_sharding

_aten = torch.ops.aten
_BATCH, _HEADS = 0, 1  # dims of query, key, value: batch, heads, length, head size
_held: list[Any] = []


def allow_plain_tensors() -> None:
    """Let operators mix DTensors with plain tensors, which then count as replicated; for the process."""
    if not _held:
        context = implicit_replication()
        context.__enter__()  # never left: a backward pass outside our functions needs it as well
        _held.append(context)


def register_missing_rules() -> None:
    """Flash attention on the CPU: batch or heads may be sharded. Idempotent."""
    register_sharding(_aten._scaled_dot_product_flash_attention_for_cpu.default)(_flash_forward)
    register_sharding(_aten._scaled_dot_product_flash_attention_for_cpu_backward.default)(_flash_backward)


_Rows = Sequence[tuple[list[Any], list[Any]]]


def _flash_forward(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    **_: Any,
) -> _Rows:
    """(output, logsumexp) from (query, key, value, dropout_p, is_causal, attn_mask)."""
    rows: list[tuple[list[Any], list[Any]]] = []
    for placement in (Replicate(), Shard(_HEADS), Shard(_BATCH)):
        mask = [] if attn_mask is None else [_mask(attn_mask, placement)]
        rows.append(([placement] * 2, [placement] * 3 + mask))
    return rows


def _flash_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    *rest: Any,
    attn_mask: Any = None,
    **_: Any,
) -> _Rows:
    rows: list[tuple[list[Any], list[Any]]] = []
    for placement in (Replicate(), Shard(_HEADS), Shard(_BATCH)):
        mask = [] if attn_mask is None else [_mask(attn_mask, placement)]
        rows.append(([placement] * 3, [placement] * 6 + mask))
    return rows


def _mask(mask: Any, placement: Any) -> Any:
    """The mask's own layout: sharded along with the scores unless that dim is broadcast."""
    if not isinstance(placement, Shard):
        return placement
    from_right = 4 - placement.dim
    if len(mask.shape) < from_right or mask.shape[-from_right] == 1:
        return Replicate()
    return Shard(len(mask.shape) - from_right)
