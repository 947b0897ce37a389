"""A module as if it had been built on the meta device, and its inputs with another batch size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))


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


@contextmanager
def left_as_it_was(module: torch.nn.Module) -> Iterator[None]:
    """While inside, what the module's code notes on itself (caches, counters) is its own; afterwards it is gone."""
    tables: list[tuple[Any, Any]] = []
    for part in module.modules():
        own = vars(part)
        notes = [v for k, v in own.items() if type(v) in (dict, list, set) and k not in _OF_EVERY_MODULE]
        tables += [(t, t.copy()) for t in (own, part._parameters, part._buffers, part._modules, *notes)]
    try:
        yield
    finally:
        for table, before in tables:
            table.clear()
            (table.extend if isinstance(table, list) else table.update)(before)


def with_batch(inputs: Any, batch: int, *, numbers: bool = False) -> Any:
    """The inputs with `batch` samples: the first samples, repeated as needed, of every tensor whose dim 0 is the
    batch (that of the first tensor). Those of floats are on the meta device, but with `numbers`."""
    size = next(t.shape[0] for t in tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.dim())

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != size:
            return leaf
        if leaf.device.type == "meta" or (leaf.is_floating_point() and not numbers):
            return torch.empty((batch, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")
        return leaf[torch.arange(batch, device=leaf.device) % size]

    return tree_map(resize, inputs)
