"""The tensor-parallel problem of one block, as prepared integers: what the solver chooses from.

A value has one layout in each module through which it passes, and changes it only where it enters or leaves a
module (a layout hook). So the unknowns are

    pick[op]          one of the operator's legal shardings
    state[value, m]   the layout of a value inside module m: R, Rp, P, S0, S1 …

"R" is replicated with a whole gradient; "Rp" replicated with a gradient that arrives as a partial sum, because
what reads it is sharded; a layout hook makes it whole. An operator demands the states of its inputs and outputs inside
its own module; between a module and the one around it the state stays, or a layout hook changes it at the price of
the conjugate collectives. A reshard that several readers share is thus paid once, at their common parent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from autoparallel.costmodel.block_index import BlockIndex, enclosing, output_names
from autoparallel.costmodel.graph import Operator, Sharding, Size
from autoparallel.planner.sharding.experts import expert_shardings, further_shardings

WHOLE, PARTIAL_GRADIENT, SUM = "R", "Rp", "P"
OUTSIDE = "^"  # the module around a repeated block


def layout(state: str) -> str:
    """The placement that a state stands for."""
    return "R" if state == PARTIAL_GRADIENT else state


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A value inside a module, with the states it may take there."""

    value: str
    scope: str
    states: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A value passing a module's boundary, in the direction of the forward pass.

    `changes` are the state pairs that a layout hook there can realise; without a layout hook the state stays.
    """

    source: int
    target: int
    module: str
    side: str  # "input" or "output" of `module`
    position: int  # the operator before which a layout hook runs
    changes: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run an operator: a sharding, and the states it demands of nodes and parameters."""

    sharding: Sharding | None
    states: tuple[tuple[int, str], ...]
    params: tuple[tuple[str, str], ...]
    partial_params: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Where the block stands: layouts of its inputs and outputs, fixed by what is around it.

    `scope` is the module in which the values arrive and to which they leave: `OUTSIDE` for a repeated block
    (whose own boundary can be hooked), the module around the repeated blocks for glue. None: not fixed.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str | None, ...]
    input_scopes: tuple[str, ...]
    output_scopes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProblem:
    """Nodes, edges and variants of one block."""

    index: BlockIndex
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    variants: tuple[tuple[Variant, ...], ...]
    fixed: Mapping[int, tuple[str, ...]]
    params: Mapping[str, tuple[str, ...]]  # placements that the operators know for each parameter


def build_problem(
    index: BlockIndex, tp: int, boundary: Boundary, unhooked: frozenset[str] = frozenset(), *, ep: int = 1
) -> BlockProblem:
    """Prepare one block for degree `tp`. `unhooked` are modules that run more than once: one layout hook there would
    serve several values. With `ep` > 1 expert layers have one way to run (`planner.sharding.experts`)."""
    flows = _flows(index, boundary)
    places = [key for value in flows for key in flows[value].scopes]
    number = {key: n for n, key in enumerate(places)}
    more, fixed_ways = (further_shardings(index), {}) if ep == 1 else ({}, expert_shardings(index))
    ways = [
        (fixed_ways[i],) if i in fixed_ways else legal_shardings(op, tp, more.get(i, ()))
        for i, op in enumerate(index.block.operators)
    ]
    variants = tuple(_variants(index, i, number, own) for i, own in enumerate(ways))
    states = _states(index, variants, places)
    nodes = tuple(Node(value=v, scope=s, states=states[v]) for v, s in places)
    edges = tuple(
        _edge(index, nodes, number, unhooked, value, *hop)
        for value, flow in flows.items()
        for hop in flow.hops
    )
    fixed: dict[int, tuple[str, ...]] = {}
    for i, placement in enumerate(boundary.inputs):
        key = (f"input:{i}", boundary.input_scopes[i])
        if key in number:
            fixed[number[key]] = (placement,)
    for value, wanted, scope in zip(
        index.block.outputs, boundary.outputs, boundary.output_scopes, strict=True
    ):
        if wanted is not None and (value, scope) in number:
            fixed[number[value, scope]] = (wanted,)
    params: dict[str, tuple[str, ...]] = {}
    for name in (p.name for p in index.block.parameters):
        known = {pl: None for row in variants for v in row for n, pl in v.params if n == name}
        params[name] = tuple(known) or ("R",)
    return BlockProblem(index=index, nodes=nodes, edges=edges, variants=variants, fixed=fixed, params=params)


