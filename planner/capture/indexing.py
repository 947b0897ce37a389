"""What torch checks of an indexing by a mask, which the meta device is not asked: the mask is given to it as places."""

from __future__ import annotations

from typing import Any

import torch


def check_mask(mask: torch.Tensor, picked_from: torch.Tensor, dim: int) -> None:
    """Refuse, as torch does, a mask of another shape than what it picks from."""
    of = picked_from.shape[dim : dim + mask.dim()]
    if mask.shape != of:
        raise IndexError(
            f"The shape of the mask {list(mask.shape)} does not match that of what it picks from {list(of)}"
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
