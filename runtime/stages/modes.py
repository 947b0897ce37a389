"""Parts of a forward pass under `torch.no_grad()` or `torch.autocast()`. `torch.export` writes each of them as one call of a graph
within the graph; here its nodes stand among the others, each with the modes that it runs in (outermost first)."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx

_GRADIENTS = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_NAMES = {_GRADIENTS: "gradients", _AUTOCAST: "autocast"}
_ARGUMENTS = {_GRADIENTS: 1, _AUTOCAST: 4}  # how many arguments say the mode; the graph within comes next
_KEY = "modes"

Mode = tuple[Any, ...]  # its name, and what it is given


def modes_of(node: fx.Node) -> tuple[Mode, ...]:
    """The modes that a node runs in, outermost first."""
    return node.meta.get(_KEY, ())  # type: ignore[no-any-return]


@contextmanager
def marked_like(node: fx.Node, graph: fx.Graph) -> Iterator[None]:
    """What is added to `graph` inside runs in the modes of `node`."""
    before = set(graph.nodes) if modes_of(node) else set()
    yield
    if modes_of(node):
        for made in graph.nodes:
            if made not in before:
                made.meta[_KEY] = modes_of(node)


def inline_modes(module: fx.GraphModule) -> None:
    """Put the nodes of graphs within the graph where these are called."""
    while wrapped := [node for node in module.graph.nodes if node.target in _ARGUMENTS]:
        for node in wrapped:
            _inline(module.graph, node)


def _inline(graph: fx.Graph, node: fx.Node) -> None:
    target: Any = node.target
    arguments: tuple[Any, ...] = node.args
    count = _ARGUMENTS[target]
    mode, (within, *given) = (_NAMES[target], *arguments[:count]), arguments[count:]
    inner = _graph_at(graph, within)
    made: dict[fx.Node, Any] = {}
    places = iter(given)
    output: Any = ()
    with graph.inserting_before(node):
        for own in inner.graph.nodes:
            if own.op == "placeholder":
                made[own] = next(places)
            elif own.op == "output":
                output = fx.map_arg(own.args[0], lambda n: made[n])
            elif own.op == "get_attr":
                made[own] = _attribute(graph, inner, own)
            else:
                made[own] = graph.node_copy(own, lambda n: made[n])
                made[own].meta[_KEY] = (*modes_of(node), mode, *modes_of(own))
    for user in list(node.users):
        assert user.target is operator.getitem, user
        user.replace_all_uses_with(output[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
    if not within.users:
        graph.erase_node(within)


def _graph_at(graph: fx.Graph, node: Any) -> fx.GraphModule:
    found = graph.owning_module.get_submodule(str(node.target))  # type: ignore[union-attr]
    assert isinstance(found, fx.GraphModule)
    return found


def _attribute(graph: fx.Graph, inner: fx.GraphModule, node: fx.Node) -> fx.Node:
    """An attribute of the graph within, as one of the graph around it."""
    owner = graph.owning_module
    assert owner is not None
    name = f"{node.target}_of_{id(inner)}"
    setattr(owner, name, getattr(inner, str(node.target)))
    copy = graph.get_attr(name)
    copy.meta = dict(node.meta)
    return copy


class Modes:
    """Writes into the graph of a stage where modes begin and end, as its nodes are added in order."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._open: list[tuple[Mode, fx.Node]] = []

    def change(self, wanted: tuple[Mode, ...]) -> None:
        """What is added next runs in the modes `wanted`."""
        now = tuple(mode for mode, _ in self._open)
        same = 0
        while same < min(len(now), len(wanted)) and now[same] == wanted[same]:
            same += 1
        while len(self._open) > same:
            self._graph.call_function(end_mode, (self._open.pop()[1],))
        for mode in wanted[same:]:
            self._open.append((mode, self._graph.call_function(begin_mode, mode)))


def begin_mode(name: str, *given: Any) -> AbstractContextManager[Any]:
    """Begin a mode (called from the generated code of a stage)."""
    context: AbstractContextManager[Any]
    if name == "gradients":
        context = torch.set_grad_enabled(given[0])
    else:
        device, dtype, enabled, cached = given
        context = torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cached)
    context.__enter__()
    return context


def end_mode(context: AbstractContextManager[Any]) -> None:
    """End it (called from the generated code of a stage)."""
    context.__exit__(None, None, None)
