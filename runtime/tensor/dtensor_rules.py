"""DTensor rules that torch lacks, registered through its public (experimental) interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication, register_sharding

from autoparallel.runtime.dtensor_private import let_views_copy, tell_masks_apart

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
    """Flash attention on the CPU: batch or heads may be sharded; efficient attention's bias, with a gradient or without.
    Views of shares that are laid out otherwise than the whole. Idempotent."""
    let_views_copy()
    register_sharding(_aten._scaled_dot_product_flash_attention_for_cpu.default)(_flash_forward)
    register_sharding(_aten._scaled_dot_product_flash_attention_for_cpu_backward.default)(_flash_backward)
    tell_masks_apart(_aten._scaled_dot_product_efficient_attention_backward.default)


_Rows = Sequence[tuple[list[Any], list[Any]]]


def _flash_forward(*_: Any, attn_mask: Any = None, **__: Any) -> _Rows:
    """(output, logsumexp) from (query, key, value), and the mask if there is one."""
    return _attention_rows(outputs=2, inputs=3, mask=attn_mask)


def _flash_backward(*_: Any, attn_mask: Any = None, **__: Any) -> _Rows:
    """Gradients of query, key, value from (grad, query, key, value, out, logsumexp), and the mask."""
    return _attention_rows(outputs=3, inputs=6, mask=attn_mask)


def _attention_rows(*, outputs: int, inputs: int, mask: Any) -> _Rows:
    rows: list[tuple[list[Any], list[Any]]] = []
    for placement in (Replicate(), Shard(_HEADS), Shard(_BATCH)):
        of_mask = [] if mask is None else [_mask(mask, placement)]
        rows.append(([placement] * outputs, [placement] * inputs + of_mask))
    return rows


def _mask(mask: Any, placement: Any) -> Any:
    """The mask's own layout: sharded along with the scores unless that dim is broadcast."""
    if not isinstance(placement, Shard):
        return placement
    from_right = 4 - placement.dim
    if len(mask.shape) < from_right or mask.shape[-from_right] == 1:
        return Replicate()
    return Shard(len(mask.shape) - from_right)
