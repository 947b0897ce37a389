"""Products of rows and a weight where tensor parallelism cuts the weight and context parallelism the rows.

Rows do not depend on each other: each rank of cp multiplies its own, on the axis tp alone, by what DTensor's rules for
that axis say. Asked for both axes at once, it gathers some of the rows (torch 2.13: of an `addmm` whose contracted dim
tp shards, and of weights that hold several parts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from autoparallel.runtime.context.values import of_parts, on_mesh, own_part, used_by_shares
from autoparallel.runtime.torch_private import parts_of

# Where the rows stand among the arguments.
_ROWS = {
    F.linear: 0, torch.addmm: 1, torch.mm: 0, torch.matmul: 0, Tensor.mm: 0, Tensor.matmul: 0, Tensor.__matmul__: 0,
}  # fmt: skip


def product(mesh: DeviceMesh, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DTensor | None:
    """`func(*args, **kwargs)` if it is a product of rows that cp cuts and of weights that know nothing of it, else
    None."""
    at = _ROWS.get(func)
    if at is None or len(args) <= at or not on_mesh(args[at], mesh):
        return None
    rows: DTensor = args[at]
    others = [*args[:at], *args[at + 1 :], *kwargs.values()]
    if any(isinstance(t, Tensor) and (on_mesh(t, mesh) or t.dim() > 2) for t in others):
        return None
    if not _along_rows(rows):
        return None
    held = rows.placements[0]
    part = own_part(rows, held)
    given = [part if i == at else used_by_shares(a, mesh) for i, a in enumerate(args)]
    result = func(*given, **{name: used_by_shares(a, mesh) for name, a in kwargs.items()})
    return of_parts(result, held, mesh)


def _along_rows(rows: DTensor) -> bool:
    """Whether cp cuts another dim than the contracted one, and tp none that cp cuts."""
    dims = [_dim(p) for p in rows.placements]
    return dims[0] is not None and dims[0] < rows.dim() - 1 and dims[0] not in dims[1:]


def _dim(placement: Placement) -> int | None:
    if (parts := parts_of(placement)) is not None:
        return parts[0]
    return placement.dim if isinstance(placement, Shard) else None
