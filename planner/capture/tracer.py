"""Runs one forward and backward pass of a module on the meta device, and has every call and kernel written down.

The module's own Python code runs, as it does in training: a `TorchFunctionMode` sees the torch functions it
calls, a dispatch mode the kernels below them, `saved_tensors_hooks` what autograd keeps, and the sequence number
of the running autograd node tells which call a backward kernel belongs to.
"""

from __future__ import annotations

import bisect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from autoparallel.planner.capture.again import Again, checkpoints_followed
from autoparallel.planner.capture.as_written import casts
from autoparallel.planner.capture.fold import FoldError, Remembered, StandIn
from autoparallel.planner.capture.leaf import measure_leaf
from autoparallel.planner.capture.marks import run_whole, stand_in
from autoparallel.planner.capture.meta_mode import READERS, MetaMode
from autoparallel.planner.capture.nodes import Frame, Launch, SavedStorage, tensor_inputs
from autoparallel.planner.capture.opened import OpenedFunctions
from autoparallel.planner.capture.pieces import JOINS, Pieces
from autoparallel.planner.capture.rounds import Key, Made, Rounds, code_place
from autoparallel.planner.capture.trees import given_tensors, leaves, mapped, named_arguments, plain, tensors
from autoparallel.planner.capture.values import storage_key
from autoparallel.planner.capture.vmapped import maps_followed
from autoparallel.planner.capture.whole import instead, known_index
from autoparallel.planner.capture.writer import Pending, Writer, meta_of


