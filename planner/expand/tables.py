"""Embedding tables of a model, where a strategy keeps their rows, and the graph without the rows that are elsewhere.

A table is a parameter that one operator looks rows up in, and nothing else reads. A strategy leaves its first rows,
the hot ones, on every device, where they are parameters like any others: in the graph that is expanded, the table has
just these. The rest is cold: on the devices in turn, or on the hosts (`planner/expand/cold.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from autoparallel.costmodel.access import AccessLaw, parse_law
from autoparallel.costmodel.graph import Block, Instance, ModelGraph, Operator, OpKind, Parameter, Size
from autoparallel.planner.strategy.types import EmbeddingAccess, EmbeddingRule, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """An embedding table of the model; `lookups` per sample."""

    module: str
    position: int  # of its link in the chain
    operator: int  # of its block
    parameter: str  # of its block
    rows: int
    dim: int
    lookups: Size

    @property
    def numel(self) -> int:
        return self.rows * self.dim


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlace:
    """Where a strategy keeps the rows of a table: `hot` on every device, the cold rest in a tier."""

    table: Table
    tier: str  # sharded | parameter-server
    hot: int
    law: AccessLaw

    @property
    def cold(self) -> int:
        return self.table.rows - self.hot


def find_tables(graph: ModelGraph) -> tuple[Table, ...]:
    """Every embedding table of the model, in its order."""
    inside = {number: tuple(_tables_of(block)) for number, block in enumerate(graph.blocks)}
    return tuple(
        replace(table, position=position, module=_joined(link.path, table.module))
        for position, link in enumerate(graph.chain)
        for table in inside[link.block]
    )


def _tables_of(block: Block) -> Iterator[Table]:
    parameters = {p.name: p for p in block.parameters if not p.tied and p.trainable and len(p.shape) == 2}
    for number, op in enumerate(block.operators):
        if op.kind is not OpKind.EMBEDDING or len(op.inputs) < 2:
            continue
        read = (v.removeprefix("param:") for v in op.inputs if v.startswith("param:"))
        name = next(read, "")
        readers = sum(f"param:{name}" in other.inputs for other in block.operators)
        if name not in parameters or readers != 1:
            continue
        rows, dim = parameters[name].shape
        yield Table(
            module=name.rpartition(".")[0], position=0, operator=number, parameter=name, rows=rows, dim=dim,
            lookups=_lookups(block, op),
        )  # fmt: skip


def _joined(path: str, module: str) -> str:
    return f"{path}.{module}" if path and module else path or module


def _lookups(block: Block, op: Operator) -> Size:
    """Indices that the operator reads: the elements of its first input that is no parameter, affine in the samples."""
    value = next(v for v in op.inputs if not v.startswith("param:"))
    if value.startswith("input:"):
        spec = block.inputs[int(value.removeprefix("input:"))]
    else:
        makers = {maker.name: maker.outputs[0] for maker in block.operators}
        spec = makers.get(value, op.outputs[0])
    one, two = spec.numel(1), spec.numel(2)
    return Size(2 * one - two, two - one)


def rule_of(rules: Sequence[EmbeddingRule], module: str) -> EmbeddingRule | None:
    """The first rule for a module."""
    return next((rule for rule in rules if fnmatchcase(module, rule.module)), None)


def law_of(access: EmbeddingAccess, module: str) -> AccessLaw:
    """The law of access of a table: its own, else that of all tables."""
    own = (law for pattern, law in access.tables if fnmatchcase(module, pattern))
    return parse_law(next(own, access.law))


def places(graph: ModelGraph, strategy: Strategy) -> tuple[TablePlace, ...]:
    """The tables that are not wholly on every device. The strategy's rules are complete."""
    if not strategy.embedding:
        return ()
    found = []
    for table in find_tables(graph):
        rule = rule_of(strategy.embedding, table.module)
        if rule is None or rule.tier in (None, "device"):
            continue
        hot = min(rule.hot_rows or 0, table.rows)
        if hot < table.rows:
            law = law_of(strategy.embedding_access, table.module)
            found.append(TablePlace(table=table, tier=str(rule.tier), hot=hot, law=law))
    return tuple(found)


def hot_graph(graph: ModelGraph, placed: Sequence[TablePlace]) -> ModelGraph:
    """The graph with the hot rows alone of the tables that are placed."""
    by_position: dict[int, list[TablePlace]] = {}
    for place in placed:
        by_position.setdefault(place.table.position, []).append(place)
    blocks, made = list(graph.blocks), dict[object, int]()
    chain = list[Instance]()
    for position, link in enumerate(graph.chain):
        here = by_position.get(position, [])
        key = (link.block, tuple((p.table.operator, p.hot) for p in here))
        if here and key not in made:
            made[key] = len(blocks)
            blocks.append(_hot_block(graph.blocks[link.block], here))
        chain.append(replace(link, block=made[key]) if here else link)
    used = sorted({link.block for link in chain})
    number = {block: i for i, block in enumerate(used)}
    return replace(
        graph,
        blocks=tuple(blocks[i] for i in used),
        chain=tuple(replace(link, block=number[link.block]) for link in chain),
    )


def _hot_block(block: Block, here: Sequence[TablePlace]) -> Block:
    hot = {place.table.parameter: place for place in here}
    operators = list(block.operators)
    for place in here:
        operators[place.table.operator] = _hot_lookup(operators[place.table.operator], place)
    return replace(
        block,
        parameters=tuple(_hot_parameter(p, hot) for p in block.parameters),
        operators=tuple(operators),
    )


def _hot_parameter(parameter: Parameter, hot: Mapping[str, TablePlace]) -> Parameter:
    place = hot.get(parameter.name)
    return parameter if place is None else replace(parameter, shape=(place.hot, place.table.dim))


def _hot_lookup(op: Operator, place: TablePlace) -> Operator:
    """A dense gradient is as long as the table: what does not grow with the samples shrinks with its rows."""
    backward = []
    for kernel in op.backward:
        const = kernel.bytes_moved.const * place.hot // place.table.rows
        backward.append(replace(kernel, bytes_moved=replace(kernel.bytes_moved, const=const)))
    return replace(op, backward=tuple(backward))
