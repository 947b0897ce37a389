"""Which pipeline stage computes which node of an outer graph, and what the stages hand on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx, nn

from autoparallel.errors import UserError
from autoparallel.runtime.stages.modes import Modes, modes_of
from autoparallel.runtime.stages.outer_graph import OuterGraph, tensor_leaf, writes
from autoparallel.runtime.stages.vmapped import levels_of


class Split:
    """Which stage computes what, and what is handed over each boundary.

    `handed[s]` are the values that stage s receives; `handed[number of stages]` is empty.
    """

    def __init__(
        self,
        module: nn.Module,
        outer: OuterGraph,
        repeated_paths: Sequence[str],
        stage_blocks: Sequence[int],
    ) -> None:
        self.nodes = list(outer.graph.nodes)
        self.stages = len(stage_blocks)
        self.outer = outer
        _check_called(self.nodes, repeated_paths)
        self.placed = self._place(module, frozenset(repeated_paths), stage_blocks)
        self.writers = _writers(self.nodes)
        wants = [self._wanted(s) for s in range(self.stages)]
        read = set().union(*wants)
        unread = [n for n in self.nodes if writes(n) and n not in read and n not in self.placed]
        wants[0].update(unread)  # statistics of the inputs that no stage reads: the first keeps them
        self._add_what_leads_there(wants[0], unread, 0)
        self.handed: list[list[fx.Node]] = [[] for _ in range(self.stages + 1)]
        for node, home in self.placed.items():
            last = max((s for s in range(self.stages) if node in wants[s]), default=home)
            for s in range(home + 1, last + 1):
                self._check_sendable(node)
                self.handed[s].append(node)
        self.wants = wants

    def _place(
        self, module: nn.Module, blocks: frozenset[str], stage_blocks: Sequence[int]
    ) -> dict[fx.Node, int]:
        """The stage of every node that depends on parameters or random numbers; the others are free."""
        stage_of_block = [s for s, count in enumerate(stage_blocks) for _ in range(count)]
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        has_parameters = {
            path: any(True for _ in child.parameters())
            for path, child in module.named_modules(remove_duplicate=False)
        }
        placed: dict[fx.Node, int] = {}
        reads: set[fx.Node] = set()  # parameters themselves: read where they are used
        done, current = 0, 0
        for node in self.nodes:
            if node.op == "get_attr" and node.target in parameters:
                reads.add(node)
            if isinstance(node.target, type):  # a dataclass around values is made where it is used
                reads.update({node} if any(p in placed or p in reads for p in node.all_input_nodes) else ())
                continue
            if node.op == "call_module" and node.target in blocks:
                current, done = stage_of_block[done], done + 1
            bound = node.op == "call_module" and has_parameters[str(node.target)]
            bound |= node.name in self.outer.random_calls
            if node.op in ("call_module", "call_function") and (
                bound or any(parent in placed or parent in reads for parent in node.all_input_nodes)
            ):
                # What a submodule returned is taken apart where it ran.
                placed[node] = placed.get(node.args[0], current) if node.target is tensor_leaf else current
            if done == len(stage_of_block):
                current = self.stages - 1  # what follows the last block belongs to the last stage
        return placed

    def _wanted(self, stage: int) -> set[fx.Node]:
        """Every node that the stage computes or is handed."""
        wanted = {node for node, home in self.placed.items() if home == stage}
        if stage == self.stages - 1:
            wanted.add(self.nodes[-1])
        self._add_what_leads_there(wanted, list(wanted), stage)
        levels = [level for level in levels_of(self.nodes, wanted) if level not in wanted]
        wanted.update(levels)
        self._add_what_leads_there(wanted, levels, stage)
        return wanted

    def _add_what_leads_there(self, wanted: set[fx.Node], stack: list[fx.Node], stage: int) -> None:
        while stack:
            node = stack.pop()
            if self.placed.get(node, stage) != stage:
                continue  # handed over whole
            for parent in (*node.all_input_nodes, *self.writers.get(node, ())):
                if parent not in wanted:
                    wanted.add(parent)
                    stack.append(parent)

    def _check_sendable(self, node: fx.Node) -> None:
        homes = {self.placed.get(writer) for writer in self.writers.get(node, ())}
        if homes - {self.placed[node]}:
            raise UserError(
                f"cannot cut between two stages where {node.name} is changed in place after it was handed on: "
                "write that operation out of place."
            )
        if not isinstance(node.meta.get("val", torch.Tensor()), torch.Tensor):
            raise UserError(
                f"cannot cut at a place where {node.name}, a size computed from an activation, crosses into "
                "another stage: compute it from an input."
            )

    def stage_graph(self, stage: int) -> tuple[fx.Graph, list[int]]:
        """The graph of a stage, and which flat model inputs it takes."""
        graph = fx.Graph()
        env = {value: graph.placeholder(value.name) for value in self.handed[stage]}
        inputs: list[int] = []
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        for node, position in zip(placeholders, self.outer.input_positions, strict=True):
            if node in self.wants[stage]:
                env[node] = graph.node_copy(node)
                inputs.append(position)
        changed = {
            name for node in self.nodes if self.placed.get(node) == stage for name in self._changes(node)
        }
        for value in self.handed[stage]:
            if value.name in changed:  # autograd allows no in-place change of the leaf that was handed over
                env[value] = graph.call_function(torch.clone, (env[value],))
        modes = Modes(graph)
        for node in self.nodes:
            if node in self.wants[stage] and node not in env and node.op != "output":
                modes.change(modes_of(node))
                env[node] = graph.node_copy(node, lambda n: env[n])
        modes.change(())
        if stage == self.stages - 1:
            graph.output(fx.map_arg(self.nodes[-1].args[0], lambda n: env[n]))
        else:
            graph.output(tuple(env[value] for value in self.handed[stage + 1]))
        return graph, inputs

    def _changes(self, node: fx.Node) -> Iterable[str]:
        """Names of the values that a node changes in place."""
        if writes(node):
            return [str(parent) for parent in node.all_input_nodes]
        return self.outer.written.get(node.name, ())


def _check_called(nodes: Sequence[fx.Node], repeated_paths: Sequence[str]) -> None:
    """Refuse blocks that the outer graph does not call one by one: a branch of torch.cond is a graph within it."""
    called = {str(node.target) for node in nodes if node.op == "call_module"}
    missing = [path for path in repeated_paths if path not in called]
    if missing:
        raise UserError(
            f"cannot cut into pipeline stages: {missing[0]} and {len(missing) - 1} other repeated blocks run inside of a part "
            "of the forward pass that is whole, as a branch of torch.cond is: run them outside of it, or set mesh.pp = 1"
        )


def _writers(nodes: Sequence[fx.Node]) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """For each node, the operators that write in place into the storage it may share."""
    if not any(writes(node) for node in nodes):
        return {}
    group: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while node in group:
            node = group[node]
        return node

    for node in nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function":
            continue
        shared = (
            [a for a, v in zip(node.args, schema.arguments, strict=False) if v.alias_info is not None]
            if schema is not None
            else node.all_input_nodes  # getitem and the like
        )
        for other in shared:
            if isinstance(other, fx.Node) and find(other) is not find(node):
                group[find(node)] = find(other)
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if writes(node):
            members.setdefault(find(node), []).append(node)
    return {node: tuple(members[find(node)]) for node in nodes if find(node) in members}
