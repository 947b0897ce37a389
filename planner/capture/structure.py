"""What two modules must have in common to do the same."""

from __future__ import annotations

import functools

import torch
from torch import nn

_SCALARS = (int, float, bool, str, type(None), torch.dtype, torch.device)


def is_list(module: nn.Module) -> bool:
    """Whether it holds modules by number: a `ModuleList`, or a `ModuleDict` whose keys are numbers."""
    keys = module.keys() if isinstance(module, nn.ModuleDict) else ()
    return isinstance(module, nn.ModuleList) or (len(keys) > 0 and all(key.isdigit() for key in keys))


def structure(module: nn.Module, indices: frozenset[tuple[str, str]], shared: frozenset[int]) -> object:
    """What two modules must have in common to trace alike: classes, scalar settings, parameters and buffers.

    Attributes that only hold the position in the list are left out; a parameter that is shared is told by its
    identity, other objects (a config) by theirs.
    """
    parts: list[object] = []
    for path, part in module.named_modules():
        settings = tuple(
            (name, _setting(value))
            for name, value in sorted(vars(part).items())
            if not name.startswith("_") and (path, name) not in indices
        )
        parts.append((path, type(part), settings, len(part._forward_hooks), len(part._forward_pre_hooks)))
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                identity = id(tensor) if id(tensor) in shared else 0
                parts.append((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, identity))
    return tuple(parts)


def _setting(value: object, depth: int = 2) -> object:
    """What of an attribute must be equal; an object that is not plain data by its own attributes, or itself."""
    if isinstance(value, _SCALARS):
        return (type(value), value)
    if isinstance(value, tuple | list | frozenset | set):
        return (type(value), tuple(_setting(item, depth) for item in value))
    if isinstance(value, dict):
        return tuple((str(key), _setting(item, depth)) for key, item in value.items())
    if isinstance(value, functools.partial):
        return (_setting(value.func), _setting(value.args, depth), _setting(value.keywords, depth))
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype)
    if depth and hasattr(value, "__dict__") and not isinstance(value, nn.Module):
        return (type(value), tuple((k, _setting(v, depth - 1)) for k, v in sorted(vars(value).items())))
    return id(value)