# ---- where values go


@dataclass(slots=True)
class _Flow:
    """Scopes that a value is seen in, and the boundaries it passes: (source scope, target scope, position)."""

    scopes: dict[tuple[str, str], None]
    hops: list[tuple[str, str, int]]


def _flows(index: BlockIndex, boundary: Boundary) -> dict[str, _Flow]:
    operators = index.block.operators
    origins: dict[str, tuple[str, int]] = {}
    for i in range(len(index.block.inputs)):
        origins[f"input:{i}"] = (boundary.input_scopes[i], 0)
    for i, op in enumerate(operators):
        for name in output_names(op):
            origins[name] = (op.module, i + 1)
    readers: dict[str, list[tuple[str, int]]] = {
        v: [(operators[c].module, c) for c in index.consumers.get(v, ())] for v in origins
    }
    for value, scope in zip(index.block.outputs, boundary.output_scopes, strict=True):
        readers[value].append((scope, len(operators)))
    return {
        value: _flow(value, origin, made, readers[value])
        for value, (origin, made) in origins.items()
        if readers[value] or value in index.producer
    }


def _flow(value: str, origin: str, made: int, readers: Sequence[tuple[str, int]]) -> _Flow:
    flow = _Flow(scopes={(value, origin): None}, hops=[])
    seen: dict[tuple[str, str], int] = {}
    for scope, position in readers:
        up, down = _path(origin, scope)
        for a, b in pairwise(up):
            seen.setdefault((a, b), made)
        for a, b in pairwise(down):
            seen[a, b] = min(seen.get((a, b), position), position)
    for (a, b), position in seen.items():
        flow.scopes[value, a] = flow.scopes[value, b] = None
        flow.hops.append((a, b, position))
    return flow


def _chain(scope: str) -> list[str]:
    return [OUTSIDE] if scope == OUTSIDE else [*enclosing(scope), OUTSIDE]


def _path(origin: str, target: str) -> tuple[list[str], list[str]]:
    """Scopes from `origin` up to the common one, and from there down to `target`."""
    up, down = _chain(origin), _chain(target)
    common = next(scope for scope in up if scope in down)
    return up[: up.index(common) + 1], list(reversed(down[: down.index(common) + 1]))


def _edge(
    index: BlockIndex, nodes: Sequence[Node], number: Mapping[tuple[str, str], int], unhooked: frozenset[str],
    value: str, source: str, target: str, position: int,
) -> Edge:  # fmt: skip
    entering = len(_chain(target)) > len(_chain(source))
    module = target if entering else source
    side = "input" if entering else "output"
    a, b = number[value, source], number[value, target]
    changes: tuple[tuple[str, str], ...] = ()
    if module not in unhooked and _hookable(index, module, value, side):
        changes = tuple(
            (x, y) for x, y in product(nodes[a].states, nodes[b].states) if _can_change(x, y)
        )  # fmt: skip
    return Edge(source=a, target=b, module=module, side=side, position=position, changes=changes)


def _hookable(index: BlockIndex, module: str, value: str, side: str) -> bool:
    """Whether a hook at the module's boundary sees the value."""
    if index.block.calls:
        calls = [call for call in index.block.calls if call.module == module]
        seen = {v for c in calls for v in (c.outputs if side == "output" else tuple(v for _, v in c.inputs))}
        return value in seen
    return module == "" or any(op.module == module for op in index.block.operators)


def _can_change(before: str, after: str) -> bool:
    """A hook leaves a whole gradient outside; it cannot make sums, nor undo a partial gradient outside."""
    if before in (after, PARTIAL_GRADIENT):
        return False
    # DTensor makes a whole of a strided shard, and a strided shard of a whole: any other change takes both.
    if "/" in before + after and WHOLE not in (before, layout(after)):
        return False
    return after != SUM


# ---- what operators demand


def divides(size: Size, tp: int) -> bool:
    """Whether `tp` divides a size at every micro-batch."""
    return size.const % tp == 0 and size.per_sample % tp == 0


