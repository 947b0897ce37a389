"""Walks nested arguments. torch's own pytree does the same and more, at ten times the time a call."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.utils._pytree import register_dataclass, tree_leaves


def leaves(tree: Any) -> list[Any]:
    """The leaves of nested tuples, lists and dicts, in order."""
    found: list[Any] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Any]) -> None:
    if type(tree) in _LEAVES:
        found.append(tree)
    elif isinstance(tree, _CONTAINERS):
        for item in tree:
            _collect(item, found)
    elif isinstance(tree, dict):
        for item in tree.values():
            _collect(item, found)
    elif holds_fields(tree):
        for item in fields_of(tree).values():
            _collect(item, found)
    else:
        found.append(tree)


# In what no tensor is looked for, by far the most of what is asked.
_ATOMS = frozenset(
    {int, float, bool, str, slice, type(None), type(...), torch.dtype, torch.device, torch.layout}
)


# By far the most of what is walked.
_LEAVES = _ATOMS | {torch.Tensor}
_CONTAINERS = (tuple, list)


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves."""
    found: list[torch.Tensor] = []
    _collect_tensors((tree,), found)
    return found


def given_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments of a call."""
    found: list[torch.Tensor] = []
    _collect_tensors(args, found)
    if kwargs:
        _collect_tensors(kwargs.values(), found)
    return found


def _collect_tensors(items: Iterable[Any], found: list[torch.Tensor]) -> None:
    for item in items:
        if type(item) in _ATOMS:
            continue
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, _CONTAINERS):
            _collect_tensors(item, found)
        elif isinstance(item, dict):
            _collect_tensors(item.values(), found)
        elif holds_fields(item):
            _collect_tensors(fields_of(item).values(), found)


def holds_fields(value: Any) -> bool:
    """Whether it is an object of a dataclass, which batches and results often are; one that is a dict, too, is walked as that."""
    return hasattr(type(value), "__dataclass_fields__") and not isinstance(value, dict)


def fields_of(value: Any) -> dict[str, Any]:
    """The fields that an object of a dataclass has, by name."""
    return {name: getattr(value, name) for name in type(value).__dataclass_fields__ if hasattr(value, name)}


def know_dataclasses(tree: Any) -> None:
    """Let torch's own pytree look into the dataclasses in a tree from now on, as exporting a module, cutting a batch into samples
    and moving it to a device need."""
    for leaf in tree_leaves(tree):
        if holds_fields(leaf) and tensors(leaf):
            with suppress(ValueError):  # fields that its constructor does not take: it stays an object
                register_dataclass(type(leaf))
            know_dataclasses(list(fields_of(leaf).values()))


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with `function` applied to its leaves."""
    if type(tree) in _LEAVES:
        return function(tree)
    if isinstance(tree, tuple):
        parts = [mapped(function, item) for item in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    if isinstance(tree, list):
        return [mapped(function, item) for item in tree]
    if isinstance(tree, dict):
        items = {key: mapped(function, item) for key, item in tree.items()}
        return _alike(tree, items) if isinstance(tree, OrderedDict) else items
    if holds_fields(tree) and tensors(tree):
        made = copy.copy(tree)
        for key, item in fields_of(tree).items():
            object.__setattr__(made, key, mapped(function, item))
        return made
    return function(tree)


def _alike(tree: Any, items: Mapping[Any, Any]) -> Any:
    """The output of a model, a dictionary that is asked for its first value by number, with other values."""
    made = copy.copy(tree)
    for key, item in items.items():
        made[key] = item
    return made


def plain(result: Any) -> Any:
    """Model outputs as plain containers: a mapping or dataclass becomes the list of its values."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, Mapping):
        return [plain(v) for v in result.values()]
    if isinstance(result, list | tuple):
        return [plain(v) for v in result]
    if holds_fields(result):
        return [plain(v) for v in fields_of(result).values()]
    if hasattr(result, "__dict__"):
        return [plain(v) for v in vars(result).values()]
    return []


def named_arguments(module: torch.nn.Module, args: Any, kwargs: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensor arguments of a call by their names in `forward`'s signature; those inside a container as
    "name.0", "name.1"."""
    try:
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    except (TypeError, ValueError):
        return []
    named: list[tuple[str, Any]] = []
    for name, value in list(bound.arguments.items())[1:]:
        kind = bound.signature.parameters[name].kind
        named += list(value.items()) if kind is inspect.Parameter.VAR_KEYWORD else [(name, value)]
    result = []
    for name, value in named:
        if isinstance(value, torch.Tensor):
            result.append((name, value))
        else:
            result += [
                (f"{name}.{i}", leaf)
                for i, leaf in enumerate(leaves(value))
                if isinstance(leaf, torch.Tensor)
            ]
    return result
