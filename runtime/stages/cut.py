"""Cut a module into pipeline stages that run the user's own submodules under their own names.

The outer graph of the module (see `outer_graph.py`) is split by position: what runs between two repeated blocks
belongs to the stage of the first of them, what comes before the first block to the first stage, what comes
after the last to the last stage. Only values that depend on parameters (or on random numbers) are handed from
stage to stage; what depends on inputs and buffers alone (position ids, masks, rotary tables) is computed again
by every stage that reads it. Every stage therefore gets the whole model's inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoparallel.errors import UserError
from autoparallel.runtime.gradients.dense import make_dense
from autoparallel.runtime.stages.export_inputs import flatten_inputs
from autoparallel.runtime.stages.outer_graph import OuterGraph, outer_graph
from autoparallel.runtime.stages.split import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """One parameter that several stages hold, each under a name of its own (`names[i]` on `stages[i]`).

    `canonical` is its first name in the whole model; the first of the stages counts as its owner.
    """

    canonical: str
    stages: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCut:
    """What a stage is: its place, what it is handed, what it hands on, and which parameters are tied."""

    index: int
    stages: int
    received: tuple[str, ...]  # values that the stage before hands on, in order
    sent: tuple[str, ...]  # values handed to the stage after, in order; () for the last stage
    blocks: tuple[str, ...]  # paths of its repeated blocks
    ties: tuple[Tie, ...]  # of the whole model
    again: tuple[str, ...] = ()  # of the blocks: those that a checkpoint of the model's own code is around

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1


class StageModule(nn.Module):
    """One pipeline stage. Its submodules, parameters and buffers stand under the original's names.

    `forward(received, inputs)` takes the values handed on by the stage before (none for the first stage) and
    the whole model's inputs, and returns the tuple of values to hand on, or the model's output on the last.
    """

    def __init__(
        self,
        stage_cut: StageCut,
        module: nn.Module,
        graph: fx.Graph,
        outer: OuterGraph,
        inputs: Sequence[int],
    ) -> None:
        super().__init__()
        self.stage_cut = stage_cut
        _attach(self, module, graph, outer.constants)
        own = set(module.modules())
        for container in self.modules():
            if container not in own:
                container.training = module.training
        self._whole = (module,)  # not a submodule: parameters of other stages are none of this one's
        code = graph.python_code("self")
        self.source = code.src
        space = dict(code.globals)
        exec(code.src, space)  # what fx.GraphModule does with the same source, but reading this module's tree
        self._run = space["forward"]
        self._inputs = tuple(inputs)  # flat positions of the model inputs that the graph takes
        self._input_spec, self._output_spec = outer.input_spec, outer.output_spec

    def train(self, mode: bool = True) -> StageModule:
        """As the whole module does it, which may leave parts of it in evaluation (a teacher, frozen statistics)."""
        super().train(mode)
        self._whole[0].train(mode)
        return self

    def forward(self, received: Sequence[torch.Tensor], inputs: Any) -> Any:
        assert len(received) == len(self.stage_cut.received)
        flat = match_inputs(inputs, self._input_spec)
        output = self._run(self, *received, *(flat[i] for i in self._inputs))
        return pytree.tree_unflatten(output, self._output_spec) if self.stage_cut.is_last else tuple(output)


def match_inputs(inputs: Any, spec: pytree.TreeSpec) -> list[Any]:
    """The flat leaves of `inputs`, which must have the structure of the example inputs (keywords in any order)."""
    args, kwargs = flatten_inputs(inputs)
    wanted = spec.child(1).context or []
    if set(kwargs) != set(wanted):
        raise UserError(
            f"the step's inputs are {sorted(kwargs)}, but the model was cut for {sorted(wanted)}: "
            "pass the same arguments as in example_inputs."
        )
    flat, given = pytree.tree_flatten((args, {key: kwargs[key] for key in wanted}))
    if given != spec:
        raise UserError(f"the step's inputs have the structure {given}, but the model was cut for {spec}.")
    return flat


def cut(
    module: nn.Module,
    example_inputs: Any,
    *,
    repeated_paths: Sequence[str],
    stage_blocks: Sequence[int],
    stages: Collection[int] | None = None,
    device: torch.device | None = None,
) -> tuple[StageModule, ...]:
    """The pipeline stages of `module` (only those in `stages`, if given), in order.

    `repeated_paths` are the module paths of the repeated blocks in execution order, `stage_blocks` how many of
    them each stage runs. Example inputs and parameters may be real or on the meta device; glue that creates
    tensors creates them on `device` (default: where the parameters are). The stages share the module's own
    submodules and parameters (embeddings with dense gradients); see `release` for the rest. Raises UserError where the module cannot be cut.
    """
    if sum(stage_blocks) != len(repeated_paths):
        raise UserError(
            f"pipeline.stage_blocks = {list(stage_blocks)} adds up to {sum(stage_blocks)}, but the model has "
            f"{len(repeated_paths)} repeated blocks."
        )
    if device is None:
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
    make_dense(module)  # before the graph says otherwise
    outer = outer_graph(module, example_inputs, repeated_paths=repeated_paths, device=device)
    split = Split(module, outer, repeated_paths, stage_blocks)
    graphs = [split.stage_graph(s) for s in range(len(stage_blocks))]
    ties = _find_ties(module, [graph for graph, _ in graphs])
    unused = _unused(module, [graph for graph, _ in graphs])
    built = []
    for s, (graph, inputs) in enumerate(graphs):
        if stages is None or s in stages:
            first = sum(stage_blocks[:s])
            blocks = tuple(repeated_paths[first : first + stage_blocks[s]])
            stage_cut = StageCut(
                index=s,
                stages=len(stage_blocks),
                received=tuple(v.name for v in split.handed[s]),
                sent=tuple(v.name for v in split.handed[s + 1]),
                blocks=blocks,
                ties=ties,
                again=tuple(path for path in blocks if path in outer.again),
            )
            built.append(StageModule(stage_cut, module, graph, outer, inputs))
            for name in unused if s == 0 else ():
                _place_at(built[-1], module, name, _tensor_at(module, name))
    return tuple(built)


def release(module: nn.Module, stages: Iterable[nn.Module]) -> None:
    """Move to the meta device every parameter and buffer of `module` that none of `stages` holds."""
    kept = {id(t) for stage in stages for t in (*stage.parameters(), *stage.buffers())}
    moved: dict[int, torch.Tensor] = {}  # tied parameters stay tied
    for child in module.modules():
        for name, tensor in [*child.named_parameters(recurse=False), *child.named_buffers(recurse=False)]:
            if id(tensor) in kept or tensor.is_meta:
                continue
            if id(tensor) not in moved:
                empty = torch.empty_like(tensor, device="meta")
                trains = tensor.requires_grad
                moved[id(tensor)] = nn.Parameter(empty, trains) if isinstance(tensor, nn.Parameter) else empty
                kept.add(id(moved[id(tensor)]))
            setattr(child, name, moved[id(tensor)])


def _attach(
    stage: nn.Module,
    module: nn.Module,
    graph: fx.Graph,
    constants: Mapping[str, torch.Tensor | fx.GraphModule],
) -> None:
    """Put everything that the graph names into `stage`, under the same path as in `module`."""
    # In the graph's order, the same in every process: buckets of gradients follow the order of parameters.
    calls = dict.fromkeys(str(n.target) for n in graph.nodes if n.op == "call_module")
    for path in sorted(calls, key=lambda p: p.count(".")):
        _place_at(stage, module, path, module.get_submodule(path))
    for name in sorted({str(n.target) for n in graph.nodes if n.op == "get_attr"}):
        if isinstance(constant := constants.get(name), fx.GraphModule):
            stage.add_module(name, constant)
        elif constant is not None:
            stage.register_buffer(name, constant, persistent=False)
        else:
            _place_at(stage, module, name, _tensor_at(module, name))


def _place_at(stage: nn.Module, module: nn.Module, path: str, item: nn.Module | torch.Tensor) -> None:
    *containers, leaf = path.split(".")
    at = stage
    for name in containers:
        if not hasattr(at, name):
            at.add_module(name, nn.Module())
        at = getattr(at, name)
    if getattr(at, leaf, None) is item:
        return
    if isinstance(item, nn.Module):
        at.add_module(leaf, item)
    elif isinstance(item, nn.Parameter):
        at.register_parameter(leaf, item)
    else:
        at.register_buffer(leaf, item, persistent=path in module.state_dict())


def _tensor_at(module: nn.Module, name: str) -> torch.Tensor:
    parent, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(parent), leaf)  # type: ignore[no-any-return]


def _unused(module: nn.Module, graphs: Sequence[fx.Graph]) -> list[str]:
    """State of the module that no stage reads: the first stage keeps it, so that none is lost."""
    nodes = [node for graph in graphs for node in graph.nodes]
    called = {str(node.target) for node in nodes if node.op == "call_module"}
    read = {str(node.target) for node in nodes if node.op == "get_attr"}
    state = module.state_dict(keep_vars=True)
    held = {id(t) for path in called for t in module.get_submodule(path).state_dict(keep_vars=True).values()}
    held |= {id(state[name]) for name in read if name in state}
    return [name for name, t in state.items() if isinstance(t, torch.Tensor) and id(t) not in held]


def _find_ties(module: nn.Module, graphs: Sequence[fx.Graph]) -> tuple[Tie, ...]:
    """Parameters held by more than one stage, in the model's order."""
    held: dict[int, dict[int, str]] = {}  # parameter -> stage -> its name there
    every = dict(module.named_parameters(remove_duplicate=False))
    names = {id(parameter): name for name, parameter in reversed(every.items())}
    for s, graph in enumerate(graphs):
        for node in graph.nodes:
            if node.op == "call_module":
                child = module.get_submodule(str(node.target))
                for name, parameter in child.named_parameters():
                    held.setdefault(id(parameter), {}).setdefault(s, f"{node.target}.{name}")
            elif node.op == "get_attr" and node.target in every:
                held.setdefault(id(every[node.target]), {}).setdefault(s, node.target)
    return tuple(
        Tie(canonical=names[key], stages=tuple(held[key]), names=tuple(held[key].values()))
        for key in sorted(names, key=lambda k: list(every).index(names[k]))
        if len(held.get(key, ())) > 1
    )
