"""Values of small tensors on a dry run, whose tensors have none: a model that looks at its positions goes the way it goes.

What follows from numbers in the code alone (positions, masks made of them) is computed beside, on real tensors.
"""

from __future__ import annotations

import functools
import math
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from autoparallel.runtime.torch_private import outside_tracing

# Larger values are not computed: decisions hang on positions and lengths, not on masks. Kind: chosen.
MOST_ELEMENTS = 2**18
_FACTORIES = frozenset({"arange", "zeros", "ones", "full", "scalar_tensor", "linspace", "eye"})
_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)  # the latter of lists


class SmallValues(TorchDispatchMode):
    """While active, values that are known can be read; reading others fails, as it must."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        values = [self._of(tensor) for tensor in given]
        known = all(value is not None for value in values)
        if func in _READS and known:
            with outside_tracing():
                return values[0].item()  # type: ignore[union-attr]
        result = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if not known:
            self._forget(func, args)
        elif (given or name in _FACTORIES) and torch.Tag.nondeterministic_seeded not in func.tags:
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            if made and all(math.prod(tensor.shape) <= MOST_ELEMENTS for tensor in made):
                self._follow(func, args, kwargs, made)
        return result

    def _of(self, tensor: Tensor) -> Tensor | None:
        reference, value = self._known.get(id(tensor), (None, None))
        return value if reference is not None and reference() is tensor else None

    def _follow(self, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> None:
        def real(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self._of(leaf)
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        with outside_tracing(), torch.no_grad():
            found = tree_leaves(func(*tree_map(real, args), **tree_map(real, kwargs)))
        for tensor, value in zip(made, (v for v in found if isinstance(v, Tensor)), strict=True):
            gone = functools.partial(self._drop, id(tensor))
            self._known[id(tensor)] = weakref.ref(tensor, gone), value

    def _drop(self, key: int, reference: weakref.ref[Tensor]) -> None:
        if key in self._known and self._known[key][0] is reference:
            del self._known[key]

    def _forget(self, func: Any, args: Any) -> None:
        """What is not known may have been written into a known value, or a view of it."""
        if func._schema.is_mutable and args and isinstance(args[0], Tensor):
            written = self._of(args[0])
            storage = None if written is None else written.untyped_storage().data_ptr()
            for key, (_, value) in list(self._known.items()):
                if value.untyped_storage().data_ptr() == storage:
                    del self._known[key]
