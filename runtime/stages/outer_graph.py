"""A module as an outer graph: its submodules called whole, and the glue between them as ATen operators.

Method: every submodule that does not contain a repeated block is replaced, while `torch.export` traces, by one
opaque operator that hides what the submodule does and only says which tensors go in and come out. Afterwards
each opaque call becomes a call of the user's own submodule. Nothing inside a submodule is traced, so its
parameters, buffers (batch statistics), dropout and hooks stay its own, and depth costs next to nothing.

Why not the graph that planning captured: that is the step of one micro-batch, every size in it a number, and what a run is
given differs (a last smaller batch, another micro-batch than was traced). BERT shows it: the glue in front of its layers
widens the mask to the batch, and the forward half of a trace of two samples (`planner.capture.traced.forward_half`) gives
BERT's own numbers for two samples and an error for three. `torch.export` alone writes the glue with the batch as a symbol.
"""

from __future__ import annotations

import io
import operator
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram, export
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from autoparallel.errors import UserError
from autoparallel.planner.capture.trees import fields_of, holds_fields
from autoparallel.planner.capture.trusting import trusting
from autoparallel.runtime.own_checkpoints import opened
from autoparallel.runtime.stages.export_inputs import (
    flatten_inputs,
    named_arguments,
    open_batch,
    tracing_inputs,
)
from autoparallel.runtime.stages.modes import inline_modes, marked_like
from autoparallel.runtime.stages.opaque import Call, hidden_submodules
from autoparallel.runtime.stages.vmapped import is_level, levels_of
from autoparallel.runtime.torch_private import is_open

HIDDEN = torch.ops.autoparallel.submodule.default


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterGraph:
    """The graph, and what ties it to the module it came from.

    Nodes: a placeholder per tensor input; `call_module` by path; `get_attr` for parameters, buffers and
    constants; `call_function` for glue. The output node holds the flat outputs.
    """

    graph: fx.Graph
    input_spec: pytree.TreeSpec  # of (args, kwargs)
    input_positions: tuple[int, ...]  # flat positions of the placeholders, in order
    output_spec: pytree.TreeSpec
    constants: Mapping[str, torch.Tensor | fx.GraphModule]
    random_calls: frozenset[str]  # names of the calls that draw random numbers
    written: Mapping[str, tuple[str, ...]]  # of submodule calls: the values that they change in place
    again: frozenset[str]  # submodules that a checkpoint of the model's own code is around


def tensor_leaf(output: Any, index: int) -> torch.Tensor:
    """The `index`-th leaf of a submodule's output (called from the generated code of a stage)."""
    return pytree.tree_leaves(output)[index]  # type: ignore[no-any-return]


