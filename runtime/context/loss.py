"""Cross entropy of shares of a sequence: sums over this rank's tokens, added up; logits stay where they are."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autoparallel.runtime.context.values import of_parts, on_mesh, own_part, placed, whole
from autoparallel.runtime.tensor import cross_entropy as by_class
from autoparallel.runtime.torch_private import parts_of

_SIGNATURE = inspect.signature(F.cross_entropy)


def cross_entropy(mesh: DeviceMesh, *args: Any, **kwargs: Any) -> DTensor | None:
    """`F.cross_entropy` of logits sharded over cp along another dim than the classes; None if they are not."""
    call = _SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    logits, target = given["input"], given["target"]
    if not on_mesh(logits, mesh) or target.is_floating_point():
        return None
    if given["size_average"] is not None or given["reduce"] is not None:
        return None
    classes = 1 if logits.dim() > 1 else 0
    rows = _without(logits.placements[0], classes)
    if rows is None:
        return None
    target = whole(target, mesh)
    own, reduction = _own(target, rows, mesh), given["reduction"]
    part = own_part(logits, logits.placements[0])
    losses = _losses(part, own, given, "none" if reduction == "none" else "sum")
    if reduction == "none":
        return of_parts(losses, rows, mesh)
    if reduction == "mean":
        losses = losses / _counted(target, given).to(losses.dtype)
    return placed(of_parts(losses, Partial(), mesh), Replicate())


def _without(placement: Placement, classes: int) -> Placement | None:
    """Where what is left of the logits lies when the dim of the classes has gone; None if it is not sharded, or by
    class."""
    if (parts := parts_of(placement)) is not None:
        return placement if parts[0] < classes else None
    if type(placement) is not Shard or placement.dim == classes:
        return None
    return Shard(placement.dim - (placement.dim > classes))


def _own(target: Tensor, rows: Placement, mesh: DeviceMesh) -> Tensor:
    """The targets of this rank's rows."""
    ranks, rank = mesh.size(0), mesh.get_local_rank(0)
    if (parts := parts_of(rows)) is not None:
        dim, count = parts
        own: Tensor = target.unflatten(dim, (count, -1)).chunk(ranks, dim + 1)[rank]
        return own.flatten(dim, dim + 1)
    assert isinstance(rows, Shard)
    return target.chunk(ranks, rows.dim)[rank]


def _losses(part: Tensor, target: Tensor, given: Mapping[str, Any], reduction: str) -> Tensor:
    """Cross entropy of this rank's rows; `part` is plain, or sharded by class over tp."""
    options = {"ignore_index": given["ignore_index"], "reduction": reduction}
    if isinstance(part, DTensor):
        plain = given["weight"] is None and not given["label_smoothing"]
        if plain and part.placements == (Shard(1),) and part.shape[1] % part.device_mesh.size() == 0:
            return by_class.cross_entropy(part, target, **options)
        part = part.full_tensor()
    losses: Tensor = F.cross_entropy(
        part, target, weight=given["weight"], label_smoothing=given["label_smoothing"], **options
    )
    return losses


def _counted(target: Tensor, given: Mapping[str, Any]) -> Tensor:
    """What the mean divides by: the number, or the weight, of the targets of the whole sequence that count."""
    counts: Tensor = target != given["ignore_index"]
    if given["weight"] is None:
        return counts.sum()
    return given["weight"][target[counts]].sum()  # type: ignore[no-any-return]