def legal_shardings(op: Operator, tp: int, more: tuple[Sharding, ...] = ()) -> tuple[Sharding | None, ...]:
    """The operator's shardings (and `more`) that `tp` divides, whatever the micro-batch; None (replicated) if it
    has none."""
    fits = tuple(s for s in (*op.shardings, *more) if all(divides(size, tp) for size in s.divides))
    return fits or (None,)


def _variants(
    index: BlockIndex, i: int, number: Mapping[tuple[str, str], int], ways: Sequence[Sharding | None]
) -> tuple[Variant, ...]:
    op = index.block.operators[i]
    passes = _passes_sums(index, op, i, ways)
    found: dict[tuple[object, ...], Variant] = {}
    for sharding in ways:
        for variant in _of_sharding(index, op, sharding, number, passes=passes):
            found.setdefault((variant.states, variant.params), variant)
    return tuple(found.values())


def _of_sharding(
    index: BlockIndex, op: Operator, sharding: Sharding | None, number: Mapping[tuple[str, str], int],
    *, passes: bool,
) -> Iterator[Variant]:  # fmt: skip
    inputs = sharding.inputs if sharding else ("R",) * len(op.inputs)
    outputs = sharding.outputs if sharding else ("R",) * len(op.outputs)
    if len(inputs) != len(op.inputs) or len(outputs) < len(op.outputs):
        return
    if any(v.startswith("buffer:") and p not in ("R", "") for v, p in zip(op.inputs, inputs, strict=True)):
        return  # buffers stay whole on every rank
    splits = any(p[:1] in ("S", "P") for p in outputs)
    # A parameter that joins a sum of parts (a bias) is held whole; DTensor lets one rank add it.
    joins = [v for v, p in zip(op.inputs, inputs, strict=True) if p == SUM]
    params = {v.removeprefix("param:"): "R" if v in joins else p for v, p in zip(op.inputs, inputs, strict=True)
              if v.startswith("param:")}  # fmt: skip
    partial = tuple(
        n for n, p in params.items()
        if p == "R" and splits and f"param:{n}" in index.needs_grad and f"param:{n}" not in joins
    )  # fmt: skip
    for passing in (False, True) if not splits and passes else (False,):
        states: dict[int, str] = {}
        agrees = True
        for value, placement, is_output in (
            *((v, p, False) for v, p in zip(op.inputs, inputs, strict=True) if index.is_activation(v)),
            *((v, p, True) for v, p in zip(output_names(op), outputs, strict=False)),
        ):
            state = placement or WHOLE
            if value in index.needs_grad and state == WHOLE and (passing or (splits and not is_output)):
                state = PARTIAL_GRADIENT
            node = number[value, op.module]
            agrees &= states.setdefault(node, state) == state
        if agrees and (not passing or PARTIAL_GRADIENT in states.values()):
            yield Variant(
                sharding=sharding, states=tuple(states.items()), params=tuple(params.items()),
                partial_params=partial,
            )  # fmt: skip


def _passes_sums(index: BlockIndex, op: Operator, i: int, ways: Sequence[Sharding | None]) -> bool:
    """Whether a partial gradient may flow back through a replicated operator: through views, and through what
    DTensor also runs on partial sums forward (casts, sums); any other wants it whole."""
    if i in index.aliases:
        return True
    flowing = [n for n, v in enumerate(op.inputs) if v in index.needs_grad]
    return any(
        s.outputs[:1] == ("P",) and all(s.inputs[n] == "P" for n in flowing) and not _reads_parameters(op)
        for s in ways
        if s is not None
    )


def _reads_parameters(op: Operator) -> bool:
    return any(v.startswith("param:") for v in op.inputs)


def _states(
    index: BlockIndex, variants: Sequence[Sequence[Variant]], places: Sequence[tuple[str, str]]
) -> dict[str, tuple[str, ...]]:
    """States that some operator knows for a value; replicated always."""
    known: dict[str, dict[str, None]] = {v: {WHOLE: None} for v, _ in places}
    for value in known:
        if value in index.needs_grad:
            known[value][PARTIAL_GRADIENT] = None
        if len(index.specs[value].shape) == 3:  # the sequence may be sharded at a boundary
            known[value]["S1"] = None
    for row in variants:
        for variant in row:
            for node, state in variant.states:
                known[places[node][0]][state] = None
    return {value: tuple(states) for value, states in known.items()}
