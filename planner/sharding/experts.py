"""Mixture-of-experts layers inside a block: where they are, and how their operators run over tp and ep.

A layer is found by structure, not by name: the module that calls grouped products whose matrices are parameters
with one slice per expert, and everything that this module does (sorting tokens by expert, the experts' MLP,
weighting, summing). Two ways to run it on several devices:

tensor (ep = 1)    Every rank has every expert's share of the inner dim: column, then row, with a partial sum at
                   the end, like any MLP. Two operators inside need rules that DTensor has not: a lookup of rows
                   passes a partial sum on, and a product's output that is split after it (gate and up) is sharded
                   part by part, which is how the parameter is then held.
expert (ep > 1)    Each rank of tp takes its share of the tokens, which arrive whole at the module; rows go to the
                   ranks of `ep` that hold their experts (an all-to-all), and come back after the last product
                   (another). The module leaves a partial sum over tp: rows of other ranks are zero. Each rank is
                   taken to receive as many rows as it sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from autoparallel.costmodel.block_index import FLOATING, BlockIndex, output_names
from autoparallel.costmodel.graph import Operator, OpKind, Sharding, Size, parts_of, sharded_dim, strided
from autoparallel.planner.sharding.plan import BlockPlan, Exchange, replicated_plan

EXPERT = "E0"  # placement of a tensor with one slice per expert: sharded over ep along its first dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayer:
    """Operators (indices) of one layer, its products, its parameters, and the number of experts."""

    module: str
    operators: tuple[int, ...]
    products: tuple[int, ...]
    params: tuple[str, ...]
    experts: int


def expert_layers(index: BlockIndex) -> tuple[ExpertLayer, ...]:
    """The layers of a block whose experts can be told apart: whatever the module reads besides activations has
    one slice per expert."""
    operators = index.block.operators
    found: dict[str, list[int]] = {}
    for i, op in enumerate(operators):
        if op.kind is OpKind.GROUPED_GEMM and _is_parameter(index, op.inputs[1]):
            found.setdefault(op.module, []).append(i)
    modules = list(found)
    common = _common(modules)
    if len(modules) > 1 and common:  # products in modules of their own, inside one
        found = {common: sorted(i for own in found.values() for i in own)}
    layers = (_layer(index, module, products) for module, products in found.items())
    return tuple(layer for layer in layers if layer is not None)


def _common(modules: Sequence[str]) -> str:
    """The innermost module around all of them."""
    steps = zip(*(module.split(".") for module in modules), strict=False)
    return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, steps))


def _is_parameter(index: BlockIndex, value: str) -> bool:
    return index.storage.get(value, value).startswith("param:")


def _layer(index: BlockIndex, module: str, products: Sequence[int]) -> ExpertLayer | None:
    operators = index.block.operators
    inside = tuple(
        i for i, op in enumerate(operators) if op.module == module or op.module.startswith(f"{module}.")
    )
    experts = dict(operators[products[0]].sizes)["e"].at(1)
    params = dict.fromkeys(v for i in inside for v in operators[i].inputs if v.startswith("param:"))
    readers = {v: set(index.consumers[v]) for v in params}
    whole = all(index.specs[v].shape[0].at(1) == experts for v in params)
    if not module or not whole or not all(own <= set(inside) for own in readers.values()):
        return None
    names = tuple(v.removeprefix("param:") for v in params)
    return ExpertLayer(
        module=module, operators=inside, products=tuple(products), params=names, experts=experts
    )


# ---- tensor


def further_shardings(index: BlockIndex) -> dict[int, tuple[Sharding, ...]]:
    """Shardings of operators of expert layers beyond those that DTensor knows."""
    found: dict[int, tuple[Sharding, ...]] = {}
    for layer in expert_layers(index):
        for i in layer.operators:
            op = index.block.operators[i]
            split = _split_in_parts(index, op)
            for sharding in split:
                found |= _made_in_parts(index, op.inputs[0], sharding.inputs[0])
            more = (*found.get(i, ()), *_looked_up(index, op), *split)
            if more:
                found[i] = more
    return found


def _looked_up(index: BlockIndex, op: Operator) -> list[Sharding]:
    """Rows of a sum of parts, looked up by whole indices, are a sum of parts; and columns stay sharded."""
    if op.kind is not OpKind.COPY or len(op.outputs) != 1 or len(op.inputs) != 2:
        return []
    rows, places = (index.specs[v] for v in op.inputs)
    out, last = op.outputs[0], len(op.outputs[0].shape) - 1
    if rows.dtype not in FLOATING or places.dtype in FLOATING or rows.shape[1:] != out.shape[1:]:
        return []
    found = [Sharding(inputs=("P", "R"), outputs=("P",))]
    if last > 0:
        size = (out.shape[last],)
        found.append(Sharding(inputs=(f"S{last}", "R"), outputs=(f"S{last}",), divides=size))
    return found


def _split_in_parts(index: BlockIndex, op: Operator) -> list[Sharding]:
    """A product's output split into equal parts along its columns: each part sharded."""
    source = op.inputs[0] if op.inputs else ""
    maker = index.producer.get(source)
    if op.kind is not OpKind.VIEW or len(op.outputs) < 2 or maker is None:
        return []
    made, last = index.specs[source], len(index.specs[source].shape) - 1
    parts = {out.shape for out in op.outputs}
    whole = len(parts) == 1 and all(s[:last] == made.shape[:last] for s in parts)
    if index.block.operators[maker].kind is not OpKind.GROUPED_GEMM or not whole:
        return []
    return [
        Sharding(
            inputs=(strided(last, len(op.outputs)),), outputs=(f"S{last}",) * len(op.outputs),
            divides=(next(iter(parts))[last],),
        )
    ]  # fmt: skip


