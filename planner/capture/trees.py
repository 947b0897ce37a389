"""Walks nested arguments. torch's own pytree does the same and more, at ten times the time a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def leaves(tree: Any) -> list[Any]:
    """The leaves of nested tuples, lists and dicts, in order."""
    found: list[Any] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Any]) -> None:
    if isinstance(tree, tuple | list):
        for item in tree:
            _collect(item, found)
    elif isinstance(tree, dict):
        for item in tree.values():
            _collect(item, found)
    else:
        found.append(tree)


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with `function` applied to its leaves."""
    if isinstance(tree, tuple):
        items = [mapped(function, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    if isinstance(tree, list):
        return [mapped(function, item) for item in tree]
    if isinstance(tree, dict):
        return {key: mapped(function, item) for key, item in tree.items()}
    return function(tree)
