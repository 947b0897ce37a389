"""The last pass: an annotated graph becomes a `ModelGraph`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from torch import fx, nn

from autoparallel.costmodel.graph import Block, Instance, ModelGraph, TensorSpec
from autoparallel.planner.capture.alike import twins
from autoparallel.planner.capture.blocks import BlockMaker
from autoparallel.planner.capture.boundaries import frames_by_link
from autoparallel.planner.capture.fit import Fit
from autoparallel.planner.capture.flow import Flow, boundary, flow_of
from autoparallel.planner.capture.fold import FoldError, FoldPlan
from autoparallel.planner.capture.links import Link, calls_by_link
from autoparallel.planner.capture.marks import after
from autoparallel.planner.capture.names import ParameterNames
from autoparallel.planner.capture.nodes import (
    Frame,
    Role,
    calls,
    casts,
    differentiates,
    loss,
    micro_batch,
    tensor,
    tensor_inputs,
    written,
)
from autoparallel.planner.capture.parameters import parameters_by_link
from autoparallel.planner.capture.rules import Rules
from autoparallel.planner.capture.writer import dtype_name
from autoparallel.planner.capture.written_parameters import write_warnings

_READ = frozenset(
    {Role.CALL, Role.RESULT, Role.INPUT}
)  # what a link may get from outside, held tensors aside


def to_model_graph(
    graph: fx.Graph, module: nn.Module, *, name: str, plan: FoldPlan, fit: Fit, rules: Rules
) -> ModelGraph:
    """The `ModelGraph` of `module`, whose training step `graph` is, folded by `plan`.

    Raises FoldError where the blocks that should be equal are not.
    """
    by_link = calls_by_link(graph)
    links = list(by_link)
    flow, names = flow_of(graph, by_link), ParameterNames.of(module)
    parameters = parameters_by_link(module, by_link, names)
    frames = frames_by_link(graph)
    blocks: list[Block] = []
    chain: list[Instance] = []
    of_path: dict[str, int] = {}
    of_link: dict[Link, int] = {}
    beside: list[str] = []  # blocks of which more is read than they return
    for position, link in enumerate(links):
        if link.model:
            index = of_path[link.model]
        elif link.same is not None:
            index = of_link[link.same]
        else:
            inputs, handed = boundary(links, by_link, flow, position)
            if link.frame is not None and not _returns(link.frame, handed):
                if link.path in plan.stood_in.values():
                    raise FoldError(f"more is read of {link.path} than it returns")
                beside.append(link.path)
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
        of_link[link] = index
        if not link.model:
            of_path[link.path] = index
        sends = _sends(flow, fit, position)
        chain.append(Instance(block=index, path=link.path, repeated=link.repeated, sends=sends))
    _check_fold(plan, blocks, of_path)
    return ModelGraph(
        name=name,
        dtype=main_dtype(module),
        blocks=_named(blocks, chain, module),
        chain=tuple(chain),
        tokens_per_sample=_tokens_per_sample(graph),
        has_loss=loss(graph) is not None,
        pipeline_cuts=_cuttable(chain) and not differentiates(graph) and not beside,
        warnings=(*_warnings(graph, fit, rules), *_beside_warnings(beside)),
        written=written(graph),
        differentiates=differentiates(graph),
    )


def _warnings(graph: fx.Graph, fit: Fit, rules: Rules) -> tuple[str, ...]:
    found = []
    if differentiates(graph):
        found.append(
            "its forward pass takes derivatives, which go back through its blocks: the runtime runs it on replicas alone "
            "(mesh.dp_replicate), uncompiled"
        )
    found += write_warnings(written(graph))
    if casts(graph):
        found.append(
            "its own code has torch.autocast on, which the meta device does not follow: priced is the dtype of its parameters; "
            "take the autocast out and give the dtype to compute in (execution.dtype, auto_parallelize(dtype=...))"
        )
    if fit.misses:
        found.append(f"{fit.misses} sizes are no known function of the micro-batch; they are extrapolated")
    if rules.missing:
        found.append(f"operators without a sharding rule are replicated: {', '.join(sorted(rules.missing))}")
    return tuple(found)


def _beside_warnings(paths: Sequence[str]) -> tuple[str, ...]:
    if not paths:
        return ()
    return (
        f"{paths[0]} leaves in its attributes what is read after it has returned (a loss beside the main one?), so the model is "
        "not cut into pipeline stages: have the module return it",
    )


def _returns(frame: Frame, handed: Sequence[fx.Node]) -> bool:
    """Whether all that others read of a module is in what it returns, not in its attributes (a loss beside the main one)."""
    returned = {twin for node in frame.outputs for twin in twins(node)}
    made = (
        node for node in handed if node.target is not after
    )  # what it was given, and has changed, others have
    return all(twin in returned for node in made for twin in twins(node))


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


def main_dtype(module: nn.Module) -> str:
    """torch's name of the dtype that most numbers of its parameters have."""
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
