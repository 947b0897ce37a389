"""Turns the traces of one module at three micro-batches into a `ModelGraph`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from autoparallel.costmodel.graph import Block, Instance, ModelGraph, Parameter, TensorSpec
from autoparallel.planner.capture.boundaries import frames_by_link, module_calls
from autoparallel.planner.capture.errors import ModelError
from autoparallel.planner.capture.fit import Fit
from autoparallel.planner.capture.fold import FoldError, FoldPlan
from autoparallel.planner.capture.gradients import weight_only_launches
from autoparallel.planner.capture.names import ParameterNames
from autoparallel.planner.capture.operators import OperatorMaker
from autoparallel.planner.capture.records import Trace
from autoparallel.planner.capture.rules import Rules
from autoparallel.planner.capture.saved import saved_by_call
from autoparallel.planner.capture.split import Link, repeated_paths, split
from autoparallel.planner.capture.tracer import dtype_name


@dataclass(frozen=True, slots=True)
class Flow:
    """Which link makes and which links use each value."""

    maker: dict[int, int]
    users: dict[int, tuple[int, ...]]


def build_graph(
    module: nn.Module, traces: Sequence[Trace], *, name: str, plan: FoldPlan, rules: Rules
) -> ModelGraph:
    """The graph of `module`, whose training step was traced at three micro-batches, folded by `plan`.

    Raises FoldError where the blocks that should be equal are not.
    """
    _check_alike(traces)
    trace = traces[0]
    links = split(trace, repeated_paths(module))
    flow = _flow(trace, links)
    fit = Fit(tuple(t.micro_batch for t in traces))
    names = ParameterNames.of(module)
    parameters = _parameters_by_link(module, trace, links, names)
    blocks: list[Block] = []
    chain: list[Instance] = []
    saved = saved_by_call(trace, links)
    weights = weight_only_launches(trace)
    frames = frames_by_link(trace, links)
    of_path: dict[str, int] = {}
    for position, link in enumerate(links):
        sends = _sends(traces, flow, fit, position)
        if link.model:
            index = of_path[link.model]
            chain.append(Instance(block=index, path=link.path, repeated=True, sends=sends))
            continue
        maker = OperatorMaker(
            traces=traces, fit=fit, link=link, saved=saved, weight_only=weights, rules=rules, names=names
        )
        inputs, outputs = _boundary(trace, links, flow, position)
        block = Block(
            name="",
            inputs=tuple(fit.spec([t.values[v].meta for t in traces]) for v in inputs),
            outputs=(),
            operators=maker.operators(inputs),
            parameters=parameters[position],
            buffers=maker.buffers(),
        )
        block = replace(
            block,
            outputs=tuple(maker.value_name(v) for v in outputs),
            calls=module_calls(trace, frames[position], maker, link),
        )
        if block not in blocks:
            blocks.append(block)
        index = blocks.index(block)
        of_path[link.path] = index
        chain.append(Instance(block=index, path=link.path, repeated=link.repeated, sends=sends))
    _check_fold(plan, blocks, of_path)
    return ModelGraph(
        name=name,
        dtype=_main_dtype(module),
        blocks=_named(blocks, chain, module),
        chain=tuple(chain),
        tokens_per_sample=_tokens_per_sample(trace),
        has_loss=trace.loss >= 0,
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


def _check_alike(traces: Sequence[Trace]) -> None:
    first = traces[0]
    for other in traces[1:]:
        if [c.name for c in other.calls] != [c.name for c in first.calls]:
            raise ModelError(
                f"the model runs other operators with a batch of {other.micro_batch} than with one of "
                f"{first.micro_batch}: make its forward independent of the batch size"
            )
        for call, same in zip(first.calls, other.calls, strict=True):
            dims = [
                [len(t.values[v].meta.shape) for v in c.outputs] for t, c in ((first, call), (other, same))
            ]
            if len(dims[0]) == len(dims[1]) and dims[0] != dims[1]:
                where = first.frames[call.frame].path or "the model"
                raise ModelError(
                    f"{where}: what {call.name} returns has other dims with other samples: make its shape independent of values"
                )
            if (len(call.inputs), len(call.outputs)) != (len(same.inputs), len(same.outputs)):
                where = first.frames[call.frame].path or "the model"
                raise ModelError(
                    f"{where} calls {call.name} on as many tensors as there are samples in a batch, one by one: let it "
                    "compute on the whole batch"
                )


def _flow(trace: Trace, links: Sequence[Link]) -> Flow:
    maker: dict[int, int] = {}
    users: dict[int, list[int]] = defaultdict(list)
    for position, link in enumerate(links):
        for index in link.calls:
            call = trace.calls[index]
            for value in call.inputs:
                if position not in users[value]:
                    users[value].append(position)
            for value in call.outputs:
                maker[value] = position
    return Flow(maker, {value: tuple(where) for value, where in users.items()})


def _boundary(
    trace: Trace, links: Sequence[Link], flow: Flow, position: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Values a link reads (what the link before made first, then by first use) and hands on (in the order in
    which the next link reads them, then the rest)."""
    inputs = _reads(trace, links, flow, position)
    later = [v for v, made in flow.maker.items() if made == position and _leaves(trace, flow, v, position)]
    following = _reads(trace, links, flow, position + 1) if position + 1 < len(links) else ()
    order = {value: rank for rank, value in enumerate(following)}
    outputs = tuple(sorted(later, key=lambda v: (order.get(v, len(order)), v)))
    return inputs, outputs


