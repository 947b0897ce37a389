"""The last pass: an annotated graph becomes a `ModelGraph`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx, nn

from autoparallel.costmodel.graph import Block, Instance, ModelGraph, Parameter, TensorSpec
from autoparallel.planner.capture.alike import twins
from autoparallel.planner.capture.blocks import BlockMaker
from autoparallel.planner.capture.boundaries import frames_by_link
from autoparallel.planner.capture.fit import Fit
from autoparallel.planner.capture.fold import FoldError, FoldPlan
from autoparallel.planner.capture.links import Link, calls_by_link
from autoparallel.planner.capture.names import ParameterNames
from autoparallel.planner.capture.nodes import (
    Role,
    calls,
    loss,
    micro_batch,
    outputs,
    tensor,
    tensor_inputs,
    tensor_outputs,
)
from autoparallel.planner.capture.rules import Rules
from autoparallel.planner.capture.writer import dtype_name

_Calls = Mapping[Link, Sequence[fx.Node]]
_READ = frozenset(
    {Role.CALL, Role.RESULT, Role.INPUT}
)  # what a link may get from outside, held tensors aside


@dataclass(frozen=True, slots=True)
class Flow:
    """Which link makes and which links use each tensor, by their positions; what the module returns."""

    maker: dict[fx.Node, int]
    users: dict[fx.Node, tuple[int, ...]]
    returned: frozenset[fx.Node]

    def leaves(self, node: fx.Node, position: int) -> bool:
        """Whether a tensor is used outside the link at `position`."""
        return node in self.returned or any(user != position for user in self.users.get(node, ()))


def to_model_graph(
    graph: fx.Graph, module: nn.Module, *, name: str, plan: FoldPlan, fit: Fit, rules: Rules
) -> ModelGraph:
    """The `ModelGraph` of `module`, whose training step `graph` is, folded by `plan`.

    Raises FoldError where the blocks that should be equal are not.
    """
    by_link = calls_by_link(graph)
    links = list(by_link)
    flow, names = _flow(graph, by_link), ParameterNames.of(module)
    parameters = _parameters_by_link(module, by_link, names)
    frames = frames_by_link(graph)
    blocks: list[Block] = []
    chain: list[Instance] = []
    of_path: dict[str, int] = {}
    for position, link in enumerate(links):
        if link.model:
            index = of_path[link.model]
        else:
            inputs, handed = _boundary(links, by_link, flow, position)
            maker = BlockMaker(link, by_link[link], inputs, fit, names)
            block = Block(
                name="",
                inputs=tuple(map(maker.spec, inputs)),
                operators=maker.operators(),
                outputs=tuple(map(maker.value_name, handed)),
                parameters=parameters[position],
                buffers=maker.buffers(),
                calls=maker.module_calls(frames[link]),
            )
            if block not in blocks:
                blocks.append(block)
            index = blocks.index(block)
            of_path[link.path] = index
        sends = _sends(flow, fit, position)
        chain.append(Instance(block=index, path=link.path, repeated=link.repeated, sends=sends))
    _check_fold(plan, blocks, of_path)
    return ModelGraph(
        name=name,
        dtype=_main_dtype(module),
        blocks=_named(blocks, chain, module),
        chain=tuple(chain),
        tokens_per_sample=_tokens_per_sample(graph),
        has_loss=loss(graph) is not None,
        pipeline_cuts=_cuttable(chain),
        warnings=_warnings(fit, rules),
    )


def _warnings(fit: Fit, rules: Rules) -> tuple[str, ...]:
    found = []
    if fit.misses:
        found.append(f"{fit.misses} sizes are not affine in the micro-batch; they are extrapolated")
    if rules.missing:
        found.append(f"operators without a sharding rule are replicated: {', '.join(sorted(rules.missing))}")
    return tuple(found)


def _check_fold(plan: FoldPlan, blocks: Sequence[Block], of_path: dict[str, int]) -> None:
    """Raises FoldError unless the modules that ran prove what those between them do."""
    for second, last in (*plan.pairs, *plan.lasts):
        if (second in of_path) != (last in of_path):
            raise FoldError(f"of {second} and {last} one is called and the other is not")
    for second, last in plan.pairs:
        if of_path.get(second) != of_path.get(last):
            raise FoldError(f"{second} and {last} trace to different blocks")
    for second, last in plan.lasts:
        if second in of_path and _forward_of(blocks[of_path[second]]) != _forward_of(blocks[of_path[last]]):
            raise FoldError(f"{second} and {last} do different things")


def _forward_of(block: Block) -> Block:
    """The block without its backward pass."""
    return replace(block, operators=tuple(replace(op, backward=()) for op in block.operators))


def _flow(graph: fx.Graph, by_link: _Calls) -> Flow:
    maker: dict[fx.Node, int] = {}
    users: dict[fx.Node, list[int]] = defaultdict(list)
    for position, group in enumerate(by_link.values()):
        for call in group:
            for node in tensor_inputs(call):
                if position not in users[node]:
                    users[node].append(position)
            for node in tensor_outputs(call):
                maker[node] = position
    returned = frozenset(outputs(graph))
    return Flow(maker, {node: tuple(where) for node, where in users.items()}, returned)


def _boundary(
    links: Sequence[Link], by_link: _Calls, flow: Flow, position: int
) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """Tensors a link reads (what the link before made first, then by first use) and hands on (in the order in
    which the next link reads them, then the rest)."""
    later = [node for node, made in flow.maker.items() if made == position and flow.leaves(node, position)]
    following = _reads(by_link[links[position + 1]], flow, position + 1) if position + 1 < len(links) else ()
    order = {node: rank for rank, node in enumerate(following)}
    handed = tuple(sorted(later, key=lambda node: order.get(node, len(order))))
    return _reads(by_link[links[position]], flow, position), handed


def _reads(group: Sequence[fx.Node], flow: Flow, position: int) -> tuple[fx.Node, ...]:
    seen: dict[fx.Node, None] = {}
    for call in group:
        for node in tensor_inputs(call):
            if flow.maker.get(node, -1) != position and node.meta["role"] in _READ:
                seen.setdefault(node)
    return tuple(sorted(seen, key=lambda node: flow.maker.get(node, -1) != position - 1))


def _sends(flow: Flow, fit: Fit, position: int) -> tuple[TensorSpec, ...]:
    """Activations made at or before `position` and used after it that carry a gradient or come from floats."""
    alive = [
        node
        for node, made in flow.maker.items()
        if made <= position
        and any(user > position for user in flow.users.get(node, ()))
        and (node.meta["requires_grad"] or node.meta["on_floats"])
    ]
    return tuple(fit.spec([tensor(same) for same in twins(node)]) for node in alive)


def _cuttable(chain: Sequence[Instance]) -> bool:
    """Each repeated module runs once, and something passes from it to the rest of the model: what that is (a skip, the
    encoder's result beside the decoder's) is handed from stage to stage."""
    repeated = [i for i, link in enumerate(chain) if link.repeated]
    paths = [chain[i].path for i in repeated]
    return (
        len(repeated) > 1
        and len(set(paths)) == len(paths)
        and all(chain[i].sends for i in range(repeated[0], repeated[-1]))
    )


def _parameters_by_link(
    module: nn.Module, by_link: _Calls, names: ParameterNames
) -> list[tuple[Parameter, ...]]:
    """The parameters of each link: all below a repeated module's path, and those that its calls use; in the
    first glue also those that nothing uses."""
    tensors = {id(p): p for p in module.parameters()}
    held: list[dict[str, int]] = []  # absolute name -> tensor
    for link, group in by_link.items():
        inside = names.below(link.path) if link.repeated else {}
        held.append(inside | _used(link, group, names))
    placed = {key for entries in held for key in entries.values()}
    glue = next((i for i, link in enumerate(by_link) if not link.repeated), 0)
    held[glue] |= {aliases[0]: key for key, aliases in names.of_tensor.items() if key not in placed}
    count: dict[int, int] = defaultdict(int)
    for entries in held:
        for key in entries.values():
            count[key] += 1

    def make(name: str, key: int, prefix: str) -> Parameter:
        tensor = tensors[key]
        return Parameter(
            name=name.removeprefix(prefix),
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            trainable=tensor.requires_grad,
            tied=names.of_tensor[key][0] if count[key] > 1 else "",
        )

    return [
        tuple(make(n, key, f"{link.path}." if link.repeated else "") for n, key in entries.items())
        for link, entries in zip(by_link, held, strict=True)
    ]


def _used(link: Link, group: Sequence[fx.Node], names: ParameterNames) -> dict[str, int]:
    """Parameters that the calls of a link use, under the names that its operators call them by."""
    used: dict[str, int] = {}
    for call in group if not link.model else ():
        for node in tensor_inputs(call):
            if node.meta["role"] is Role.PARAM:
                name = names.near(node.meta["name"], call.meta["frame"].path, link.path)
                used[name] = names.tensor_of[name]
    return used


def _named(blocks: Sequence[Block], chain: Sequence[Instance], module: nn.Module) -> tuple[Block, ...]:
    """Blocks named after the class of the module they are, numbered where a class has several."""
    result: list[Block] = []
    taken: dict[str, int] = defaultdict(int)
    for index, block in enumerate(blocks):
        link = next(link for link in chain if link.block == index)
        base = type(module.get_submodule(link.path)).__name__ if link.repeated else "glue"
        taken[base] += 1
        name = base if taken[base] == 1 and link.repeated else f"{base}_{taken[base] - (not link.repeated)}"
        result.append(replace(block, name=name))
    return tuple(result)


def _main_dtype(module: nn.Module) -> str:
    sizes: dict[str, int] = defaultdict(int)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            sizes[dtype_name(parameter.dtype)] += parameter.numel()
    return max(sizes, key=lambda d: sizes[d]) if sizes else "float32"


def _tokens_per_sample(graph: fx.Graph) -> int:
    """The length of the first (batch, length) tensor of indices that an embedding looks up; 1 without one."""
    for call in calls(graph):
        if call.meta["torch_name"] == "embedding":
            for meta in map(tensor, tensor_inputs(call)):
                indices = meta.dtype.startswith("int") and len(meta.shape) == 2
                if indices and meta.shape[0] == micro_batch(graph):
                    return meta.shape[1]
    return 1
