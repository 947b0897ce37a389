"""Attention under context parallelism: this rank's queries against the keys and values of the whole sequence.

Keys and values are gathered over cp before the kernel, their gradients reduced and scattered after its backward.
Every rank has one share of the sequence in one piece, so that under a causal mask the last one compares most.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention.bias import causal_lower_right

from autoparallel.runtime.context_random import drawn_apart
from autoparallel.runtime.context_values import cut, of_parts, on_mesh, onto, own_part, placed

_LENGTH = 2  # of the sequence, counted from the last dim: batch, heads, length, head size


def in_shares(query: object, mesh: DeviceMesh) -> bool:
    """Whether these are queries of which every rank of cp has its share of the sequence."""
    if not isinstance(query, DTensor) or not on_mesh(query, mesh):
        return False
    return query.placements[0] == Shard(query.dim() - _LENGTH)


def attention(
    mesh: DeviceMesh, query: DTensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> DTensor:  # fmt: skip
    """`F.scaled_dot_product_attention` for queries that are `in_shares`."""
    length, ranks, rank = query.shape[-_LENGTH], mesh.size(0), mesh.get_local_rank(0)
    share = Shard(query.dim() - _LENGTH)
    queries = own_part(query, share)
    keys, values = _of_all(key, mesh), _of_all(value, mesh)
    mask = None if attn_mask is None else _own_rows(attn_mask, mesh)
    if is_causal:
        seen = (rank + 1) * (length // ranks)
        keys, values = (t.narrow(-_LENGTH, 0, seen) for t in (keys, values))
        mask = causal_lower_right(queries.shape[-_LENGTH], seen)
    with drawn_apart(rank, queries.device, needed=dropout_p > 0):
        result = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa
        )
    return of_parts(result, share, mesh)


def _of_all(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Keys or values of the whole sequence; each rank has a part of their gradient."""
    return own_part(placed(onto(tensor, mesh), Replicate()), Partial())


def _own_rows(mask: Tensor, mesh: DeviceMesh) -> Tensor:
    """The mask of this rank's queries."""
    rows = mask.dim() - _LENGTH
    if rows < 0 or mask.shape[rows] == 1:  # one for all queries
        return own_part(placed(onto(mask, mesh), Replicate()), Partial()) if _follows(mask) else mask
    if not _follows(mask):
        size = mask.shape[rows] // mesh.size(0)
        return mask.narrow(rows, mesh.get_local_rank(0) * size, size)
    return own_part(cut(mask, rows, mesh), Shard(rows))


def _follows(mask: Tensor) -> bool:
    """Whether the mask is more than a plain constant."""
    return mask.requires_grad or isinstance(mask, DTensor)