def _leaves(trace: Trace, flow: Flow, value: int, position: int) -> bool:
    return value in trace.outputs or any(user != position for user in flow.users.get(value, ()))


def _reads(trace: Trace, links: Sequence[Link], flow: Flow, position: int) -> tuple[int, ...]:
    seen: list[int] = []
    for index in links[position].calls:
        for value in trace.calls[index].inputs:
            outside = flow.maker.get(value, -1) != position
            if outside and trace.values[value].origin in {"call", "input"} and value not in seen:
                seen.append(value)
    return tuple(sorted(seen, key=lambda v: flow.maker.get(v, -1) != position - 1))


def _sends(traces: Sequence[Trace], flow: Flow, fit: Fit, position: int) -> tuple[TensorSpec, ...]:
    """Activations made at or before `position` and used after it that carry a gradient or come from floats."""
    trace = traces[0]
    alive = [
        v
        for v, made in flow.maker.items()
        if made <= position
        and any(user > position for user in flow.users.get(v, ()))
        and (trace.values[v].requires_grad or trace.values[v].on_floats)
    ]
    return tuple(fit.spec([t.values[v].meta for t in traces]) for v in alive)


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
    module: nn.Module, trace: Trace, links: Sequence[Link], names: ParameterNames
) -> list[tuple[Parameter, ...]]:
    """The parameters of each link: all below a repeated module's path, and those that its calls use; in the
    first glue also those that nothing uses."""
    tensors = {id(p): p for p in module.parameters()}
    held: list[dict[str, int]] = []  # absolute name -> tensor
    for link in links:
        inside = names.below(link.path) if link.repeated else {}
        held.append(inside | _used(trace, link, names))
    placed = {key for entries in held for key in entries.values()}
    glue = next((i for i, link in enumerate(links) if not link.repeated), 0)
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
        for link, entries in zip(links, held, strict=True)
    ]


def _used(trace: Trace, link: Link, names: ParameterNames) -> dict[str, int]:
    """Parameters that the calls of a link use, under the names that its operators call them by."""
    used: dict[str, int] = {}
    for index in link.calls:
        call = trace.calls[index]
        for value in call.inputs:
            if trace.values[value].origin == "param" and not link.model:
                name = names.near(trace.values[value].name, trace.frames[call.frame].path, link.path)
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


def _tokens_per_sample(trace: Trace) -> int:
    """The length of the first (batch, length) tensor of indices that an embedding looks up; 1 without one."""
    for call in trace.calls:
        if call.name == "embedding":
            for value in call.inputs:
                meta = trace.values[value].meta
                if (
                    meta.dtype.startswith("int")
                    and len(meta.shape) == 2
                    and meta.shape[0] == trace.micro_batch
                ):
                    return meta.shape[1]
    return 1
