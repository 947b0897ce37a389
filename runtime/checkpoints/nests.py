"""Nests of state as leaves by name, and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten


def states_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """What is to be saved of each item: its `state_dict()`, where it has one."""
    return {name: item.state_dict() if hasattr(item, "state_dict") else item for name, item in state.items()}


def states_to_load(state: Mapping[str, Any], saved: Collection[str]) -> dict[str, Any]:
    """What is to be read into each item of a checkpoint that holds the names `saved`: what its `state_to_load` says, where it
    has one; else all that it would save."""
    found = {}
    for name, item in state.items():
        if hasattr(item, "state_to_load"):
            first = f"{name}."
            found[name] = item.state_to_load({s.removeprefix(first) for s in saved if s.startswith(first)})
        else:
            found |= states_of({name: item})
    return found


def leaves_of(states: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The leaves of a nest by name (`model.blocks.0.weight`): tensors, and all else."""
    tensors, values = {}, {}
    for path, leaf in tree_flatten_with_path(dict(states))[0]:
        if isinstance(leaf, Tensor):
            tensors[_name(path)] = leaf
        else:
            values[_name(path)] = leaf
    return tensors, values


def put_back(state: Mapping[str, Any], states: Mapping[str, Any], leaves: Mapping[str, Any]) -> None:
    """Have each item of `state` load what `leaves` make of its place in `states`."""
    paths, spec = tree_flatten_with_path(dict(states))
    filled = tree_unflatten([leaves[_name(path)] for path, _ in paths], spec)
    for name, item in state.items():
        if hasattr(item, "load_state_dict"):
            item.load_state_dict(filled[name])


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "idx", keystr((key,))))) for key in path)
