"""Writes a training step as a `torch.fx.Graph` while it runs; what is on its nodes says `nodes`."""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.fx.node import _get_qualified_name

from autoparallel.planner.capture.marks import after, kept, unnamed
from autoparallel.planner.capture.meta_mode import MetaMode
from autoparallel.planner.capture.nodes import Frame, Launch, Meta, Role, SavedStorage, tensor_inputs
from autoparallel.planner.capture.trees import leaves, mapped
from autoparallel.planner.capture.values import storage_key

_PLAIN = (
    int, float, complex, bool, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_OPERATORS: dict[str, Any] = {"__getitem__": operator.getitem, "__setitem__": operator.setitem}


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype without the prefix."""
    return str(dtype).removeprefix("torch.")


def meta_of(tensor: torch.Tensor) -> Meta:
    """Shape, dtype, storage and distinct elements of a tensor."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    distinct = math.prod(shape)
    if 0 in strides:
        distinct = math.prod(
            size if stride else min(size, 1) for size, stride in zip(shape, strides, strict=True)
        )
    return Meta(
        shape=shape,
        dtype=dtype_name(tensor.dtype),
        distinct=distinct,
        storage=storage_key(tensor),
        layout=(int(tensor.storage_offset()), *strides),
    )


def _sequence_number() -> int:
    """The number that the next node of the autograd graph will get."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


@dataclass(slots=True)
class Pending:
    """A call that is running: what it has launched and what autograd keeps of it so far."""

    name: str
    frame: Frame
    first_node: int = field(
        default_factory=_sequence_number
    )  # the number of the first autograd node that it makes
    kernels: list[Launch] = field(default_factory=list)
    saved: list[SavedStorage] = field(default_factory=list)


class Writer:
    """The graph under construction, and which node each tensor is."""

    def __init__(self, meta_mode: MetaMode) -> None:
        self.graph = fx.Graph()
        self.calls: list[fx.Node] = []
        self.constants: dict[str, torch.Tensor] = {}
        self._meta_mode = meta_mode
        self._nodes: dict[int, fx.Node] = {}  # id(tensor) -> its node
        self._by_storage: dict[int, fx.Node] = {}  # storage -> the node that made it
        self._by_meta: dict[Meta, fx.Node] = {}
        self._kept: dict[
            Meta, tuple[fx.Node, int]
        ] = {}  # -> the call that it was kept for, its position there
        self._held: dict[
            int, tuple[torch.Tensor, Role, str]
        ] = {}  # id(tensor) -> what becomes a node when used
        self._held_at: dict[int, int] = {}  # storage -> id(tensor)
        self._alive: list[object] = []
        self._same: set[int] = set()  # id(tensor) of those that stand for others
        self._public: dict[Any, bool] = {}

    # -- tensors -----------------------------------------------------------------------------------------------

    def hold(self, tensor: torch.Tensor, role: Role, name: str) -> None:
        """Know a parameter or buffer by its name; it becomes a node where it is first used."""
        self._held[id(tensor)] = (tensor, role, name)
        self._held_at.setdefault(storage_key(tensor), id(tensor))

    def input(self, tensor: torch.Tensor, name: str) -> None:
        """A tensor that the module is given."""
        node = self.graph.placeholder(name)
        self._value(tensor, node, Role.INPUT, name=name, on_floats=tensor.is_floating_point())

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """The node that a tensor is; one never seen before becomes a constant or an alias of its storage."""
        if id(tensor) in self._nodes:
            return self._nodes[id(tensor)]
        if id(tensor) in self._held:
            return self._attribute(id(tensor))
        meta = self._meta_mode.to_meta(tensor)
        storage = storage_key(meta)
        if storage not in self._by_storage and storage in self._held_at:
            self._attribute(self._held_at[storage])
        if storage in self._by_storage:
            self._nodes[id(tensor)] = self._by_storage[storage]
            self._alive.append(tensor)
            return self._by_storage[storage]
        return self._constant(tensor, meta)

    def alive(self, tensor: torch.Tensor) -> None:
        """Keep a tensor: storages are told apart by address, and none may be freed."""
        self._alive.append(tensor)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a node, or becomes one where it is used."""
        return id(tensor) in self._nodes or id(tensor) in self._held

    def is_held(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter, a buffer or a constant."""
        if id(tensor) in self._held:
            return True
        node = self._nodes.get(id(tensor))
        return node is None or node.meta["role"] is Role.CONSTANT

    def same(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        """A tensor is what another is."""
        if id(tensor) not in self._nodes:
            self._nodes[id(tensor)] = self.node_of(other)
            self._alive.append(tensor)
            self._same.add(id(tensor))

    def once(self, items: Sequence[Any]) -> list[Any]:
        """The items, those that are `same` as others once each."""
        seen: set[int] = set()
        kept = []
        for item in items:
            if id(item) not in self._same or id(item) not in seen:
                kept.append(item)
            seen.add(id(item))
        return kept

    def known(self, tensor: torch.Tensor) -> fx.Node | None:
        """The node that a tensor is; None for one never seen before."""
        if id(tensor) in self._held and id(tensor) not in self._nodes:
            return self._attribute(id(tensor))
        return self._nodes.get(id(tensor))

    def _attribute(self, key: int) -> fx.Node:
        tensor, role, name = self._held[key]
        if key not in self._nodes:
            self._value(tensor, self.graph.get_attr(name), role, name=name)
        return self._nodes[key]

    def _constant(self, tensor: torch.Tensor, meta: torch.Tensor) -> fx.Node:
        name = f"constant_{len(self.constants)}"
        self.constants[name] = tensor
        node = self.graph.get_attr(name)
        self._value(tensor, node, Role.CONSTANT, name=name)
        node.meta["tensor"] = noted = meta_of(meta)
        self._by_storage.setdefault(noted.storage, node)
        self._by_meta[noted] = node
        return node

    def _value(self, tensor: torch.Tensor, node: fx.Node, role: Role, **notes: Any) -> None:
        noted = meta_of(tensor)
        node.meta |= {"role": role, "tensor": noted, "requires_grad": tensor.requires_grad}
        node.meta |= {"on_floats": False} | notes
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)
        if role is not Role.CONSTANT:  # its storage is that of its likeness on the meta device
            self._by_storage.setdefault(noted.storage, node)
            self._by_meta[noted] = node

    # -- the forward pass --------------------------------------------------------------------------------------

    def call(self, func: Any, args: Any, kwargs: Any, pending: Pending, **notes: Any) -> fx.Node:
        """A node for a call that has run."""
        args, kwargs = mapped(self._argument, args), mapped(self._argument, kwargs)
        node = self._create(func, pending.name, tuple(args), kwargs)
        inputs = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, fx.Node)]
        node.meta |= {"role": Role.CALL, "torch_name": pending.name, "frame": pending.frame}
        node.meta |= {"inputs": tuple(inputs), "outputs": []}
        node.meta |= {"kernels": pending.kernels, "saved": pending.saved, "backward": []} | notes
        for saved in pending.saved:
            self._kept.setdefault(saved.meta, (node, saved.position))
        self.calls.append(node)
        return node

    def keep(self, saved: SavedStorage) -> None:
        """What autograd keeps outside of any call belongs to the call before."""
        self.calls[-1].meta["saved"].append(saved)
        self._kept.setdefault(saved.meta, (self.calls[-1], saved.position))

    def _create(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        if name in _OPERATORS:
            return self.graph.call_function(_OPERATORS[name], args, kwargs)
        if isinstance(func, types.MethodWrapperType):  # the getter or setter of an attribute
            by_name = getattr if func.__name__ == "__get__" else setattr
            return self.graph.call_function(
                by_name, (args[0], name, *args[1 : 2 if by_name is setattr else 1])
            )
        if getattr(torch.Tensor, name, None) is func and args and isinstance(args[0], fx.Node):
            return self.graph.call_method(name, args, kwargs)
        if self._is_public(func):
            return self.graph.call_function(func, args, kwargs)
        return self.graph.call_function(unnamed, (name, *args), kwargs)

    def _is_public(self, func: Any) -> bool:
        """Whether fx can print a call of `func`."""
        if func not in self._public:
            try:
                self._public[func] = "<" not in _get_qualified_name(func)
            except (RuntimeError, AttributeError):
                self._public[func] = False
        return self._public[func]

    def _argument(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.node_of(leaf)
        if isinstance(leaf, slice):
            return slice(*(self._bound(end) for end in (leaf.start, leaf.stop, leaf.step)))
        return leaf if isinstance(leaf, _PLAIN) else f"<{type(leaf).__name__}>"

    def _bound(self, end: Any) -> Any:
        value = self._meta_mode.known(end) if isinstance(end, torch.Tensor) else None
        return end if value is None else value.item()

    def results(self, call: fx.Node, out: Any, made: Sequence[torch.Tensor], **notes: Any) -> None:
        """Nodes for the tensors of `out`, and for those that the call wrote into, in the order of `made`."""
        places = _places(out)
        on_floats = any(node.meta["on_floats"] for node in tensor_inputs(call))
        for tensor in made:
            node = self._taken(call, places[id(tensor)]) if id(tensor) in places else self._nodes[id(tensor)]
            if id(tensor) not in places or node in call.meta["outputs"]:
                node = self.graph.call_function(after, (node, call))
            role = Role.CALL if node is call else Role.RESULT
            self._value(tensor, node, role, on_floats=on_floats, call=call, **notes)
            call.meta["outputs"].append(node)

    def _taken(self, call: fx.Node, place: tuple[Any, ...]) -> fx.Node:
        node = call
        for key in place:
            node = self.graph.call_function(operator.getitem, (node, key))
            node.meta |= {"role": Role.RESULT, "call": call}
        return node

    # -- the backward pass -------------------------------------------------------------------------------------

    def backward(
        self, func: Any, launch: Launch, out: Any, of: fx.Node | None, *, repeats: bool = False
    ) -> None:
        """A node for an ATen operator of the backward pass of the call `of`; None for what starts it. To detach a tensor
        makes the same one. One that `repeats` runs again what the call's forward pass ran."""
        if func is torch.ops.aten.detach.default:
            return
        _, args, kwargs = launch.signature
        metas = iter(launch.inputs)

        def place(leaf: Any) -> Any:
            return self._read(leaf, next(metas)) if isinstance(leaf, torch.Tensor) else self._argument(leaf)

        args, kwargs = mapped(place, args), mapped(place, kwargs)
        node = self.graph.call_function(func, tuple(args), kwargs)
        node.meta |= {"role": Role.BACKWARD, "of": of}
        if of is not None and not {"leaf", "stood_in_by"} & of.meta.keys():
            node.meta |= {"launch": launch, "repeats": repeats}
            of.meta["backward"].append(node)
        places = _places(out)
        results = [(place, node) for place in places.values()]
        for (place_, made), meta in zip(results, launch.outputs, strict=False):
            for key in place_:
                made = self.graph.call_function(operator.getitem, (made, key))
                made.meta |= {"role": Role.BACKWARD, "of": of}
            made.meta["tensor"] = meta
            self._by_meta[meta] = made
            self._by_storage.setdefault(meta.storage, made)

    def _read(self, tensor: torch.Tensor, meta: Meta) -> fx.Node:
        """The node that a tensor of the backward pass is, by its place in its storage."""
        if meta in self._by_meta:
            return self._by_meta[meta]
        if meta in self._kept:
            call, position = self._kept[meta]
            name = f"{call.name}_kept"
            node = self.graph.create_node("call_function", kept, (call, position), name=name)
            node.meta |= {"role": Role.KEPT, "call": call}
        elif meta.storage in self._by_storage or meta.storage in self._held_at:
            if meta.storage not in self._by_storage:
                self._attribute(self._held_at[meta.storage])
            base = self._by_storage[meta.storage]
            if base.meta["tensor"] == meta:
                return base
            offset, *strides = meta.layout
            node = self.graph.call_function(torch.as_strided, (base, list(meta.shape), strides, offset))
            node.meta |= {"role": Role.BACKWARD, "of": None}
        else:
            return self._constant(tensor, tensor)
        node.meta["tensor"] = meta
        self._by_meta[meta] = node
        return node

    def gradient(self, tensor: torch.Tensor, parameter: str) -> fx.Node:
        """The node that is the gradient of a parameter."""
        self.alive(tensor)
        node = self._read(tensor, meta_of(tensor))
        node.meta["gradient_of"] = parameter
        return node


def _places(out: Any, place: tuple[Any, ...] = ()) -> dict[int, tuple[Any, ...]]:
    """Where each tensor of a result stands in it, by `id`, as keys from the outside in."""
    if isinstance(out, torch.Tensor):
        return {id(out): place}
    items = out.items() if isinstance(out, dict) else enumerate(out) if isinstance(out, tuple | list) else ()
    found: dict[int, tuple[Any, ...]] = {}
    for key, item in items:
        for known, where in _places(item, (*place, key)).items():
            found.setdefault(known, where)
    return found
