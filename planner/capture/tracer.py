"""Runs one forward and backward pass of a module on the meta device and notes every call, kernel and storage.

The module's own Python code runs, as it does in training: a `TorchFunctionMode` sees the torch functions it
calls, a dispatch mode the kernels below them, `saved_tensors_hooks` what autograd keeps, and the sequence number
of the running autograd node tells which call a backward kernel belongs to.
"""

from __future__ import annotations

import bisect
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from autoparallel.planner.capture.fold import FoldError, StandIn
from autoparallel.planner.capture.leaf import measure_leaf
from autoparallel.planner.capture.meta_mode import MetaMode, storage_key
from autoparallel.planner.capture.records import (
    Boundary,
    Call,
    Frame,
    Launch,
    Meta,
    SavedStorage,
    Trace,
    Value,
)
from autoparallel.planner.capture.trees import leaves, mapped, named_arguments, plain, tensors
from autoparallel.planner.capture.whole import is_causal, known_index, replacement

_NO_OVERRIDE = {
    name: (lambda *_: False)
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
}


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype without the prefix."""
    return str(dtype).removeprefix("torch.")


def _sequence_number() -> int:
    """The number that the next node of the autograd graph will get."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def meta_of(tensor: torch.Tensor) -> Meta:
    """Shape, dtype, storage and distinct elements of a tensor."""
    distinct = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        distinct *= size if stride else min(size, 1)
    return Meta(
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        distinct=distinct,
        storage=storage_key(tensor),
        layout=(int(tensor.storage_offset()), *tensor.stride()),
    )


@dataclass(frozen=True, slots=True)
class Remembered:
    """One call of a module that stands for others."""

    arguments: list[object]
    inputs: list[torch.Tensor]
    used: list[bool]  # which of the inputs it computes with
    result: Any