def _made_in_parts(index: BlockIndex, value: str, placement: str) -> dict[int, tuple[Sharding, ...]]:
    """What the operators that make a value in strided parts do: the product, and views of its matrices."""
    found: dict[int, tuple[Sharding, ...]] = {}
    parts, wanted = parts_of(placement), f"S{sharded_dim(placement)}"
    maker = index.producer.get(value)
    while maker is not None:
        op = index.block.operators[maker]
        known = [s for s in op.shardings if s.outputs[:1] == (wanted,) and "P" not in s.inputs]
        product = op.kind is OpKind.GROUPED_GEMM
        at = 1 if product else 0
        known = [s for s in known if s.inputs[at].startswith("S") and not (product and s.inputs[0] != "R")]
        if not known or not (product or op.kind is OpKind.VIEW):
            break
        plain = known[0]
        source = strided(sharded_dim(plain.inputs[at]), parts)
        inputs = tuple(source if n == at else p for n, p in enumerate(plain.inputs))
        divides = tuple(Size(s.const // parts, s.per_sample // parts) for s in plain.divides)
        found[maker] = (
            Sharding(
                inputs=inputs, outputs=(strided(sharded_dim(wanted), parts), *plain.outputs[1:]), divides=divides
            ),
        )  # fmt: skip
        wanted = plain.inputs[at]
        maker = index.producer.get(op.inputs[at])
    return found


# ---- expert


def expert_shardings(index: BlockIndex) -> dict[int, Sharding]:
    """How each operator of the expert layers runs under ep > 1: on a share of the tokens and of the experts."""
    found = {}
    for layer in expert_layers(index):
        inside = set(layer.operators)
        for i in layer.operators:
            op = index.block.operators[i]
            found[i] = Sharding(
                inputs=tuple(_placed(index, v, inside) for v in op.inputs),
                outputs=tuple(_placed(index, v, inside, leaves=True) for v in output_names(op)),
            )
    return found


def _placed(index: BlockIndex, value: str, inside: set[int], *, leaves: bool = False) -> str:
    if _is_parameter(index, value):
        return EXPERT
    maker, spec = index.producer.get(value), index.specs[value]
    if maker not in inside or not spec.shape:
        return "R"
    outside = index.leaves_block(value) or any(c not in inside for c in index.consumers.get(value, ()))
    if leaves and outside:
        return "P" if value in index.needs_grad else "R"
    return "S0"


def with_experts(index: BlockIndex, plan: BlockPlan) -> BlockPlan:
    """A block's plan under ep > 1: the layers' operators run as `expert_shardings`, with their exchanges."""
    layers = expert_layers(index)
    if not layers:
        return plan
    shardings = list(plan.shardings)
    for i, sharding in expert_shardings(index).items():
        shardings[i] = sharding
    held = {name for layer in layers for name in layer.params}
    return replace(
        plan,
        shardings=tuple(shardings),
        params=tuple((name, EXPERT if name in held else place) for name, place in plan.params),
        exchanges=tuple(exchange for layer in layers for exchange in _exchanges(index, layer)),
    )


def _exchanges(index: BlockIndex, layer: ExpertLayer) -> tuple[Exchange, Exchange]:
    """Rows to their experts before the first product, and back after the last."""
    operators, first, last = index.block.operators, layer.products[0], layer.products[-1]
    rows = operators[first].inputs[0]
    copies = _copies(index, rows)
    there = Exchange(value=rows, position=first, experts=layer.experts, counts=True, copies=copies)
    back = Exchange(value=operators[last].name, position=last + 1, experts=layer.experts, copies=copies)
    return there, back


def _copies(index: BlockIndex, rows: str) -> int:
    """How often each token is among the rows that experts get: they are looked up in the tokens; 1 where not."""
    if rows not in index.producer:
        return 1
    lookup = index.block.operators[index.producer[rows]]
    tokens = index.specs[lookup.inputs[0]].shape
    if lookup.kind is not OpKind.COPY or len(lookup.inputs) != 2 or not tokens:
        return 1
    return max(index.specs[rows].shape[0].at(1) // max(tokens[0].at(1), 1), 1)


def unsolved_plan(index: BlockIndex, ep: int) -> BlockPlan:
    """The plan of a block without tensor parallelism."""
    plan = replicated_plan(index.block)
    return with_experts(index, plan) if ep > 1 else plan
