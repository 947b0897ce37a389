"""What `torch.export` is given of a module's inputs: by name, on one device, each with its samples of any number."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from autoparallel.planner.capture.trees import fields_of, holds_fields


def flatten_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`inputs` as positional and keyword arguments: a tensor, a tuple or a dict of keyword arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return (inputs,), {}


def tracing_inputs(inputs: Any, device: torch.device, *, doubled: bool) -> Any:
    """Inputs on the parameters' device; a batch of one is `doubled`, because export would fix it as a constant."""
    tensors = [t for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.dim()]
    single = doubled and bool(tensors) and all(t.shape[0] == 1 for t in tensors)

    def prepare(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shape = (2, *leaf.shape[1:]) if single and leaf.dim() else leaf.shape
        if leaf.is_meta and device.type != "meta":
            return torch.zeros(shape, dtype=leaf.dtype, device=device)
        return leaf.detach().expand(shape).contiguous().to(device)  # code may ask for a view of it

    return pytree.tree_map(prepare, inputs)


@contextmanager
def named_arguments(module: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """While inside, a forward that takes `**kwargs` says the names of those it is given: export wants shapes by name."""
    forward, own = module.forward, "forward" in vars(module)
    taken = inspect.signature(forward).parameters.values()
    parameters = [p for p in taken if p.kind is not p.VAR_KEYWORD]
    more = [name for name in kwargs if name not in {p.name for p in parameters}]

    @functools.wraps(forward)
    def named(*args: Any, **given: Any) -> Any:
        return forward(*args, **given)

    said = [*parameters, *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in more)]
    named.__signature__ = inspect.Signature(said)  # type: ignore[attr-defined]
    if more:
        module.forward = named
    try:
        yield
    finally:
        if more:
            del module.forward
        if more and own:
            module.forward = forward


def open_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The shapes of inputs, dim 0 of any size, in the form that export wants: a tuple, or a dict of argument names, and lists in
    the place of dataclasses."""

    def shape(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return {0: Dim.AUTO} if leaf.dim() else None
        if holds_fields(leaf):
            return [shapes(value) for value in fields_of(leaf).values() if value is not None]
        return None

    def shapes(tree: Any) -> Any:
        return pytree.tree_map(shape, tree, is_leaf=holds_fields)

    if not kwargs:
        return shapes(args)
    assert not args, "inputs are positional or by keyword, not both"
    return shapes(kwargs)
