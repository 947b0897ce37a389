"""Shardings of fused projections: a dim that holds several parts one after another, each of them sharded.

A projection to query, key and value at once, cut into three afterwards, keeps every head on one rank if each
of the three parts is sharded, not the whole: "S2/3" (DTensor's strided shard). Where the model's own code cuts
a dim into equal parts, that placement is legal for what it cuts, and is followed back through the operators
that made it, as far as DTensor's rules carry it: to the parameters of the projection.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import fx

from autoparallel.costmodel.graph import Sharding, parts_of, sharded_dim, strided
from autoparallel.planner.capture.alike import twins
from autoparallel.planner.capture.fit import Fit
from autoparallel.planner.capture.indexing import part_taken
from autoparallel.planner.capture.links import calls_by_link
from autoparallel.planner.capture.nodes import maker, tensor, tensor_inputs, tensor_outputs
from autoparallel.planner.capture.rules import Rules
from autoparallel.planner.capture.shardings import legal_shardings, sharding_of

# Calls that cut one dim into parts; the runtime makes them an unflatten and an unbind (runtime/tensor/fused_parts.py).
CUTS = frozenset({"split", "split_with_sizes", "chunk", "tensor_split"})
SLICE = "__getitem__"  # likewise, one part by one, of what a projection returns
_PROJECTIONS = frozenset({"linear", "addmm", "matmul", "mm"})
# Calls that give a dim other dims: three out of one are parts, heads and head size.
_RESHAPES = frozenset({"view", "reshape", "unflatten"})
_DIMS_WITH_PARTS = 3


def with_shardings(graph: fx.Graph, rules: Rules, fit: Fit) -> fx.Graph:
    """`graph`, each call of the first link of each structure told its legal `shardings`: DTensor's, then the strided ones that are legal besides those."""
    for link, group in calls_by_link(graph).items():
        if not link.first:
            continue
        for call in group:
            call.meta["shardings"] = legal_shardings(rules, call, fit)
        if rules.knows_parts():
            _add_strided(group, rules, fit)
    return graph


def _add_strided(group: Sequence[fx.Node], rules: Rules, fit: Fit) -> None:
    wanted: dict[fx.Node, set[str]] = defaultdict(set)  # tensor -> strided placements that a reader knows
    for call in reversed(group):
        found = [*_cuts(call, fit), *_heads(rules, call, fit), *_producing(rules, call, fit, wanted)]
        new = tuple(s for s in dict.fromkeys(found) if s not in call.meta["shardings"])
        call.meta["shardings"] += new
        for sharding in new:
            for node, placement in zip(tensor_inputs(call), sharding.inputs, strict=True):
                if "/" in placement and maker(node) is not None:
                    wanted[node].add(placement)


def _cuts(call: fx.Node, fit: Fit) -> list[Sharding]:
    """A dim cut into equal parts, each of which is sharded; or one of these."""
    inputs, outputs = tensor_inputs(call), tensor_outputs(call)
    if call.meta["torch_name"] == SLICE:
        return _slice(call, fit)
    if call.meta["torch_name"] not in CUTS or len(inputs) != 1 or len(outputs) < 2:
        return []
    whole = tensor(inputs[0]).shape
    shapes = {tensor(node).shape for node in outputs}
    parts = len(outputs)
    part = shapes.pop()
    dims = [d for d, size in enumerate(part) if size * parts == whole[d]]
    if shapes or len(dims) != 1:
        return []
    (dim,) = dims
    size = fit.size([tensor(tensor_outputs(same)[0]).shape[dim] for same in twins(call)])
    return [Sharding(inputs=(strided(dim, parts),), outputs=(f"S{dim}",) * parts, divides=(size,))]


def _slice(call: fx.Node, fit: Fit) -> list[Sharding]:
    (whole, *others), outputs = tensor_inputs(call), tensor_outputs(call)
    made = maker(whole)
    if others or len(outputs) != 1 or made is None or made.meta["torch_name"] not in _PROJECTIONS:
        return []
    taken = part_taken(call.args[1], tensor(whole).shape)
    if taken is None:
        return []
    dim, _, parts = taken
    size = fit.size([tensor(tensor_outputs(same)[0]).shape[dim] for same in twins(call)])
    return [Sharding(inputs=(strided(dim, parts),), outputs=(f"S{dim}",), divides=(size,))]


def _heads(rules: Rules, call: fx.Node, fit: Fit) -> list[Sharding]:
    """One dim seen as parts, heads and head size, its heads sharded."""
    inputs, outputs = tensor_inputs(call), tensor_outputs(call)
    if call.meta["torch_name"] not in _RESHAPES or len(inputs) != 1 or len(outputs) != 1:
        return []
    before, after = tensor(inputs[0]).shape, tensor(outputs[0]).shape
    dim = next((d for d, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
    if dim >= len(before) or len(after) - len(before) + 1 < _DIMS_WITH_PARTS or after[dim] < 2:
        return []
    sharding = sharding_of(rules, call, fit, (strided(dim, after[dim]),))
    return [sharding] if sharding is not None and sharding.outputs == (f"S{dim + 1}",) else []


def _producing(rules: Rules, call: fx.Node, fit: Fit, wanted: Mapping[fx.Node, set[str]]) -> list[Sharding]:
    """Shardings of a call that leave its result as its readers want it."""
    if len(tensor_outputs(call)) != 1 or "leaf" in call.meta:
        return []
    found = []
    for placement in sorted(wanted.get(tensor_outputs(call)[0], ())):
        parts = parts_of(placement)
        for plain in call.meta["shardings"]:
            if plain.outputs == (f"S{sharded_dim(placement)}",):
                inputs = [strided(sharded_dim(p), parts) if p.startswith("S") else p for p in plain.inputs]
                sharding = sharding_of(rules, call, fit, inputs)
                if sharding is not None and sharding.outputs == (placement,):
                    found.append(sharding)
    return found
