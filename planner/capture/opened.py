"""The torch functions that a model's code calls, those inside of torch's own Python functions instead of these."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autoparallel.planner.capture.heads import MULTI_HEAD, heads_apart
from autoparallel.planner.capture.trees import tensors

_NO_OVERRIDE = {
    name: (lambda *_: False)
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
}


# Those of them that read a tensor's numbers, and those that run a backward pass: one call each.
_READ = frozenset({"__format__"})
_BACKWARD: frozenset[Any] = frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward})


def _is_mapped(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a tensor among the arguments is that of one turn of `torch.vmap`, which has no storage of its own."""
    inside = torch._C._functorch.peek_interpreter_stack() is not None
    return inside and any(map(torch._C._functorch.is_batchedtensor, tensors((args, kwargs))))


def opened(func: Any) -> Callable[..., Any]:
    """A copy of one of torch's Python functions that does not ask for overrides: modes see what its body calls instead of it."""
    names = func.__globals__ | _NO_OVERRIDE
    copy = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


multi_head = opened(MULTI_HEAD)  # torch's own attention, which calls `scaled_dot_product_attention` inside


class OpenedFunctions(TorchFunctionMode):
    """Hands every call to `call`, with functions that are written in Python opened."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: dict[object, Callable[..., Any]] = {}
        self._opening: set[object] = set()  # functions whose body is running

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call gives."""
        raise NotImplementedError

    def is_closed(self) -> bool:
        """Whether calls are run as they are."""
        return False

    def __torch_function__(
        self, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_closed() or _is_mapped(args, kwargs):
            return func(
                *args, **kwargs
            )  # inside of vmap: its operators are seen below, as constants of the trace
        opens = (
            isinstance(func, types.FunctionType)
            and func.__name__ not in _READ
            and func not in _BACKWARD
            and "has_torch_function" in " ".join(func.__globals__)
        )
        if (attend := heads_apart(func, args, kwargs)) is not None:
            with self:
                return attend()
        # A method that overrides its C counterpart of the same name (Tensor.unflatten) comes back here as itself.
        if opens and func not in self._opening:
            self._opening.add(func)
            try:
                with self:
                    return self._open(func)(*args, **kwargs)
            finally:
                self._opening.discard(func)
        return self.call(func, args, kwargs)

    def _open(self, func: types.FunctionType) -> Callable[..., Any]:
        if func not in self._opened:
            self._opened[func] = opened(func)
        return self._opened[func]
