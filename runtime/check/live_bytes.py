"""Bytes of tensors that live while a dry run goes: what it allocates, and has not let go of."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoparallel.runtime.torch_private import adds_up_gradients, storage_id

_WAIT = torch.ops._c10d_functional.wait_tensor.default


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Bytes that lived when an action began, that it left behind (less what it freed), and the most above the beginning;
    `module` ran at that moment."""

    begin: int
    kept: int
    peak: int
    module: str


def last_of(action: str) -> str:
    """What a stage's last backward is noted as, beside which gradients are reduced."""
    return f"last {action}"


def note(lived: dict[str, Live], action: str, found: Live, *, made: int, alone: bool, last: bool) -> None:
    """Add what lived in an action to what is known of its stage; of the same one in several micro-batches the most. In a pipeline (not
    `alone`) the gradients that the first one `made`, and that stay, are counted apart, and so is a `last` backward beside reductions."""
    known = lived.get(action)
    if known is not None and not alone:
        known = replace(known, peak=known.peak - made)
    if known is not None and not alone and last and action != "F":
        lived[last_of(action)] = found
        found = replace(known, kept=found.kept)
    elif known is not None and (alone or action != "F"):
        fuller = max(known, found, key=lambda live: live.peak + alone * live.begin)
        found = replace(fuller, kept=found.kept)
    lived[action] = found


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators make while it is active, each once, until nothing holds it.

    Storages that were there before do not count; `where` says in which module the process is.
    """

    def __init__(self, where: Callable[[], str] = str) -> None:
        super().__init__()
        self.now, self._begin, self._peak = 0, 0, 0
        self._where, self._module = where, ""
        self._in_dtensor: Any = None  # the operator whose parts come next
        self._away = False
        self._sizes: dict[int, int] = {}
        self._held: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            self._in_dtensor = func
            return NotImplemented  # to see what it does inside
        joined = self._in_dtensor is not func and adds_up_gradients(func)
        self._in_dtensor = None
        given = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        if func is _WAIT:  # which returns what it is given, but on tensors without memory
            self._resized(_key(args[0]), 0)
        if joined:  # without modes autograd adds in place, but to DTensors
            self._resized(_key(args[0]), 0)
        for leaf in tree_leaves(result) if not self._away else ():
            if isinstance(leaf, Tensor) and not leaf.is_meta and _key(leaf) not in given:
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage_id(storage)
        if key in self._sizes:
            return
        self._sizes[key] = 0
        self._held[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._resized(key, storage.nbytes())

    def _resized(self, key: int, size: int) -> None:
        if key in self._sizes:
            self.now += size - self._sizes[key]
            self._sizes[key] = size
            if self.now > self._peak:
                self._peak, self._module = self.now, self._where()

    def _forget(self, key: int) -> None:
        self._resized(key, 0)
        self._sizes.pop(key, None)
        self._held.pop(key, None)

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """What is made meanwhile counts only when it is shown (`see`)."""
        self._away = True
        try:
            yield
        finally:
            self._away = False

    def see(self, tensor: Tensor) -> None:
        """Count the storage of a tensor from now on."""
        self._note(tensor.untyped_storage())

    def begin(self) -> None:
        """An action begins now."""
        self._begin = self._peak = self.now
        self._module = ""

    def end(self) -> Live:
        """What lived in the action that ends now."""
        begin = self._begin
        return Live(
            begin=begin, kept=self.now - begin, peak=self._peak - begin, module=self._module
        )  # fmt: skip

    @contextmanager
    def watching_sizes(self) -> Iterator[None]:
        """Note storages that are emptied and filled again, as FSDP does with gathered parameters."""
        with _resizes_told_to(lambda storage, size: self._resized(storage_id(storage), size)):
            yield


def _key(tensor: Tensor) -> int:
    return storage_id(tensor.untyped_storage())


@contextmanager
def _resizes_told_to(listener: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """Tell `listener` of every storage that is resized in Python, with its new size."""
    resize: Any = torch.UntypedStorage.resize_

    def told(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        listener(storage, size)
        return result

    torch.UntypedStorage.resize_ = told  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
