"""Legal shardings of an operator on a one-dimensional mesh, from DTensor's own rules.

An operator launches one or several ATen operators. For each of them DTensor's rule gives a table from input to
output placements; the shardings of the whole are the assignments to its inputs that pass through all of them
with nothing redistributed. The rules are asked on a mesh of size one, where every size divides: what a degree
must divide is noted beside each sharding instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from torch import fx

from autoparallel.costmodel.graph import Sharding, Size, parts_of, sharded_dim
from autoparallel.planner.capture.alike import twins
from autoparallel.planner.capture.fit import Fit
from autoparallel.planner.capture.library_kernels import ONE_CALL
from autoparallel.planner.capture.nodes import Launch, Meta, Role, tensor, tensor_inputs, tensor_outputs
from autoparallel.planner.capture.rules import Row, Rules
from autoparallel.planner.capture.whole import GROUPED_PRODUCTS

# More assignments than this are thinned to those that treat inputs of one shape alike (kind: chosen).
_CANDIDATE_LIMIT = 1500

_Environment = dict[Meta, str]


def legal_shardings(rules: Rules, call: fx.Node, fit: Fit) -> tuple[Sharding, ...]:
    """All legal shardings of one call; first the one that replicates everything."""
    name, inputs = call.meta["torch_name"], [tensor(node) for node in tensor_inputs(call)]
    outputs = [tensor(node) for node in tensor_outputs(call)]
    everything = Sharding(inputs=("R",) * len(inputs), outputs=("R",) * len(outputs))
    if not inputs or "leaf" in call.meta or name in ONE_CALL:
        return (everything,)
    if name == "scaled_dot_product_attention":
        rows = _attention_rows(rules, inputs)
        passes = [(i, o, _touched((*i, *o), 0)) for i, o in rows]
    elif name in GROUPED_PRODUCTS and len(inputs) == 3:
        rows = list(rules.grouped_product(*inputs).items())
        passes = [(i, o, _touched((*i, *o), 0)) for i, o in rows]
    else:
        passes = _compose(rules, call, inputs, outputs)
        passes += _vocabulary(call, inputs)
    found = [everything]
    for placements, results, touched in passes:
        divides = _divides(touched, call, fit)
        if divides is None:
            continue
        sharding = Sharding(inputs=placements, outputs=results, divides=divides)
        if sharding not in found and any(p != "R" for p in (*placements, *results)):
            found.append(sharding)
    return tuple(found)


def sharding_of(rules: Rules, call: fx.Node, fit: Fit, placements: Sequence[str]) -> Sharding | None:
    """The sharding in which a call takes its inputs in `placements`; None where it would redistribute them."""
    inputs, outputs = (list(map(tensor, side(call))) for side in (tensor_inputs, tensor_outputs))
    found = _carried(rules, call, inputs, outputs, placements)
    divides = _divides(found[2], call, fit) if found is not None else None
    if found is None or divides is None:
        return None
    return Sharding(inputs=found[0], outputs=found[1], divides=divides)


# A sharded dim on the way: (index into the call's launches, or -1 for the call itself; tensor; dim; parts)
_Touched = tuple[tuple[int, int, int, int], ...]
_Pass = tuple[tuple[str, ...], tuple[str, ...], _Touched]


def _compose(rules: Rules, call: fx.Node, inputs: Sequence[Meta], outputs: Sequence[Meta]) -> list[_Pass]:
    fixed = [node.meta["role"] in {Role.PARAM, Role.BUFFER} for node in tensor_inputs(call)]
    # addmm's bias may join a sum of parts: DTensor turns the replicated bias into one without communication.
    adds = any("addmm" in str(launch.signature[0]) for launch in call.meta["kernels"])
    fixed = [held and not (adds and len(m.shape) == 1) for held, m in zip(fixed, inputs, strict=True)]
    every = (_carried(rules, call, inputs, outputs, placed) for placed in _candidates(inputs, fixed))
    return [found for found in every if found is not None]


def _carried(
    rules: Rules, call: fx.Node, inputs: Sequence[Meta], outputs: Sequence[Meta], placements: Sequence[str]
) -> _Pass | None:
    """A call with its inputs in these placements. None where it would redistribute them, or would leave a result in parts that no
    input is in: as many as there are samples, say."""
    environment: _Environment = {}
    if any(environment.setdefault(m, p) != p for m, p in zip(inputs, placements, strict=True)):
        return None  # one tensor passed twice cannot be laid out in two ways
    touched = list(_touched(placements, 0))
    if not _walk(rules, call.meta["kernels"], environment, touched):
        return None
    results = tuple(environment.get(m, "R") for m in outputs)
    if not _parts(results) <= _parts(placements):
        return None
    return tuple(placements), results, (*touched, *_touched(results, len(inputs)))


def _walk(
    rules: Rules,
    launches: Sequence[Launch],
    environment: _Environment,
    touched: list[tuple[int, int, int, int]],
) -> bool:
    """Carry the placements through the launches; False where a rule would redistribute. A dim that is in parts on the way alone, as
    it was flattened with others, asks nothing of its size: the dim that it was does."""
    own = _parts(environment.values())
    for index, launch in enumerate(launches):
        row = tuple(environment.get(m, "R") for m in launch.inputs)
        if all(p == "R" for p in row):
            results: Row | None = ("R",) * len(launch.outputs)
        else:
            parts = max(parts_of(p) for p in row)
            results = rules.table(launch, parts).get(row)
        if results is None or len(results) != len(launch.outputs):
            return False
        for meta, placement in zip(launch.outputs, results, strict=True):
            environment[meta] = placement
        for place, (meta, placement) in enumerate(zip(launch.outputs, results, strict=True)):
            asks = placement.startswith("S") and parts_of(placement) in own
            if asks and len(meta.shape) > sharded_dim(placement):
                touched.append((index, place, sharded_dim(placement), parts_of(placement)))
    return True


def _parts(placements: Iterable[str]) -> frozenset[int]:
    """The numbers of parts that dims are sharded in; 1 always."""
    return frozenset({1, *map(parts_of, placements)})


def _touched(placements: Sequence[str], offset: int) -> _Touched:
    """Sharded dims of the call's own tensors, which are counted from `offset`."""
    return tuple(
        (-1, offset + i, sharded_dim(p), parts_of(p)) for i, p in enumerate(placements) if p.startswith("S")
    )


