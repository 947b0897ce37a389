"""`trace`: one training step of a module as a `torch.fx.GraphModule`, to read, print and check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx
from torch.fx.passes.shape_prop import TensorMetadata
from torch.utils._pytree import tree_leaves

from autoparallel.costmodel.collecting import without_collection
from autoparallel.planner.capture.errors import ModelError, TraceError, UntraceableError
from autoparallel.planner.capture.fold import FoldPlan
from autoparallel.planner.capture.leaf import LeafError
from autoparallel.planner.capture.nodes import Meta, Role, outputs
from autoparallel.planner.capture.on_meta import on_meta
from autoparallel.planner.capture.step import Step, trace_step
from autoparallel.planner.capture.trees import know_dataclasses, mapped

_Result = TypeVar("_Result")


@without_collection()
def trace(module: torch.nn.Module, example_inputs: Any, *, micro_batch: int | None = None) -> fx.GraphModule:
    """Forward and backward of one micro-batch of `module` as one graph; what its nodes say is told in `nodes`.

    `example_inputs` are a tensor, a tuple of positional or a mapping of keyword arguments, batch first; their batch is
    taken, or `micro_batch`. Nothing is computed: the module runs on the meta device, and is left as it was. The graph's
    `get_attr` nodes are the module's own parameters and buffers. `print(trace(…).code)` shows it; `print_readable()` with
    shapes. Raises ModelError where the module does not run on the example.
    """
    inputs = checked_inputs(module, example_inputs, type(module).__name__)
    if micro_batch is None:
        micro_batch = next(t.shape[0] for t in tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.dim())
    with on_meta(module):
        step, _ = with_leaves(module, lambda plan: trace_step(module, inputs, micro_batch, plan))
    return _graph_module(module, step)


def forward_half(traced: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """The forward pass of a traced step alone, on `device`: takes the module's input tensors, returns its outputs."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def at_home(leaf: Any) -> Any:
        return device if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

    for node in traced.graph.nodes:
        if node.op == "output" or node.meta["role"] in {Role.BACKWARD, Role.KEPT}:
            continue
        copy = copies[node] = graph.node_copy(node, copies.__getitem__)
        copy.args, copy.kwargs = mapped(at_home, tuple(copy.args)), mapped(at_home, dict(copy.kwargs))
    graph.output(tuple(copies[node] for node in outputs(traced.graph)))
    return fx.GraphModule(traced, graph)


def checked_inputs(module: torch.nn.Module, example_inputs: Any, name: str) -> Any:
    """The inputs as a tuple or a mapping. Raises ModelError for what cannot be captured whatever its code does."""
    know_dataclasses(example_inputs)
    inputs = example_inputs if isinstance(example_inputs, Mapping | tuple) else (example_inputs,)
    leaves = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
    if not any(leaf.dim() and leaf.shape[0] for leaf in leaves):
        raise ModelError(
            f"{name}: the example inputs hold no tensor with samples: pass at least one batch-first tensor"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelError(
            f"{name} is TorchScript, whose code cannot be followed: give the module that it was made from"
        )
    if lazy := next((n for n, p in module.named_parameters() if torch.nn.parameter.is_lazy(p)), None):
        raise ModelError(
            f"{name}: the size of {lazy} is not known yet: call the module once on its example inputs, or give the "
            "layer its input size"
        )
    return inputs


@dataclass(frozen=True, slots=True)
class Untraced:
    """What is priced otherwise than by its own numbers: modules that are priced whole, each with why, and the module that
    asked what was chosen, where equal shares are taken."""

    leaves: Mapping[str, str]
    shares: str | None


def with_leaves(module: torch.nn.Module, take: Callable[[FoldPlan], _Result]) -> tuple[_Result, Untraced]:
    """What `take` makes of the module with as few modules as leaves (priced whole) as it needs; those, each with why. Code
    that looks at values gets equal shares (`choices`) where that is enough, before anything is a leaf."""
    leaves: dict[str, str] = {}
    shares: tuple[str, str] | None = None  # where and why equal shares are taken
    tried: set[str] = set()
    while True:
        try:
            plan = FoldPlan(leaves=tuple(leaves), shares=shares is not None)
            return take(plan), Untraced(leaves, None if shares is None else shares[0])
        except TraceError as error:
            looked = isinstance(error.__cause__, UntraceableError | NotImplementedError)
            if looked and shares is None and error.path not in tried:
                shares = (error.path, error.reason)
                tried.add(error.path)
                continue
            if shares == (error.path, error.reason):
                shares = None  # of no help: other values are looked at
            leaves |= _more_leaves(module, error, leaves)
        except LeafError as error:
            where = error.path or type(module).__name__
            raise ModelError(
                f"{where} cannot be traced ({leaves[error.path]}), and is not run for its costs, because {error}: make its "
                "control flow independent of the data, or give the inputs that it needs"
            ) from error


def _more_leaves(module: torch.nn.Module, error: TraceError, known: Mapping[str, str]) -> dict[str, str]:
    """The module that failed and all of its class: what one cannot do the others cannot. One that does not run on numbers
    of their shapes either (boxes, lengths) is part of what calls it, at last of the model, which gets the example's own."""
    if error.path in known:
        path = error.path
        while path and path in known:
            path = _caller(module, path)
        if path in known:
            raise ModelError(
                f"{type(module).__name__} can neither be traced ({known['']}) nor run on the example inputs: {error.reason}"
            ) from error
        return {path: known[error.path]}
    failed = type(module.get_submodule(error.path))
    return {
        path: error.reason
        for path, part in module.named_modules()
        if path == error.path or (type(part) is failed and failed is not type(module))
    }


def _caller(module: torch.nn.Module, path: str) -> str:
    """The module around the one at `path` that has code of its own."""
    containers = (torch.nn.ModuleList, torch.nn.ModuleDict)
    while (path := path.rpartition(".")[0]) and isinstance(module.get_submodule(path), containers):
        pass
    return path


def _graph_module(module: torch.nn.Module, step: Step) -> fx.GraphModule:
    """The graph with the tensors that it names, and what fx's own tools look for on its nodes."""
    held = dict(module.named_parameters()) | dict(module.named_buffers()) | dict(step.constants)
    names = [str(node.target) for node in step.graph.nodes if node.op == "get_attr"]
    for node in step.graph.nodes:
        if "tensor" in node.meta:
            node.meta["tensor_meta"] = _for_fx(node.meta["tensor"], node.meta.get("requires_grad", False))
        if node.meta.get("role") is Role.CALL:
            stack = reversed(node.meta["frame"].stack())
            node.meta["nn_module_stack"] = {frame.path: (frame.path, frame.class_name) for frame in stack}
    return fx.GraphModule({name: held[name] for name in names}, step.graph, type(module).__name__)


def _for_fx(meta: Meta, requires_grad: bool) -> TensorMetadata:
    return TensorMetadata(
        shape=torch.Size(meta.shape),
        dtype=getattr(torch, meta.dtype),
        requires_grad=requires_grad,
        stride=meta.layout[1:],
        memory_format=None,
        is_quantized=False,
        qparams={},
    )
