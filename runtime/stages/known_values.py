"""Glue that is being traced runs as it would run eagerly, down to control flow on tensors it made itself.

Eager code may branch on a value ("are these positions one sequence?"), which a trace cannot follow. Where the
value depends on no input, it is computed beside the trace, on real tensors, and the branch is the right one
for every input. Reading a value that does depend on inputs still fails, as it must.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autoparallel.runtime.torch_private import outside_tracing, size_hint, traced_as

# Larger values are not computed: decisions hang on positions and lengths, not on masks.
_MOST_ELEMENTS = 2**22
_READS = frozenset(
    {
        torch.Tensor.__bool__,
        torch.Tensor.__int__,
        torch.Tensor.__float__,
        torch.Tensor.item,
        torch.Tensor.tolist,
    }
)


class EagerView(TorchFunctionMode):
    """While active, traced code sees no sign of the tracer, and what is known can be read.

    Each call of torch restores the tracer's own state for as long as it runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []  # keeps traced tensors alive, so that an id names one
        self._view = traced_as(eager=True)

    def __enter__(self) -> EagerView:
        self._view.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._view.__exit__(*error)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_exporting():  # inside a hidden submodule
            return func(*args, **kwargs)
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = all(id(tensor) in self._known for tensor in given)
        if given and known and func in _READS:
            with outside_tracing():
                return func(self._known[id(args[0])])
        with traced_as(eager=False):
            result = func(*args, **kwargs)
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if known and made and all(_numel(tensor) <= _MOST_ELEMENTS for tensor in made):
            self._follow(func, args, kwargs, made)
        elif given and not known:
            self._forget(func, given)
        return result

    def _follow(self, func: Callable[..., Any], args: Any, kwargs: Any, made: list[torch.Tensor]) -> None:
        """Compute the same on real tensors; what draws random numbers or fails stays unknown."""
        with outside_tracing(), torch.random.fork_rng(devices=[]):
            before = torch.get_rng_state()
            try:
                real = func(*pytree.tree_map(self._real, args), **pytree.tree_map(self._real, kwargs))
            except Exception:
                return
            found = [leaf for leaf in pytree.tree_leaves(real) if isinstance(leaf, torch.Tensor)]
            if len(found) != len(made) or not torch.equal(before, torch.get_rng_state()):
                return
        for traced, value in zip(made, found, strict=True):
            self._known[id(traced)] = value
            self._kept.append(traced)

    def _real(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._known[id(leaf)]
        if isinstance(leaf, torch.SymInt):
            return size_hint(leaf)
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    def _forget(self, func: Callable[..., Any], given: list[torch.Tensor]) -> None:
        """An unknown value may have been written into a known one: neither it nor its views are known now."""
        name = getattr(func, "__name__", "")
        if not (name.endswith("_") or name.startswith("__i") or name == "__setitem__"):
            return
        storages = {
            self._known[id(tensor)].untyped_storage().data_ptr()
            for tensor in given
            if id(tensor) in self._known
        }
        for key, value in list(self._known.items()):
            if value.untyped_storage().data_ptr() in storages:
                del self._known[key]


def _numel(tensor: torch.Tensor) -> int:
    sizes: list[Any] = list(tensor.shape)
    return math.prod(size_hint(size) if isinstance(size, torch.SymInt) else size for size in sizes)
