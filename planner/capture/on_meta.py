"""A module as if it had been built on the meta device, and its inputs with another batch size."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
# Integers of a buffer that code may ask for (strides, sizes of kernels) are kept where they are few. Kind: chosen.
_FEW = 16
_VALUES = "_autoparallel_values"  # of a buffer on the meta device: what it holds
_HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
          "_forward_pre_hooks_with_kwargs")  # fmt: skip


@contextmanager
def on_meta(module: torch.nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """While inside, every parameter and buffer of `module` is a meta tensor; ties and flags are kept. With a `dtype` those of
    floats have that."""
    swapped: dict[int, torch.Tensor] = {}
    undo: list[tuple[Any, str, Any]] = []

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in swapped:
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="meta")
            if isinstance(tensor, torch.nn.Parameter):
                meta = torch.nn.Parameter(meta, requires_grad=tensor.requires_grad)
            elif holds_few(tensor):
                note_values(meta, tensor)
            swapped[id(tensor)] = meta
        return swapped[id(tensor)]

    try:
        for part in module.modules():
            for table in (part._parameters, part._buffers):
                for name, tensor in table.items():
                    if tensor is not None and (tensor.device.type != "meta" or _differs(tensor, dtype)):
                        undo.append((table, name, tensor))
        for table, name, tensor in undo:
            table[name] = stand_in(tensor)
        yield
    finally:
        for table, name, tensor in undo:
            table[name] = tensor


def _differs(tensor: torch.Tensor, dtype: torch.dtype | None) -> bool:
    return dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype


def in_dtype(inputs: Any, before: torch.dtype, dtype: torch.dtype) -> Any:
    """The inputs with tensors of `dtype`, without values, in the places of those of the dtype `before`."""

    def cast(leaf: Any) -> Any:
        given = isinstance(leaf, torch.Tensor) and leaf.dtype == before
        return torch.empty(leaf.shape, dtype=dtype, device="meta") if given else leaf

    return tree_map(cast, inputs)


def holds_few(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a few integers or flags, as settings are."""
    return tensor.numel() <= _FEW and not (tensor.is_floating_point() or tensor.is_complex())


def note_values(buffer: torch.Tensor, values: torch.Tensor) -> None:
    """From now on a buffer on the meta device says what it holds."""
    setattr(buffer, _VALUES, values.detach().cpu().clone())


def noted_values(buffer: torch.Tensor) -> torch.Tensor | None:
    """What a buffer on the meta device holds, where that is known: a copy."""
    values = getattr(buffer, _VALUES, None)
    return None if values is None else values.clone()


@contextmanager
def left_as_it_was(module: torch.nn.Module) -> Iterator[None]:
    """While inside, what the module's code notes on itself (caches, counters, hooks) is its own; afterwards it is gone.
    What its functions remember (`lru_cache`) is forgotten on both sides: tensors of one trace are not those of another."""
    tables: list[tuple[Any, Any]] = []
    for part in module.modules():
        own = vars(part)
        notes = [v for k, v in own.items() if type(v) in (dict, list, set) and k not in _OF_EVERY_MODULE]
        notes += [own[name] for name in _HOOKS if name in own]
        tables += [(t, t.copy()) for t in (own, part._parameters, part._buffers, part._modules, *notes)]
    forget = _caches(module)
    try:
        for clear in forget:
            clear()
        yield
    finally:
        for table, before in tables:
            table.clear()
            (table.extend if isinstance(table, list) else table.update)(before)
        for clear in forget:
            clear()


def _caches(module: torch.nn.Module) -> list[Callable[[], None]]:
    """What empties each cache of functions and methods of the files that the module's classes stand in."""
    files = {kind.__module__ for part in module.modules() for kind in type(part).__mro__}
    found: dict[int, Callable[[], None]] = {}
    for file in files - {"builtins"}:
        if file.partition(".")[0] == "torch" or file not in sys.modules:
            continue
        values = list(vars(sys.modules[file]).values())
        kinds = [v for v in values if isinstance(v, type) and v.__module__ == file]
        members = [member for kind in kinds for member in vars(kind).values()]
        for value in (*values, *(getattr(m, "__func__", m) for m in members)):  # static methods, too
            wrapped = getattr(value, "__closure__", None) if isinstance(value, types.FunctionType) else None
            for inner in (value, *(cell.cell_contents for cell in wrapped or () if _is_filled(cell))):
                clear = getattr(inner, "cache_clear", None) if callable(inner) else None
                if clear is not None:
                    found[id(inner)] = clear
    return list(found.values())


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


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
