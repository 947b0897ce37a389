"""Which links of the chain are equal: by what their calls are and do, and how tensors pass between them.

The structure of a link is what its block is made from: the functions that it calls with their plain arguments, the
kernels below them forward and backward, every tensor by shape, dtype, layout and which of the link's storages it looks at
(at each micro-batch), what autograd keeps, which tensor is the result of which call, an input or a parameter of
which name in the block, and the boundaries of the modules inside. Links of equal structure have equal blocks, wherever
they come from: costs and shardings are found for the first of them alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import fx, nn

from autoparallel.costmodel.graph import Parameter
from autoparallel.planner.capture.alike import twins
from autoparallel.planner.capture.blocks import BlockMaker
from autoparallel.planner.capture.boundaries import frames_by_link
from autoparallel.planner.capture.fit import Fit
from autoparallel.planner.capture.flow import boundary, flow_of
from autoparallel.planner.capture.links import Link, calls_by_link
from autoparallel.planner.capture.names import ParameterNames
from autoparallel.planner.capture.nodes import Frame, Launch, Meta, tensor, tensor_inputs, tensor_outputs
from autoparallel.planner.capture.parameters import parameters_by_link
from autoparallel.planner.capture.trees import leaves

_PLAIN = (int, float, bool, str, complex, torch.dtype)


def with_repetition(graph: fx.Graph, module: nn.Module, fit: Fit) -> fx.Graph:
    """`graph`, each link told by `same` which is the first link of its structure, if it is not that itself."""
    by_link = calls_by_link(graph)
    flow, names, frames = flow_of(graph, by_link), ParameterNames.of(module), frames_by_link(graph)
    parameters = parameters_by_link(module, by_link, names)
    first: dict[Hashable, Link] = {}
    for position, (link, group) in enumerate(by_link.items()):
        if link.model:
            continue
        inputs, handed = boundary(list(by_link), by_link, flow, position)
        maker = BlockMaker(link, group, inputs, fit, names)
        maker.name_all()
        found = first.setdefault(_structure(maker, inputs, handed, frames[link], parameters[position]), link)
        link.same = None if found is link else found
    return graph


class _Storages:
    """Numbers for the storages of one link, in the order in which it meets them."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def number(self, storage: int) -> int:
        return self._numbers.setdefault(storage, len(self._numbers))

    def of(self, meta: Meta) -> Hashable:
        return (meta.shape, meta.dtype, meta.distinct, meta.layout, self.number(meta.storage))

    def launch(self, launch: Launch) -> Hashable:
        _, args, kwargs = launch.signature
        plain = tuple(_plain(leaf) for leaf in leaves((args, tuple(kwargs.items()))))
        sides = tuple(tuple(map(self.of, side)) for side in (launch.inputs, launch.outputs))
        return (launch.target, launch.is_view, plain, sides)


def _plain(leaf: object) -> Hashable:
    """An argument that is no tensor, told from equal ones of another type; a tensor is told by its meta."""
    if isinstance(leaf, slice):
        return (slice, leaf.start, leaf.stop, leaf.step)
    if isinstance(leaf, _PLAIN):
        return (type(leaf), leaf)
    return type(leaf).__qualname__


def _structure(
    maker: BlockMaker,
    inputs: Sequence[fx.Node],
    handed: Sequence[fx.Node],
    frames: Sequence[Frame],
    parameters: Sequence[Parameter],
) -> Hashable:
    storages = [_Storages() for _ in twins(maker.calls[0])]
    return (
        type(maker.link.frame),
        _tensors(inputs, storages),
        tuple(map(maker.value_name, handed)),
        tuple(_call(maker, call, storages) for call in maker.calls),
        tuple(parameters),
        maker.module_calls(frames),
    )


def _tensors(nodes: Sequence[fx.Node], storages: Sequence[_Storages]) -> Hashable:
    return tuple(
        (
            node.meta["requires_grad"],
            *(known.of(tensor(same)) for known, same in zip(storages, twins(node), strict=True)),
        )
        for node in nodes
    )


def _call(maker: BlockMaker, call: fx.Node, storages: Sequence[_Storages]) -> Hashable:
    path = call.meta["frame"].path
    plain = (leaf for leaf in leaves((call.args, call.kwargs)) if not isinstance(leaf, fx.Node))
    kept = [(keeper, at, twins(keeper)) for keeper, at, _ in call.meta["keeps"]]
    return (
        call.meta["torch_name"],
        maker.place(path),
        tuple(map(_plain, plain)),
        tuple(maker.value_name(node, path) for node in tensor_inputs(call)),
        _tensors(tensor_inputs(call), storages),
        _tensors(tensor_outputs(call), storages),
        tuple(_work(same, known) for same, known in zip(twins(call), storages, strict=True)),
        tuple(node.meta.get("weight_only") for node in call.meta["backward"]),
        tuple(
            (known.of(saved.meta), saved.storage_bytes)
            for _, at, keepers in kept
            for known, saved in zip(storages, (k.meta["saved"][at] for k in keepers), strict=True)
        ),
    )


def _work(call: fx.Node, storages: _Storages) -> Hashable:
    backward: Sequence[Mapping[str, Launch]] = [node.meta for node in call.meta["backward"]]
    return (
        tuple(map(storages.launch, call.meta["kernels"])),
        tuple(storages.launch(meta["launch"]) for meta in backward),
        call.meta.get("leaf"),
        call.meta.get("rounds", 1),
    )
