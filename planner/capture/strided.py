"""Shardings of fused projections: a dim that holds several parts one after another, each of them sharded.

A projection to query, key and value at once, cut into three afterwards, keeps every head on one rank if each
of the three parts is sharded, not the whole: "S2/3" (DTensor's strided shard). Where the model's own code cuts
a dim into equal parts, that placement is legal for what it cuts, and is followed back through the operators
that made it, as far as DTensor's rules carry it: to the parameters of the projection.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoparallel.costmodel.graph import Operator, Sharding, parts_of, sharded_dim, strided
from autoparallel.planner.capture.fit import Fit
from autoparallel.planner.capture.records import Call, Trace
from autoparallel.planner.capture.rules import Rules
from autoparallel.planner.capture.shardings import sharding_of

# Calls that cut one dim into parts; the runtime makes them an unflatten and an unbind (runtime/fused_parts.py).
CUTS = frozenset({"split", "split_with_sizes", "chunk", "tensor_split"})
# Calls that give a dim other dims: three out of one are parts, heads and head size.
_RESHAPES = frozenset({"view", "reshape", "unflatten"})
_DIMS_WITH_PARTS = 3


def with_strided_shardings(
    operators: Sequence[Operator],
    indices: Sequence[int],
    traces: Sequence[Trace],
    fit: Fit,
    rules: Rules,
) -> tuple[Operator, ...]:
    """`operators`, made from the calls at `indices`, with the strided shardings that are legal besides theirs."""
    if not rules.knows_parts():
        return tuple(operators)
    wanted: dict[int, set[str]] = defaultdict(set)  # value -> strided placements that a reader knows
    made = list(operators)
    for n in reversed(range(len(made))):
        calls = [t.calls[indices[n]] for t in traces]
        found = [*_cuts(calls, traces, fit), *_heads(rules, calls, traces, fit)]
        found += _producing(rules, made[n], calls, traces, fit, wanted)
        new = tuple(s for s in dict.fromkeys(found) if s not in made[n].shardings)
        if new:
            made[n] = replace(made[n], shardings=(*made[n].shardings, *new))
            for sharding in new:
                _want(wanted, traces[0], calls[0], sharding)
    return tuple(made)


def _want(wanted: dict[int, set[str]], trace: Trace, call: Call, sharding: Sharding) -> None:
    for value, placement in zip(call.inputs, sharding.inputs, strict=True):
        if "/" in placement and trace.values[value].origin == "call":
            wanted[value].add(placement)


def _cuts(calls: Sequence[Call], traces: Sequence[Trace], fit: Fit) -> list[Sharding]:
    """A dim cut into equal parts, each of which is sharded."""
    call, trace = calls[0], traces[0]
    if call.name not in CUTS or len(call.inputs) != 1 or len(call.outputs) < 2:
        return []
    whole = trace.values[call.inputs[0]].meta.shape
    shapes = {trace.values[v].meta.shape for v in call.outputs}
    parts = len(call.outputs)
    part = shapes.pop()
    dims = [d for d, size in enumerate(part) if size * parts == whole[d]]
    if shapes or len(dims) != 1:
        return []
    (dim,) = dims
    size = fit.size([t.values[c.outputs[0]].meta.shape[dim] for t, c in zip(traces, calls, strict=True)])
    return [Sharding(inputs=(strided(dim, parts),), outputs=(f"S{dim}",) * parts, divides=(size,))]


def _heads(rules: Rules, calls: Sequence[Call], traces: Sequence[Trace], fit: Fit) -> list[Sharding]:
    """One dim seen as parts, heads and head size, its heads sharded."""
    call, trace = calls[0], traces[0]
    if call.name not in _RESHAPES or len(call.inputs) != 1 or len(call.outputs) != 1:
        return []
    before, after = (trace.values[v].meta.shape for v in (call.inputs[0], call.outputs[0]))
    dim = next((d for d, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
    if dim >= len(before) or len(after) - len(before) + 1 < _DIMS_WITH_PARTS or after[dim] < 2:
        return []
    sharding = sharding_of(rules, traces, calls, fit, (strided(dim, after[dim]),))
    return [sharding] if sharding is not None and sharding.outputs == (f"S{dim + 1}",) else []


def _producing(
    rules: Rules,
    operator: Operator,
    calls: Sequence[Call],
    traces: Sequence[Trace],
    fit: Fit,
    wanted: Mapping[int, set[str]],
) -> list[Sharding]:
    """Shardings of an operator that leave its result as its readers want it."""
    if len(calls[0].outputs) != 1 or calls[0].leaf is not None:
        return []
    found = []
    for placement in sorted(wanted.get(calls[0].outputs[0], ())):
        parts = parts_of(placement)
        for plain in operator.shardings:
            if plain.outputs == (f"S{sharded_dim(placement)}",):
                inputs = [strided(sharded_dim(p), parts) if p.startswith("S") else p for p in plain.inputs]
                sharding = sharding_of(rules, traces, calls, fit, inputs)
                if sharding is not None and sharding.outputs == (placement,):
                    found.append(sharding)
    return found
