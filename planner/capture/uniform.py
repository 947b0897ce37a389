"""Values that are the same all along a dim: masks that were expanded over heads and rows, answers that hold for every number.

They take the memory, and operators on them the time, of one entry of such dims.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

# Operators on every entry for itself that torch does not say are so.
_POINTWISE = frozenset({"_to_copy"})
# What these say of entries that are all the same is what they say of one.
OF_ALL = frozenset({"all", "any"})


def distinct(tensor: torch.Tensor) -> int:
    """How many entries a tensor keeps."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride or not size)


def compacted(
    func: Any, name: str, values: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], torch.Size] | None:
    """The inputs of an operator on every entry for itself with one entry of each dim along which none of them differs, and
    the shape to expand its result to; None for another operator."""
    if func._schema.is_mutable or not values:
        return None
    if name in OF_ALL and len(values) == 1 and len(func._schema.arguments) == 1 and values[0].numel():
        return [_one_of_each(values[0], values)], torch.Size()
    if torch.Tag.pointwise not in func.tags and name not in _POINTWISE:
        return None
    try:
        shape = torch.broadcast_shapes(*(value.shape for value in values))
    except RuntimeError:
        return None
    whole = [value.expand(shape) for value in values]
    return [_one_of_each(value, whole) for value in whole], shape


def _one_of_each(value: torch.Tensor, together: Sequence[torch.Tensor]) -> torch.Tensor:
    same = [size > 1 and not any(v.stride(dim) for v in together) for dim, size in enumerate(value.shape)]
    return value[tuple(slice(0, 1) if one else slice(None) for one in same)]
