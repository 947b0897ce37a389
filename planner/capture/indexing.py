"""What an index takes: one of several equal parts; and what torch checks of a mask, which the meta device is not asked, as it is
given places instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_FULL = slice(None)


def part_taken(index: object, shape: Sequence[int]) -> tuple[int, int, int] | None:
    """The dim of which `x[index]` is one of several equal parts, whole in all others, which one it is, and how many there are; None
    for any other index of an x of this shape."""
    given: list[object] = list(index) if isinstance(index, tuple) else [index]
    places = [at for at, one in enumerate(given) if one is Ellipsis]
    if len(places) == 1:
        given[places[0] : places[0] + 1] = [_FULL] * (len(shape) - len(given) + 1)
    found = None
    for dim, one in enumerate(given):
        numbers = (one.start, one.stop, one.step) if isinstance(one, slice) else ("",)
        if any(number is not None and not isinstance(number, int) for number in numbers):
            return None
        assert isinstance(one, slice)
        start, stop, step = one.indices(shape[dim])
        size = stop - start
        if (size, step) == (shape[dim], 1):
            continue
        if found is not None or step != 1 or size <= 0 or shape[dim] % size or start % size:
            return None
        found = dim, start // size, shape[dim] // size
    return found


def check_mask(mask: torch.Tensor, picked_from: torch.Tensor, dim: int) -> None:
    """Refuse, as torch does, a mask of another shape than what it picks from."""
    of = picked_from.shape[dim : dim + mask.dim()]
    if mask.shape != of:
        raise IndexError(
            f"The shape of the mask {list(mask.shape)} does not match that of what it picks from {list(of)}"
        )


def check_rows(table: torch.Tensor, rows: torch.Tensor | None) -> None:
    """Refuse, as torch does, to look up rows (None: nobody knows which) that a table does not have."""
    if rows is None or not rows.numel():
        return
    least, most = (int(one) for one in torch.aminmax(rows))
    if least < 0 or most >= table.shape[0]:
        raise IndexError(
            f"index out of range: row {least if least < 0 else most} of a table of {table.shape[0]} rows is looked up"
        )


def check_put(into: torch.Tensor, places: list[Any], values: torch.Tensor) -> None:
    """Refuse, as torch does, to put values in more or fewer places than they are."""
    if any(index is not None and index.dtype is torch.bool for index in places):
        return
    shape = torch.ops.aten.index.Tensor(into, places).shape
    try:
        fits = torch.broadcast_shapes(values.shape, shape) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing result of shape "
            f"{list(shape)}"
        )
