"""Attention under context parallelism: this rank's queries against the keys and values of the whole sequence.

Keys and values are gathered over cp before the kernel, their gradients reduced and scattered after its backward.
Every rank has one share of the sequence in one piece, so that under a causal mask the last one compares most.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from autoparallel.runtime.context.random_numbers import drawn_apart
from autoparallel.runtime.context.values import cut, of_parts, on_mesh, onto, own_part, placed, used_by_shares
from autoparallel.runtime.torch_private import outside_tracing

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
        mask = None if rank == 0 else _causal(queries.shape[-_LENGTH], seen, query.device)
    run = functools.partial(
        F.scaled_dot_product_attention, dropout_p=dropout_p, is_causal=is_causal and rank == 0, scale=scale,
        enable_gqa=enable_gqa,
    )  # fmt: skip
    with drawn_apart(rank, queries.device, needed=dropout_p > 0):
        if attn_mask is None:
            result = _by_head(run, queries, keys, values, mask)
        else:
            result = run(queries, keys, values, attn_mask=mask)
    return of_parts(result, share, mesh)


def _by_head(run: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    """Attention of plain tensors where tp shards all three alike, by head or sample: no rule of DTensor's is asked."""
    if not (isinstance(query, DTensor) and isinstance(key, DTensor) and isinstance(value, DTensor)):
        return run(query, key, value, attn_mask=mask)
    alike = query.placements
    if not key.placements == value.placements == alike:
        return run(query, key, value, attn_mask=mask)
    plain = [t.to_local(grad_placements=alike) for t in (query, key, value)]
    return DTensor.from_local(run(*plain, attn_mask=mask), query.device_mesh, alike, run_check=False)


def _causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """What the last `queries` of `keys` positions see: on GPUs in the form that flash attention knows."""
    if device.type == "cuda":
        with outside_tracing():  # it is no tensor to recomputation of operators, which watches what is made
            from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler: a second

            return causal_lower_right(queries, keys)
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def _of_all(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Keys or values of the whole sequence; each rank has a part of their gradient."""
    return own_part(placed(onto(tensor, mesh), Replicate()), Partial())


def _own_rows(mask: Tensor, mesh: DeviceMesh) -> Tensor:
    """The mask of this rank's queries."""
    rows = mask.dim() - _LENGTH
    if rows < 0 or mask.shape[rows] == 1:  # one for all queries
        return own_part(placed(onto(mask, mesh), Replicate()), Partial()) if _follows(mask) else mask
    if not on_mesh(mask, mesh):  # all ranks have all of it: nothing is sent, either way
        size = mask.shape[rows] // mesh.size(0)
        return used_by_shares(mask, mesh).narrow(rows, mesh.get_local_rank(0) * size, size)  # type: ignore[no-any-return]
    return own_part(cut(mask, rows, mesh), Shard(rows))


def _follows(mask: Tensor) -> bool:
    """Whether the mask is more than a plain constant."""
    return mask.requires_grad or isinstance(mask, DTensor)