def unread(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Stands for a tensor whose values nobody reads (called from the generated code of a stage)."""
    return torch.empty((), dtype=dtype, device=device).expand(list(shape))


def outer_graph(
    module: nn.Module, example_inputs: Any, *, repeated_paths: Sequence[str], device: torch.device
) -> OuterGraph:
    """Trace `module` on `example_inputs` (real or meta; only shapes and dtypes matter).

    Glue that creates tensors creates them on `device`. Raises UserError where the module cannot be traced or
    does not call its repeated blocks in the order given.
    """
    home = next((p.device for p in module.parameters()), device)
    given, blocks = flatten_inputs(example_inputs), frozenset(repeated_paths)
    args, kwargs = tracing_inputs(given, home, doubled=True)
    program, calls = _traced(module, args, kwargs, blocks)
    if _is_fixed(program):  # code that counts its samples in Python: it is traced with as many as there are
        args, kwargs = tracing_inputs(given, home, doubled=False)
        program, calls = _traced(module, args, kwargs, blocks)
    _check_order([c.path for c in calls.values()], repeated_paths)
    return _Builder(module, program, calls, home, device).build(pytree.tree_structure((args, kwargs)))


def _traced(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], blocks: frozenset[str]
) -> tuple[ExportedProgram, dict[int, Call]]:
    shapes = open_batch(args, kwargs)
    try:
        return _export(module, args, kwargs, shapes, blocks, eager_view=True)
    except UserError:
        raise
    except Exception:
        # Eager code that branches on its inputs (is there padding?) has another way under export.
        return _export(module, args, kwargs, shapes, blocks, eager_view=False)


def _is_fixed(program: ExportedProgram) -> bool:
    """Whether the trace holds for the batch size of its inputs only."""
    kinds = program.graph_signature.input_specs
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    values = [n.meta.get("val") for n, s in zip(nodes, kinds, strict=True) if s.kind == InputKind.USER_INPUT]
    shapes = [value.shape for value in values if isinstance(value, torch.Tensor) and value.dim()]
    return bool(shapes) and not any(is_open(shape[0]) for shape in shapes)


def _export(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shapes: Any,
    blocks: frozenset[str],
    *,
    eager_view: bool,
) -> tuple[ExportedProgram, dict[int, Call]]:
    """The exported program, and the calls of submodules in it. UserError if the last way fails."""
    printed = io.StringIO()  # where export fails it prints the graph that it had got to
    try:
        with (
            redirect_stderr(printed),
            named_arguments(module, kwargs),
            hidden_submodules(module, blocks, eager_view=eager_view) as calls,
            opened(),
            trusting(),
        ):
            program = export(module, args, kwargs, strict=False, dynamic_shapes=shapes), dict(calls)
        sys.stderr.write(printed.getvalue())
        return program
    except UserError:
        raise
    except Exception as error:
        if eager_view:
            raise
        raise UserError(
            f"cannot cut {type(module).__name__} into pipeline stages: torch.export cannot trace it "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0]}). Use mesh.pp = 1."
        ) from error


def _check_order(called: list[str], repeated_paths: Sequence[str]) -> None:
    blocks = set(repeated_paths)
    order = [path for path in called if path in blocks]
    if order != list(repeated_paths):
        raise UserError(
            f"cannot cut into pipeline stages: the blocks run in the order {order}, not {list(repeated_paths)}. "
            "Use mesh.pp = 1."
        )


class _Builder:
    """Rewrites the exported graph: opaque operators into calls, lifted state into attributes."""

    def __init__(
        self,
        module: nn.Module,
        program: ExportedProgram,
        calls: Mapping[int, Call],
        home: torch.device,
        device: torch.device,
    ) -> None:
        self.module, self.program, self.calls, self.home, self.device = module, program, calls, home, device
        self.graph = fx.Graph()
        self.env: dict[fx.Node, Any] = {}
        self.constants: dict[str, torch.Tensor | fx.GraphModule] = {}
        self.random: set[str] = set()
        self.written: dict[str, tuple[str, ...]] = {}
        self.symbols: dict[str, tuple[fx.Node, int]] = {}  # a batch symbol -> the input dim that holds it

    def build(self, input_spec: pytree.TreeSpec) -> OuterGraph:
        inline_modes(self.program.graph_module)
        signature = self.program.graph_signature
        for spec in signature.output_specs:
            if spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT):
                raise UserError(
                    f"cannot cut into pipeline stages: {type(self.module).__name__}.forward itself changes "
                    f"{spec.target}; move that into a submodule."
                )
        output = next(n for n in self.program.graph.nodes if n.op == "output")
        positions = self._inputs()
        # The exported graph is not functional: what writes in place counts as used.
        nodes = self.program.graph.nodes
        called = {n for n in nodes if n.target is HIDDEN and self.calls[n.args[2]].is_block}
        needed = _ancestors([output, *(n for n in nodes if writes(n) or n in called)])
        needed |= _ancestors(levels_of(nodes, needed))
        for node in nodes:
            if node in needed and node.op not in ("placeholder", "output"):
                with marked_like(node, self.graph):
                    self._copy(node)
        paths = {call.path for call in self.calls.values() if call.is_block}
        blocks = {n for n in self.graph.nodes if n.op == "call_module" and n.target in paths}
        self.graph.output(fx.map_arg(tuple(output.args[0]), lambda n: self.env[n]))
        for node in reversed(self.graph.nodes):
            kept = node.op in ("placeholder", "output") or writes(node) or is_level(node)
            kept |= node in blocks
            if not node.users and not kept:
                self.graph.erase_node(node)
        return OuterGraph(
            graph=self.graph,
            input_spec=input_spec,
            input_positions=positions,
            output_spec=self.program.call_spec.out_spec,
            constants=self.constants,
            random_calls=frozenset(self.random),
            written=self.written,
            again=frozenset(call.path for call in self.calls.values() if call.again),
        )

    def _inputs(self) -> tuple[int, ...]:
        """Placeholders for what the user passes, attributes for what export lifted."""
        nodes = [n for n in self.program.graph.nodes if n.op == "placeholder"]
        positions: list[int] = []
        user = 0
        for node, spec in zip(nodes, self.program.graph_signature.input_specs, strict=True):
            if spec.kind == InputKind.USER_INPUT:
                if isinstance(node.meta.get("val"), torch.Tensor):
                    copy = self.graph.placeholder(node.name)
                    copy.meta = dict(node.meta)
                    self.env[node] = copy
                    positions.append(user)
                    for dim, size in enumerate(node.meta["val"].shape):
                        if isinstance(size, torch.SymInt):
                            self.symbols.setdefault(str(size), (copy, dim))
                user += 1
        for node, spec in zip(nodes, self.program.graph_signature.input_specs, strict=True):
            if spec.kind != InputKind.USER_INPUT and node.users:
                self.env[node] = self._attribute(node, spec.kind, spec.target or node.name)
        return tuple(positions)

    def _attribute(self, node: fx.Node, kind: InputKind, name: str) -> fx.Node:
        if kind not in (InputKind.PARAMETER, InputKind.BUFFER):
            constant = self.program.constants[name]
            name = f"constant_{len(self.constants)}"
            assert isinstance(constant, torch.Tensor)
            self.constants[name] = constant.to(self.device)
        copy = self.graph.get_attr(name)
        copy.meta = dict(node.meta)
        return copy

    def _copy(self, node: fx.Node) -> None:
        if node.target is HIDDEN:
            self._call(node)
        elif node.target is operator.getitem and _is_call(node.args[0]):
            self.env[node] = self.env[node.all_input_nodes[0]][node.args[1]]
        elif node.target is torch.ops.aten.sym_size.int and str(node.meta["val"]) in self.symbols:
            # Read the batch off an input, which every stage has, and not off an activation.
            size = node.meta["val"]
            self.env[node] = self._function(node.target, self.symbols[str(size)], size)
        elif node.op == "get_attr":
            name = f"constant_{len(self.constants)}"
            self.constants[name] = getattr(self.program.graph_module, str(node.target))
            self.env[node] = self.graph.get_attr(name)
        else:
            copy = self.graph.node_copy(node, lambda n: self.env[n])
            copy.args, copy.kwargs = self._at_home(copy.args), self._at_home(copy.kwargs)
            if copy.target is torch.ops.aten.cross_entropy_loss.default:
                _as_functional_loss(copy)
            self.env[node] = copy
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                self.random.add(copy.name)

    def _call(self, node: fx.Node) -> None:
        tensors, sizes, number = node.args
        call = self.calls[number]  # type: ignore[index]
        flat = list(call.arguments)
        for at, value in zip([*call.tensor_at, *call.size_at], [*tensors, *sizes], strict=True):  # type: ignore[misc]
            flat[at] = self.env[value] if isinstance(value, fx.Node) else value
        seen = call.outcome
        assert seen is not None
        if not seen.random and not any(True for _ in self.module.get_submodule(call.path).parameters()):
            for index in seen.unread:
                flat[call.tensor_at[index]] = self._stand_in(flat[call.tensor_at[index]])
        args, kwargs = pytree.tree_unflatten([self._at_home(leaf) for leaf in flat], call.spec)
        copy = self.graph.call_module(call.path, tuple(map(self._made, args)), self._made(kwargs))
        if seen.random:
            self.random.add(copy.name)
        written = [flat[call.tensor_at[index]] for index in seen.written]
        if written:
            self.written[copy.name] = tuple(node.name for node in written)
        if seen.output_spec.is_leaf():
            copy.meta["val"] = node.meta["val"][0]
            self.env[node] = [copy]
        else:
            self.env[node] = [
                self._function(tensor_leaf, (copy, at), value)
                for at, value in zip(seen.output_at, node.meta["val"], strict=True)
            ]

    def _made(self, value: Any) -> Any:
        """An argument, the dataclasses in it made by the graph."""
        if holds_fields(value):
            fields = {name: self._made(field) for name, field in fields_of(value).items()}
            return self.graph.call_function(type(value), (), fields)
        if isinstance(value, dict):
            return {key: self._made(item) for key, item in value.items()}
        if isinstance(value, list) or type(value) is tuple:
            return type(value)(map(self._made, value))
        return value

    def _stand_in(self, value: fx.Node) -> fx.Node:
        """A free stand-in for a tensor whose values are not read (a rotary embedding only wants a dtype), so
        that what does not depend on parameters need not be sent."""
        shape: list[Any] = []
        for size in value.meta["val"].shape:
            symbol = self.symbols.get(str(size)) if isinstance(size, torch.SymInt) else None
            if symbol is None and isinstance(size, torch.SymInt):
                return value
            shape.append(
                size if symbol is None else self._function(torch.ops.aten.sym_size.int, symbol, size)
            )
        return self._function(unread, (shape, value.meta["val"].dtype, self.device), value.meta["val"])

    def _function(self, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = value
        return node

    def _at_home(self, value: Any) -> Any:
        """Replace the device that was traced on by the one that runs."""
        if isinstance(value, tuple | list):
            return type(value)(self._at_home(item) for item in value)
        if isinstance(value, dict):
            return {key: self._at_home(item) for key, item in value.items()}
        return self.device if isinstance(value, torch.device) and value == self.home else value


def _as_functional_loss(node: fx.Node) -> None:
    """The public function in place of its operator: a vocabulary-parallel loss steps in for that one."""
    names = ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    given = {**dict(zip(names, node.args)), **node.kwargs}
    given["input"] = given.pop("self", given.get("input"))
    given["reduction"] = ("none", "mean", "sum")[given.get("reduction", 1)]  # type: ignore[index]
    node.target, node.args, node.kwargs = nn.functional.cross_entropy, (), given


def _is_call(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is HIDDEN


def writes(node: fx.Node) -> bool:
    """Whether the node changes one of its inputs in place."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def _ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    seen = set(nodes)
    stack = list(nodes)
    while stack:
        for parent in stack.pop().all_input_nodes:
            if parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return seen