def _candidates(inputs: Sequence[Meta], fixed: Sequence[bool]) -> Iterable[tuple[str, ...]]:
    options = []
    for meta, held in zip(inputs, fixed, strict=True):
        partial = [] if held or not meta.dtype.startswith(("float", "bfloat")) else ["P"]
        shards = [f"S{d}" for d, size in enumerate(meta.shape) if size > 1]
        options.append(["R", *partial, *shards])
    count = 1
    for choices in options:
        count *= len(choices)
    if count <= _CANDIDATE_LIMIT:
        return itertools.product(*options)
    shapes = sorted({m.shape for m in inputs}, key=lambda s: -len(s))[:2]
    alike = itertools.product(*(options[[m.shape for m in inputs].index(s)] for s in shapes))
    return (tuple(dict(zip(shapes, pick, strict=True)).get(m.shape, "R") for m in inputs) for pick in alike)


def _divides(touched: _Touched, call: fx.Node, fit: Fit) -> tuple[Size, ...] | None:
    """The sizes that the degree must divide, without those that follow from others; None if one of them is 1."""
    sizes = set()
    for launch, place, dim, parts in touched:
        size = fit.size([_shape(same, launch, place)[dim] for same in twins(call)])
        if size.const % parts or size.per_sample % parts:
            return None
        sizes.add(Size(size.const // parts, size.per_sample // parts))
    if Size(1) in sizes:
        return None
    return tuple(sorted(s for s in sizes if not any(_follows(s, other) for other in sizes - {s})))


def _follows(size: Size, other: Size) -> bool:
    """Whether what divides `other` divides `size` too."""
    if (other.per_sample and other.const) or not (other.per_sample or other.const):
        return False
    if other.per_sample:
        return not size.const and size.per_sample % other.per_sample == 0
    return size.const % other.const == 0 and size.per_sample % other.const == 0


def _shape(call: fx.Node, launch: int, place: int) -> tuple[int, ...]:
    if launch >= 0:
        shape: tuple[int, ...] = call.meta["kernels"][launch].outputs[place].shape
        return shape
    return tensor((*tensor_inputs(call), *tensor_outputs(call))[place]).shape


def _attention_rows(rules: Rules, inputs: Sequence[Meta]) -> list[tuple[Row, Row]]:
    """Flash attention's rule for query, key and value. A mask that differs by head is sharded with the heads."""
    rows: list[tuple[Row, Row]] = []
    for row, (out, *_) in rules.flash_attention(*inputs[:3]).items():
        rest = []
        for mask in inputs[3:]:
            shared = len(mask.shape) < len(inputs[0].shape) or not row[0].startswith("S")
            own = row[0].startswith("S") and not shared and mask.shape[int(row[0][1:])] > 1
            rest.append(row[0] if own else "R")
        rows.append(((*row, *rest), (out,)))
    return rows


def _vocabulary(call: fx.Node, inputs: Sequence[Meta]) -> list[_Pass]:
    """Cross-entropy over logits sharded by class: torch.distributed.tensor.parallel.loss_parallel runs it."""
    if call.meta["torch_name"] != "cross_entropy_loss" or len(inputs[0].shape) != 2 or len(inputs) != 2:
        return []
    return [(("S1", "R"), ("R",), ((-1, 0, 1, 1),))]
