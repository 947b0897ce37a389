"""A module as if it had been built on the meta device, and its inputs with another batch size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


@contextmanager
def on_meta(module: torch.nn.Module) -> Iterator[None]:
    """While inside, every parameter and buffer of `module` is a meta tensor; ties and flags are kept."""
    swapped: dict[int, torch.Tensor] = {}
    undo: list[tuple[Any, str, Any]] = []

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in swapped:
            meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            if isinstance(tensor, torch.nn.Parameter):
                meta = torch.nn.Parameter(meta, requires_grad=tensor.requires_grad)
            swapped[id(tensor)] = meta
        return swapped[id(tensor)]

    try:
        for part in module.modules():
            for table in (part._parameters, part._buffers):
                for name, tensor in table.items():
                    if tensor is not None and tensor.device.type != "meta":
                        undo.append((table, name, tensor))
        for table, name, tensor in undo:
            table[name] = stand_in(tensor)
        yield
    finally:
        for table, name, tensor in undo:
            table[name] = tensor


def with_batch(inputs: Any, batch: int) -> Any:
    """The inputs with `batch` samples: the first samples, repeated as needed, of every tensor whose dim 0 is the
    batch (that of the first tensor)."""
    size = next(t.shape[0] for t in tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.dim())

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != size:
            return leaf
        if leaf.device.type == "meta" or leaf.is_floating_point():
            return torch.empty((batch, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")
        return leaf[torch.arange(batch, device=leaf.device) % size]

    return tree_map(resize, inputs)