class Tracer(TorchFunctionMode):
    """Collects a `Trace`; see `trace_step`."""

    def __init__(self, module: torch.nn.Module, micro_batch: int) -> None:
        super().__init__()
        self.trace = Trace(micro_batch=micro_batch, frames=[Frame(path="", parent=-1)])
        self.meta_mode = MetaMode(self._observe)
        self._paths = {id(m): path for path, m in module.named_modules()}
        self._frame = 0
        self._values: dict[int, int] = {}  # id(tensor) -> value
        self._by_storage: dict[int, int] = {}  # storage -> the value that made it
        self._alive: list[object] = []
        self._call: Call | None = None
        self._backward_starts: list[int] | None = None
        self._opened: dict[object, Callable[..., Any]] = {}
        self._remembered: dict[str, Remembered] = {}
        self._standing_in = False
        self.failed: str | None = None
        self.given: dict[int, torch.Tensor] = {}  # id(input) -> the example's own numbers, for leaves alone
        self._entered: list[dict[int, int]] = []  # of each open module call: its tensors' values on entry
        self._returned: list[int] = []  # values returned by the repeated module that ran last
        self._opening: set[object] = set()  # functions whose body is running

    # -- values ------------------------------------------------------------------------------------------------

    def declare(self, tensor: torch.Tensor, origin: str, name: str, on_floats: bool = False) -> int:
        """Register a tensor that exists before the step: parameter, buffer or input."""
        return self._new_value(
            tensor, Value(meta=meta_of(tensor), origin=origin, name=name, on_floats=on_floats)
        )

    def _new_value(self, tensor: torch.Tensor, value: Value) -> int:
        index = len(self.trace.values)
        value.requires_grad = tensor.requires_grad
        self.trace.values.append(value)
        self._values[id(tensor)] = index
        self._alive.append(tensor)
        self._by_storage.setdefault(value.meta.storage, index)
        return index

    def value_of(self, tensor: torch.Tensor) -> int:
        """The value a tensor stands for; one never seen before becomes a constant or an alias of its storage."""
        if id(tensor) in self._values:
            return self._values[id(tensor)]
        meta = self.meta_mode.to_meta(tensor)
        if (storage := storage_key(meta)) in self._by_storage:
            self._values[id(tensor)] = self._by_storage[storage]
            self._alive.append(tensor)
            return self._by_storage[storage]
        constant = Value(meta=meta_of(meta), origin="constant", name=f"constant_{len(self.trace.values)}")
        return self._new_value(tensor, constant)

    # -- forward -----------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._call is not None or self._backward_starts is not None:
            return func(*args, **kwargs)
        opens = isinstance(func, types.FunctionType) and "has_torch_function" in " ".join(func.__globals__)
        # A method that overrides its C counterpart of the same name (Tensor.unflatten) comes back here as itself.
        if opens and func not in self._opening:
            self._opening.add(func)
            try:
                with self:
                    return self._open(func)(*args, **kwargs)
            finally:
                self._opening.discard(func)
        return self._record(func, args, kwargs)

    def _open(self, func: types.FunctionType) -> Callable[..., Any]:
        """A copy of one of torch's Python functions that does not ask for overrides: its body is seen instead."""
        if func not in self._opened:
            copy = types.FunctionType(
                func.__code__,
                func.__globals__ | _NO_OVERRIDE,
                func.__name__,
                func.__defaults__,
                func.__closure__,
            )
            copy.__kwdefaults__ = func.__kwdefaults__
            self._opened[func] = copy
        return self._opened[func]

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.__name__
        if name in {"__get__", "__set__"}:
            name = getattr(func.__self__, "__name__", name)
        if name == "__getitem__":
            args = (args[0], known_index(args[1]))
        call = Call(name=name, frame=self._frame, first_node=_sequence_number())
        before = [t._version for t in tensors((args, kwargs))]
        self._call = call
        try:
            out = (replacement(name) or func)(*args, **kwargs)
        finally:
            self._call = None
        results = tensors(out)
        mutated = [
            t for t, version in zip(tensors((args, kwargs)), before, strict=True) if t._version != version
        ]
        fresh = [t for t in results if all(t is not m for m in mutated)]
        unchanged = [t for t in fresh if id(t) in self._values]
        if not call.forward and len(unchanged) == len(fresh) and not mutated:
            return out  # a size, a flag, or the argument itself: nothing ran
        call.inputs = inputs = [self.value_of(t) for t in tensors((args, kwargs))]
        call.constants = tuple(
            leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, int | float | bool | str)
        )
        call.causal = is_causal(name, args, kwargs)
        index = len(self.trace.calls)
        self.trace.calls.append(call)
        on_floats = any(self.trace.values[i].on_floats for i in inputs)
        # What changes a view changes the tensor it looks at.
        bases = {id(t._base): t._base for t in mutated if t._base is not None and id(t._base) in self._values}
        bases = {key: base for key, base in bases.items() if all(base is not t for t in mutated)}
        for position, tensor in enumerate([*fresh, *mutated, *bases.values()]):
            value = Value(
                meta=meta_of(tensor), origin="call", call=index, output=position, on_floats=on_floats
            )
            call.outputs.append(self._new_value(tensor, value))
        return out

    def _observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        tensors_in, tensors_out = tensors((args, kwargs)), tensors(out)
        metas_in, metas_out = tuple(map(meta_of, tensors_in)), tuple(map(meta_of, tensors_out))
        storages = {m.storage for m in metas_in}
        mutates = func._schema.is_mutable
        launch = Launch(
            target=str(func),
            inputs=metas_in,
            outputs=metas_out,
            is_view=not mutates and all(m.storage in storages for m in metas_out),
            signature=(func, args, kwargs),
        )
        if self._standing_in:
            return
        if self._backward_starts is not None:
            node: Any = torch._C._current_autograd_node()
            if node is None:
                return  # the gradient of the loss itself, set before the first node runs
            owner = bisect.bisect_right(self._backward_starts, node._sequence_nr()) - 1
            if self.trace.calls[max(owner, 0)].name not in {"stand_in", "leaf"}:
                self.trace.calls[max(owner, 0)].backward.append(launch)
                self.trace.backward.append(launch)
        elif self._call is not None:
            self._call.forward.append(launch)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if (
            self._backward_starts is None
            and tensor.device.type == "meta"
            and (self._call or self.trace.calls)
        ):
            # Outside a call it is a custom autograd function that saves: it belongs to the call before.
            index = len(self.trace.calls) if self._call else len(self.trace.calls) - 1
            call = self._call or self.trace.calls[index]
            saved = SavedStorage(
                storage=storage_key(tensor),
                storage_bytes=tensor.untyped_storage().nbytes(),
                meta=meta_of(tensor),
                call=index,
                position=len(call.saved),
            )
            call.saved.append(saved)
            self._alive.append(tensor)
        return tensor

    # -- folding -----------------------------------------------------------------------------------------------

    def remember_call(self, path: str, args: Any, kwargs: Any, result: Any, since: int) -> None:
        """Note how the module at `path` was called, from call `since` on, and what it returned, for those it
        stands for."""
        with torch._C.DisableTorchFunction():
            arguments = self._described(args, kwargs)
        read = {value for call in self.trace.calls[since:] for value in call.inputs}
        inputs = tensors((args, kwargs))
        used = [self._values.get(id(t)) in read for t in inputs]
        self._remembered[path] = Remembered(arguments, inputs, used, result)
        self._returned = [self._values.get(id(t), -1) for t in tensors(result)]

    def _described(self, args: Any, kwargs: Any) -> list[object]:
        """Each argument by what must be equal for two calls to be alike: where a tensor comes from, its shape."""
        previous = self._returned
        described: list[object] = []
        for leaf in leaves((args, kwargs)):
            if not isinstance(leaf, torch.Tensor):
                described.append(leaf if isinstance(leaf, int | float | bool | str | None) else type(leaf))
                continue
            value = self.value_of(leaf)
            place = f"previous:{previous.index(value)}" if value in previous else ""
            described.append((tuple(leaf.shape), leaf.dtype, leaf.requires_grad, place))
        return described

    def stand_in(self, module: torch.nn.Module, path: str, model: str, args: Any, kwargs: Any) -> Any:
        """The result of the module at `path`, from what `model` did with arguments of the same shapes."""
        with torch._C.DisableTorchFunction():
            known = self._remembered.get(model)
            if known is None or self._described(args, kwargs) != known.arguments:
                raise FoldError(f"{path} is not called as {model} is")
            given = tensors((args, kwargs))
            result = {id(t): given[i] for i, t in enumerate(known.inputs)}  # what the model handed through
            fresh = [t for t in tensors(known.result) if id(t) not in result]
            used = [t for t, is_used in zip(given, known.used, strict=True) if is_used]
            made = self._stood_in(model, used, fresh, [p for p in module.parameters() if p.requires_grad])
            result |= {id(like): tensor for like, tensor in zip(fresh, made, strict=True)}
            self._returned = [self._values.get(id(result[id(t)]), -1) for t in tensors(known.result)]
            return tree_map(lambda leaf: result.get(id(leaf), leaf), known.result)

    def leaf(self, module: torch.nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        """The result of a module that cannot be traced, and its costs as those of one call."""
        with torch._C.DisableTorchFunction():
            result, cost = measure_leaf(module, path, args, kwargs, self._values_of)
            given, fresh = tensors((args, kwargs)), tensors(result)
            call = Call(name="leaf", frame=self._frame, leaf=cost)
            made = self._opaque(call, [*given, *module.parameters()], fresh, [])
            replaced = {id(like): tensor for like, tensor in zip(fresh, made, strict=True)}
            return mapped(lambda leaf: replaced.get(id(leaf), leaf), result)

    def _values_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return self.given.get(id(tensor), self.meta_mode.known(tensor) if tensor.is_meta else tensor)

    def _stood_in(
        self, model: str, inputs: list[torch.Tensor], fresh: list[torch.Tensor], sources: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        call = Call(name="stand_in", frame=self._frame)
        index = len(self.trace.calls)
        self.trace.stand_ins[index] = model
        made = self._opaque(call, inputs, fresh, sources)
        for tensor, like in zip(made, fresh, strict=True):
            self.trace.values[self._values[id(tensor)]].like = self.value_of(like)
        return made

    def _opaque(
        self, call: Call, inputs: list[torch.Tensor], fresh: list[torch.Tensor], sources: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Tensors like `fresh` that depend on `inputs`, noted as the outputs of `call`. Where no input needs a
        gradient but the outputs do, it comes from `sources`."""
        call.first_node = _sequence_number()
        call.inputs = [self.value_of(t) for t in inputs]
        self._call, self._standing_in = call, True
        try:
            sources = [t for t in inputs if t.requires_grad] or sources
            made = StandIn.apply(fresh, *sources) if fresh else ()
            made = [m if f.requires_grad else m.detach() for m, f in zip(made, fresh, strict=True)]
        finally:
            self._call, self._standing_in = None, False
        index = len(self.trace.calls)
        self.trace.calls.append(call)
        on_floats = any(self.trace.values[i].on_floats for i in call.inputs)
        for position, tensor in enumerate(made):
            value = Value(
                meta=meta_of(tensor), origin="call", call=index, output=position, on_floats=on_floats
            )
            call.outputs.append(self._new_value(tensor, value))
        return made

    # -- modules -----------------------------------------------------------------------------------------------

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if id(module) in self._paths:
            self.trace.frames.append(Frame(path=self._paths[id(module)], parent=self._frame))
            self._frame = len(self.trace.frames) - 1
            self._entered.append({id(t): self._values[id(t)] for t in tensors(args) if id(t) in self._values})

    def _leave(self, module: torch.nn.Module, args: Any, *rest: Any) -> None:
        if id(module) not in self._paths:
            return
        # After an exception torch calls a hook that wants keyword arguments without them.
        kwargs, result = rest if len(rest) == 2 else ({}, rest[0])
        if result is None and self.failed is None and sys.exc_info()[1] is not None:
            self.failed = self._paths[id(module)]  # the innermost module that an exception leaves
        before = self._entered.pop() if self._entered else {}
        self.trace.boundaries[self._frame] = Boundary(
            inputs=tuple(
                (name, before.get(id(tensor), self._values[id(tensor)]))  # what it was before it was changed
                for name, tensor in named_arguments(module, args, kwargs)
                if id(tensor) in self._values
            ),
            outputs=tuple(self._values[id(t)] for t in tensors(plain(result)) if id(t) in self._values),
        )
        if self._frame:
            self._frame = self.trace.frames[self._frame].parent

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Everything that runs inside is noted."""
        with ExitStack() as stack:
            hooks = torch.nn.modules.module
            enter = hooks.register_module_forward_pre_hook(self._enter)
            stack.callback(enter.remove)
            leave = hooks.register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
            stack.callback(leave.remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self.meta_mode)
            stack.enter_context(self)
            yield

    def run_backward(self, outputs: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
        """The backward pass of `outputs` towards `wanted` (the parameters)."""
        self._backward_starts = [call.first_node for call in self.trace.calls]
        with self.meta_mode:
            ones = [torch.ones_like(t) for t in outputs]
            gradients = torch.autograd.grad(outputs, wanted, ones, allow_unused=True)
        for gradient in gradients:
            if gradient is not None:
                self._alive.append(gradient)
                self.trace.parameter_gradients.add(storage_key(gradient))