class Tracer(OpenedFunctions):
    """Runs a step and hands what it sees to a `Writer`; see `trace_step`."""

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        counts_rounds: bool,
        say: Callable[[str], None],
        shares: int | None = None,
    ) -> None:
        super().__init__()
        self._say = say
        self.meta_mode = MetaMode(self._observe, shares)
        self.writer = Writer(self.meta_mode)
        self._paths = {id(m): path for path, m in module.named_modules()}
        self._frame = Frame(path="", class_name=type(module).__name__, parent=None)
        self._frames = 0
        self._pending: Pending | None = None
        self.rounds = Rounds(self.writer.is_held) if counts_rounds else None
        self.has_skipped = False
        self.pieces = Pieces()
        self._starts: list[int] = []  # of each call: the number of the first autograd node that it makes
        self._runs_backward = False
        self.differentiates = False  # whether the model's own code takes derivatives
        self.casts = False  # whether it has torch.autocast on
        self._remembered: dict[str, Remembered] = {}
        self._standing_in = False
        self.failed: str | None = None
        self.given: dict[int, torch.Tensor] = {}  # id(input) -> the example's own numbers, for leaves alone
        self._entered: list[
            dict[int, fx.Node | None]
        ] = []  # of each open module call: its tensors' nodes on entry
        self._followed: list[torch.Tensor] = []  # inputs that the model's code makes autograd follow
        self._returned: list[fx.Node | None] = []  # what the repeated module that ran last returned
        self._ahead: list[SavedStorage] = []  # what is kept before the first call that it belongs to
        self.again: Again | None = (
            None  # a checkpoint of the model's code that runs again in the backward pass
        )

    # -- calls -------------------------------------------------------------------------------------------------

    def is_closed(self) -> bool:
        """Inside a call that is noted, and in the backward pass."""
        return self._pending is not None or (self._runs_backward and self.again is None)

    def __torch_function__(
        self, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        skipped = self.rounds.skipped if self.rounds else None
        if skipped is not None and not self.is_closed():
            result = skipped.repeated(func, self._frame.path, args, kwargs or {})
            if result is not NotImplemented:
                return result
        return super().__torch_function__(func, types_, args, kwargs)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of the model's code, and note it."""
        called: Any = (
            None if isinstance(func, types.FunctionType) else func
        )  # Python is opened where it is called
        name = func.__name__
        if name in {"__get__", "__set__"}:
            name = getattr(func.__self__, "__name__", name)
        if name in READERS:
            return self.meta_mode.numbers(name, *args)
        args, kwargs = self.meta_mode.in_sight(name, args, kwargs)
        if self.again is not None:
            return self.again.call(name, instead(name, func, args, kwargs))
        if name in JOINS and (joined := self.pieces.joined(name, args, kwargs)) is not None:
            (func, args), kwargs, called = joined, {}, None
            name = func.__name__
        if name == "__getitem__":
            args = (args[0], known_index(args[1]))
        given = given_tensors(args, kwargs)
        place = (name, self._frame.path, *code_place()) if self.rounds else ()
        run = instead(name, func, args, kwargs)
        if (result := self._skipped(place, given, run)) is not NotImplemented:
            return result
        pending = Pending(name, self._frame, saved=[*self._ahead])
        before = [t._version for t in given]
        self._pending = pending
        try:
            out = run()
        finally:
            self._pending = None
        mutated = [t for t, version in zip(given, before, strict=True) if t._version != version]
        fresh = [t for t in tensors(out) if all(t is not m for m in mutated)]
        if (
            name in ("requires_grad", "requires_grad_")
            and given
            and given[0].requires_grad
            and given[0].is_leaf
        ):
            self._followed.append(given[0])
        if not pending.kernels and all(map(self.writer.knows, fresh)) and not mutated:
            return out  # a size, a flag, or the argument itself: nothing ran
        self.end_rounds()
        call = self._written(func, args, kwargs, pending)
        # What changes a view changes the tensor it looks at.
        bases = {id(t._base): t._base for t in mutated if t._base is not None and self.writer.knows(t._base)}
        bases = {key: base for key, base in bases.items() if all(base is not t for t in mutated)}
        self.writer.results(call, out, [*fresh, *mutated, *bases.values()])
        self.pieces.note(name, args, kwargs, out)
        if self.rounds:
            known = self.meta_mode.known
            of_numbers = all(known(t) is not None for t in (*fresh, *mutated))
            if not of_numbers and any(t.numel() and known(t) is not None for t in fresh):
                self.rounds.stop()  # the model's code may look at the values
            else:
                made = Made(key=place, call=call, given=given, out=out, of_numbers=of_numbers, func=called)
                self.rounds.add(made)
        return out

    def as_one(self, name: str, run: Callable[[], Any]) -> Any:
        """What `run` gives, noted as one call with all that it launches. What depends on no number that the model is given or
        learns (a mask) stays a constant."""
        if self._pending is not None or self._runs_backward:
            return run()
        pending = self._pending = Pending(name, self._frame, saved=[*self._ahead])
        try:
            out = run()
        finally:
            self._pending = None
        fresh = [t for t in tensors(out) if not self.writer.knows(t)]
        read = {
            id(t): t for kernel in pending.kernels for t in tensors(kernel.signature) if self.writer.knows(t)
        }
        nodes = [self.writer.node_of(t) for t in read.values()]
        if any(t.requires_grad for t in fresh) or any(node.meta["on_floats"] for node in nodes):
            self.end_rounds()
            call = self._written(run, tuple(read.values()), {}, pending)
            self.writer.results(call, out, fresh)
        return out

    def _skipped(self, place: Key, given: list[torch.Tensor], run: Callable[[], Any]) -> Any:
        """The result of a call of a round that is not run any more; NotImplemented for a call that is run."""
        skipped = self.rounds.skipped if self.rounds else None
        if skipped is None or not skipped.goes_on(place, given):
            return NotImplemented
        out = skipped.result(given, run)
        for tensor, like in skipped.stands_for(out):
            if tensor is not like:
                self.writer.same(tensor, like)
        self.has_skipped = True
        return out

    def _once(self, args: Any) -> Any:
        """Arguments in whose lists each result of rounds that were not run stands once, for all of them."""
        if not self.has_skipped:
            return args
        return tuple(self.writer.once(leaf) if isinstance(leaf, list | tuple) else leaf for leaf in args)

    def _is_for_skipped(self, call: fx.Node) -> bool:
        """Whether a view in the backward pass of a call hands gradients to rounds that were not run: those before it, one
        for each tensor that the call was given, were for the others."""
        return "joined" in call.meta and len(call.meta["backward"]) > len(call.meta["inputs"])

    def end_rounds(self) -> None:
        """What runs now is no round of a loop any more."""
        if self.rounds and self.rounds.skipped:
            self.rounds.skipped.finish()
            self.rounds.skipped = None

    def _written(self, func: Any, args: Any, kwargs: Any, pending: Pending, **notes: Any) -> fx.Node:
        self._starts.append(pending.first_node)
        self.casts = self.casts or casts()
        self._ahead.clear()
        once = self._once(args)
        if once is not args and len(tensors(once)) < len(tensors(args)):
            notes["joined"] = True
        return self.writer.call(func, once, kwargs, pending, **notes)

    def _observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if not self._runs_backward and torch._C._current_autograd_node() is not None:
            self.differentiates = True
        if self._standing_in or (self._pending is None and not self._runs_backward):
            return
        args = self._once(args)
        metas_in, metas_out = (tuple(map(meta_of, tensors(tree))) for tree in ((args, kwargs), out))
        storages = {m.storage for m in metas_in}
        launch = Launch(
            target=str(func),
            inputs=metas_in,
            outputs=metas_out,
            is_view=not func._schema.is_mutable and all(m.storage in storages for m in metas_out),
            signature=(func, args, kwargs),
        )
        if self._pending is not None:
            self._pending.kernels.append(launch)
            return
        node: Any = torch._C._current_autograd_node()
        # Without one it is the gradient of the loss itself, set before the first node runs.
        owner = max(bisect.bisect_right(self._starts, node._sequence_nr()) - 1, 0) if node else None
        call = None if owner is None else self.writer.calls[owner]
        if self.again is not None:
            if self.again.of is not None:
                self.writer.backward(func, launch, out, self.again.of, repeats=True)
                return
        elif call is not None and launch.is_view and self._is_for_skipped(call):
            return
        self.writer.backward(func, launch, out, call)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        pending = self._pending
        if not self._runs_backward and tensor.device.type == "meta":
            # Outside a call it is a custom autograd function that saves, or a checkpoint what the next call is given.
            last = self.writer.calls[-1] if self.writer.calls else None
            ahead = pending is None and (last is None or last.meta["frame"] is not self._frame)
            before = (
                pending.saved if pending else self._ahead if last is None or ahead else last.meta["saved"]
            )
            saved = SavedStorage(
                storage=storage_key(tensor),
                storage_bytes=tensor.untyped_storage().nbytes(),
                meta=meta_of(tensor),
                position=len(before),
            )
            self.writer.alive(tensor)
            if pending or ahead:
                before.append(saved)
            else:
                self.writer.keep(saved)
        return tensor

    # -- folding -----------------------------------------------------------------------------------------------

    def remember_call(self, path: str, args: Any, kwargs: Any, result: Any, since: int) -> None:
        """Note how the module at `path` was called, from call `since` on, and what it returned, for those it
        stands for."""
        with torch._C.DisableTorchFunction():
            arguments = self._described(args, kwargs)
        read = {node for call in self.writer.calls[since:] for node in tensor_inputs(call)}
        inputs = tensors((args, kwargs))
        used = [self.writer.known(t) in read for t in inputs]
        self._remembered[path] = Remembered(arguments, inputs, used, result)
        self._returned = [self.writer.known(t) for t in tensors(result)]

    def _described(self, args: Any, kwargs: Any) -> list[object]:
        """Each argument by what must be equal for two calls to be alike: where a tensor comes from, its shape."""
        previous = self._returned
        described: list[object] = []
        for leaf in leaves((args, kwargs)):
            if not isinstance(leaf, torch.Tensor):
                described.append(leaf if isinstance(leaf, int | float | bool | str | None) else type(leaf))
                continue
            node = self.writer.node_of(leaf)
            place = f"previous:{previous.index(node)}" if node in previous else ""
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
            sources: list[torch.Tensor] = [p for p in module.parameters() if p.requires_grad]
            made = self._opaque(stand_in, path, used, fresh, sources, stood_in_by=model)
            for tensor, like in zip(made, fresh, strict=True):
                self.writer.node_of(tensor).meta["like"] = self.writer.node_of(like)
            result |= {id(like): tensor for like, tensor in zip(fresh, made, strict=True)}
            self._returned = [self.writer.known(result[id(t)]) for t in tensors(known.result)]
            return tree_map(lambda leaf: result.get(id(leaf), leaf), known.result)

    def leaf(self, module: torch.nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        """The result of a module that cannot be traced, and its costs as those of one call."""
        with torch._C.DisableTorchFunction():
            result, cost = measure_leaf(module, path, args, kwargs, self._values_of)
            given, fresh = tensors((args, kwargs)), tensors(result)
            made = self._opaque(run_whole, path, [*given, *module.parameters()], fresh, [], leaf=cost)
            replaced = {id(like): tensor for like, tensor in zip(fresh, made, strict=True)}
            return mapped(lambda leaf: replaced.get(id(leaf), leaf), result)

    def _values_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return self.given.get(id(tensor), self.meta_mode.known(tensor) if tensor.is_meta else tensor)

    def _opaque(
        self, func: Any, path: str, inputs: list[torch.Tensor], fresh: list[torch.Tensor],
        sources: list[torch.Tensor], **notes: Any,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Tensors like `fresh` that depend on `inputs`, noted as the outputs of a call of `func`. Where no input needs
        a gradient but the outputs do, it comes from `sources`."""
        self.end_rounds()
        name = "leaf" if func is run_whole else "stand_in"
        pending = Pending(name, self._frame, saved=[*self._ahead])
        self._pending, self._standing_in = pending, True
        try:
            sources = [t for t in inputs if t.requires_grad] or sources
            made = StandIn.apply(fresh, *sources) if fresh else ()
            made = [m if f.requires_grad else m.detach() for m, f in zip(made, fresh, strict=True)]
        finally:
            self._pending, self._standing_in = None, False
        call = self._written(func, (path, *inputs), {}, pending, **notes)
        self.writer.results(call, tuple(made), made)
        return made

    # -- modules -----------------------------------------------------------------------------------------------

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if id(module) in self._paths:
            path, known = self._paths[id(module)], self.writer.known
            self._frames += 1
            self._say(f"its forward pass, {path or 'the model'}")
            kind = type(module).__name__
            self._frame = Frame(path=path, class_name=kind, parent=self._frame, index=self._frames)
            self._entered.append({id(t): known(t) for t in tensors(args)})

    def _leave(self, module: torch.nn.Module, args: Any, *rest: Any) -> None:
        if id(module) not in self._paths:
            return
        # After an exception torch calls a hook that wants keyword arguments without them.
        kwargs, result = rest if len(rest) == 2 else ({}, rest[0])
        if result is None and self.failed is None and sys.exc_info()[1] is not None:
            self.failed = self._paths[id(module)]  # the innermost module that an exception leaves
        before = self._entered.pop() if self._entered else {}
        given = [
            (name, before.get(id(tensor)) or self.writer.known(tensor))  # what it was before it was changed
            for name, tensor in named_arguments(module, args, kwargs)
        ]
        returned = [self.writer.known(t) for t in tensors(plain(result))]
        self._frame.inputs = tuple((name, node) for name, node in given if node is not None)
        self._frame.outputs = tuple(node for node in returned if node is not None)
        if self._frame.parent is not None:
            self._frame = self._frame.parent

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
            stack.enter_context(checkpoints_followed(self))
            stack.enter_context(maps_followed(self))
            stack.enter_context(self.meta_mode)
            stack.enter_context(self)
            yield

    def run_backward(
        self, outputs: list[torch.Tensor], wanted: Mapping[str, torch.Tensor]
    ) -> dict[str, fx.Node]:
        """The backward pass of `outputs`: the gradients of the `wanted` parameters that have one."""
        self.end_rounds()
        self._say("its backward pass")
        self._runs_backward = True
        with self.meta_mode:
            ones = [torch.ones_like(t) for t in outputs]
            # A backward pass computes the gradients of all that it follows.
            sources = [*wanted.values(), *self._followed]
            found = torch.autograd.grad(outputs, sources, ones, allow_unused=True)
        pairs = zip(wanted, found, strict=False)
        return {name: self.writer.gradient(t, name) for name, t in pairs if t is not None}
