"""Submodules hidden behind one opaque operator while `torch.export` traces what calls them.

Inside, the submodule runs once on fake tensors, which tells the shapes of its outputs, whether it draws random
numbers, and which of its inputs it really reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoparallel.errors import UserError
from autoparallel.planner.capture.trees import know_dataclasses
from autoparallel.runtime.own_checkpoints import is_inside
from autoparallel.runtime.stages.known_values import EagerView
from autoparallel.runtime.torch_private import hangs_on_values, sizes_of_its_own, storage_id, traced_as

CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run on fake tensors showed; calls of equal submodules with equal arguments share it."""

    outputs: tuple[Any, ...]  # flat; None where `output_at` says a tensor stands
    output_at: tuple[int, ...]
    output_spec: pytree.TreeSpec
    tensors: tuple[torch.Tensor, ...]  # fake
    random: bool  # draws random numbers
    unread: frozenset[int]  # tensor arguments of which only shape, dtype and device matter
    written: frozenset[int]  # tensor arguments that it changes in place


@dataclass(slots=True, kw_only=True)
class Call:
    """One call of a submodule seen while tracing."""

    path: str
    arguments: list[Any]  # flat; None where `tensor_at` or `size_at` says otherwise
    spec: pytree.TreeSpec
    tensor_at: list[int]
    size_at: list[int]
    run: Callable[..., Any]  # (args, kwargs) -> output, on fake tensors
    kind: Hashable  # equal for submodules that are built alike
    is_block: bool  # a repeated block, which runs whether or not anything reads what it makes
    again: bool  # whether a checkpoint of the model's own code is around it
    outcome: Outcome | None = None

    def see(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> Outcome:
        """Run on fake tensors."""
        flat = list(self.arguments)
        for at, value in zip([*self.tensor_at, *self.size_at], [*tensors, *sizes], strict=True):
            flat[at] = value
        args, kwargs = pytree.tree_unflatten(flat, self.spec)
        with _Watch(tensors) as watch, sizes_of_its_own():
            output = self.run(args, kwargs)
            know_dataclasses(output)
            leaves, spec = pytree.tree_flatten(output)
        at_tensor = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        return Outcome(
            outputs=tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves),
            output_at=at_tensor,
            output_spec=spec,
            tensors=tuple(leaves[i] for i in at_tensor),
            random=watch.random,
            unread=frozenset(range(len(tensors))) - watch.sources(leaves),
            written=watch.written,
        )

    def key(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> Hashable:
        """Equal for calls that have the same outcome."""
        kinds = tuple((str(t.shape), t.dtype, str(t.stride()), t.device) for t in tensors)
        same = [next(i for i, u in enumerate(tensors) if u is t) for t in tensors]
        constants = tuple((type(a).__name__, str(a)) for a in self.arguments)
        return self.kind, kinds, tuple(same), tuple(map(str, sizes)), constants, str(self.spec)


# Filled only within `hidden_submodules`: an operator can carry no object.
_calls: dict[int, Call] = {}
_outcomes: dict[Hashable, Outcome] = {}


@torch.library.custom_op("autoparallel::submodule", mutates_args=())
def submodule(tensors: Sequence[torch.Tensor], sizes: Sequence[int], call: int) -> list[torch.Tensor]:
    """Stands for call number `call` of a hidden submodule; sizes are its symbolic integer arguments."""
    del tensors, sizes, call
    raise AssertionError("autoparallel::submodule only exists while a module is traced")


@submodule.register_fake
def _(tensors: Sequence[torch.Tensor], sizes: Sequence[int], call: int) -> list[torch.Tensor]:
    seen = _calls[call]
    key = seen.key(tensors, sizes)
    seen.outcome = _outcomes.get(key) or seen.see(tensors, sizes)
    if not any(hangs_on_values(size) for tensor in seen.outcome.tensors for size in tensor.shape):
        _outcomes[key] = seen.outcome  # else another call's sizes are others
    # An operator may not return its own inputs: hand on fresh tensors of the same kind.
    return [torch.empty_like(tensor) for tensor in seen.outcome.tensors]


class _Watch(TorchDispatchMode):
    """Follows which of `tensors` each value was computed from, and notes whether random numbers were drawn."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.random = False
        self.kept = list(tensors)  # keeps them alive, so that an id names one tensor
        self.read: dict[int, frozenset[int]] = {}
        for i, tensor in enumerate(tensors):  # one of them may be given twice
            self.read[id(tensor)] = self.read.get(id(tensor), frozenset()) | {i}
        self.shares = dict(self.read)  # which of them a value is a view of
        self.written: frozenset[int] = frozenset()
        # What was written into a storage, through whatever view of it.
        self.put: dict[int, frozenset[int]] = {}

    def sources(self, values: Any) -> frozenset[int]:
        """Indices of the watched tensors that `values` depend on."""
        leaves = pytree.tree_leaves(values)
        found = [self.read.get(id(v), frozenset()) for v in leaves]
        if self.put:
            stored = [storage_id(v.untyped_storage()) for v in leaves if isinstance(v, torch.Tensor)]
            found += [self.put.get(storage, frozenset()) for storage in stored]
        return frozenset().union(*found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        output = func(*args, **(kwargs or {}))
        sources = self.sources((args, kwargs))
        given = list(zip(args, func._schema.arguments, strict=False))
        aliased = [self.shares.get(id(a), frozenset()) for a, v in given if v.alias_info is not None]
        writes = [a for a, v in given if v.is_write]
        self.written = self.written.union(*(self.shares.get(id(a), frozenset()) for a in writes))
        for value in writes:
            if isinstance(value, torch.Tensor):
                storage = storage_id(value.untyped_storage())
                self.put[storage] = self.put.get(storage, frozenset()) | sources
        for value in pytree.tree_leaves((output, writes)):
            if isinstance(value, torch.Tensor):
                self.kept.append(value)
                self.read[id(value)] = sources
                self.shares[id(value)] = frozenset().union(*aliased)
        return output


@contextmanager
def hidden_submodules(
    module: nn.Module, blocks: frozenset[str], *, eager_view: bool
) -> Iterator[Mapping[int, Call]]:
    """Replace the forward of every submodule that holds no block by one opaque operator. Yields the calls.

    With `eager_view` the glue between them is traced as it would run eagerly (see `EagerView`).
    """
    inside: list[str] = []  # the opaque submodules being run on fake tensors: what they call is theirs
    patched = [
        (child, "forward" in child.__dict__, child.forward)
        for path, child in module.named_modules()
        if path and not any(block.startswith(f"{path}.") for block in blocks)
    ]
    paths = {id(child): path for path, child in module.named_modules()}
    for child, _, forward in patched:
        child.forward = _opaque_forward(child, paths[id(child)], forward, inside, paths[id(child)] in blocks)
    if eager_view:
        patched.append((module, "forward" in module.__dict__, module.forward))
        module.forward = _eager_forward(module.forward)
    try:
        yield _calls
    finally:
        _calls.clear()
        _outcomes.clear()
        for child, own, forward in patched:
            del child.forward
            if own:
                child.forward = forward


def _eager_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def eager(*args: Any, **kwargs: Any) -> Any:
        with EagerView():
            output = forward(*args, **kwargs)
        know_dataclasses(output)
        return output

    return eager


def _opaque_forward(
    child: nn.Module, path: str, forward: Callable[..., Any], inside: list[str], is_block: bool
) -> Callable[..., Any]:
    def run(args: Any, kwargs: Any) -> Any:
        # Fake stand-ins for parameters and buffers, made under the tracer's fake mode.
        tensors = [
            *child.named_parameters(remove_duplicate=False),
            *child.named_buffers(remove_duplicate=False),
        ]
        state = {name: torch.empty(t.shape, dtype=t.dtype, device=t.device) for name, t in tensors}
        inside.append(path)
        try:
            with traced_as(eager=False):
                return torch.func.functional_call(child, state, args, kwargs, tie_weights=False)
        finally:
            inside.pop()

    def opaque(*args: Any, **kwargs: Any) -> Any:
        know_dataclasses((args, kwargs))
        flat, spec = pytree.tree_flatten((args, kwargs))
        if inside:
            return forward(*args, **kwargs)
        strange = [leaf for leaf in flat if not isinstance(leaf, (torch.Tensor, torch.SymInt, *CONSTANTS))]
        if strange and is_block:
            raise UserError(
                f"cannot cut at {path}: it is called with a {type(strange[0]).__name__}, which is neither a "
                "tensor nor a constant. If this is a key-value cache, set use_cache = False in the config."
            )
        if strange:
            return forward(*args, **kwargs)
        kept = (torch.Tensor, torch.SymInt)
        call = Call(
            path=path,
            arguments=[None if isinstance(leaf, kept) else leaf for leaf in flat],
            spec=spec,
            tensor_at=[i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)],
            size_at=[i for i, leaf in enumerate(flat) if isinstance(leaf, torch.SymInt)],
            run=run,
            kind=_kind(child, path),
            is_block=is_block,
            again=is_inside(),
        )
        number = len(_calls)
        _calls[number] = call
        results = submodule([flat[i] for i in call.tensor_at], [flat[i] for i in call.size_at], number)
        assert call.outcome is not None
        leaves = list(call.outcome.outputs)
        for at, tensor in zip(call.outcome.output_at, results, strict=True):
            leaves[at] = tensor
        return pytree.tree_unflatten(leaves, call.outcome.output_spec)

    return opaque


def _kind(child: nn.Module, path: str) -> Hashable:
    """Equal for submodules that are built alike: classes, printed configuration, shapes, plain attributes.

    An attribute that holds the submodule's own index (many blocks know which layer they are) does not count.
    """
    index = path.rpartition(".")[2]
    parts: list[Hashable] = [repr(child)]
    for name, part in child.named_modules():
        plain = tuple(
            (key, "index" if repr(value) == index else repr(value))
            for key, value in part.__dict__.items()
            if isinstance(value, int | float | str)
        )
        own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        state = tuple((key, t.shape, t.dtype, t.requires_grad) for key, t in own)
        parts.append((name, type(part), plain, state))
    return tuple(parts)
