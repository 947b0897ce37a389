"""Layers that compute each row by itself, asked for this rank's rows alone: without DTensor, whose rules their own functions
would need."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import handle_torch_function, has_torch_function

from autoparallel.runtime.context.values import of_parts, own_part


def tokens_of_shares(indices: Tensor, weight: Tensor) -> Tensor:
    """The indices that an embedding of `weight` looks up, cut along the sequence where context parallelism cuts them; as they are
    where none runs (`ContextParallel` overrides it, as it does torch's functions)."""
    if has_torch_function((indices, weight)):
        return handle_torch_function(tokens_of_shares, (indices, weight), indices, weight)
    return indices


def row_by_row(rows: Tensor, compute: Callable[[Tensor, int], Tensor], *, columns: int) -> Tensor | None:
    """`compute(part, ranks)` of this rank's part of `rows`, whose last dims, so many `columns`, make one row; None where cp holds
    them in another way than as shares of rows, or whole.

    `ranks` is what the gradients of weights are to be multiplied by, as their mean over cp is taken (`values.py`): 1 where every
    rank has all rows.
    """
    if not isinstance(rows, DTensor):
        return compute(rows, 1)
    mesh, held = rows.device_mesh, rows.placements[0]
    if mesh.ndim > 1 or not (held == Replicate() or type(held) is Shard):
        return None
    if isinstance(held, Shard) and held.dim >= rows.dim() - columns:
        return None
    ranks = mesh.size(0) if isinstance(held, Shard) else 1
    return of_parts(compute(own_part(rows, held), ranks), held, mesh)
