"""Which operators of a block run as one kernel: a pure pass from a block to its units, in execution order.

The rule knows no names of models or layers. Only memory-bound operators fuse (norm, element-wise, reduction,
softmax, dropout, copies, and the views between them); matrix products, attention, embedding, loss and leaves
stay alone. Two neighbours of one kind of software fuse like this:

    eager      never
    fused      (Megatron, Transformer Engine) inside one module, where a child without parameters (an activation,
               a dropout) counts as its parent; and a dropout with the element-wise operator that reads it
    compiled   (torch.compile) anywhere in the block

A unit is convex: nothing outside stands on a path between two of its operators. A value whose layout changes
(a pin) ends a unit. The backward pass of a unit recomputes the values inside it from its external inputs: so
it keeps those instead of the values inside, unless somebody outside keeps them anyway.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from autoparallel.costmodel.block_index import BlockIndex, output_names
from autoparallel.costmodel.graph import ONCE, OpKind, Saved

FUSIBLE = frozenset(
    {
        OpKind.NORM,
        OpKind.BATCH_NORM,
        OpKind.POOL,
        OpKind.ELEMENTWISE,
        OpKind.REDUCTION,
        OpKind.SOFTMAX,
        OpKind.DROPOUT,
        OpKind.COPY,
        OpKind.VIEW,
    }
)
KEEPS_INPUT = frozenset(
    {
        OpKind.GEMM,
        OpKind.GROUPED_GEMM,
        OpKind.CONV,
        OpKind.ATTENTION,
        OpKind.CROSS_ENTROPY,
        OpKind.RECURRENT,
        OpKind.LEAF,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Operators that run as one kernel; alone, an operator is a unit of one.

    `inputs` are the values it reads from outside, `outputs` the values that somebody outside reads, `saved`
    what it keeps for its backward pass: (operator index, storage).
    """

    ops: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    saved: tuple[tuple[int, Saved], ...]
    fused: bool = False  # several kernels in eager mode, one here


def fuse(index: BlockIndex, kernels: str, barriers: Collection[str] = ()) -> tuple[Unit, ...]:
    """Units of a block in execution order, for `kernels` eager, fused or compiled.

    `barriers` are values whose layout changes between producer and consumer: nothing fuses across them.
    """
    ops = index.block.operators
    group = list(range(len(ops)))  # union by smallest member
    members = [1 << i for i in range(len(ops))]
    above = _ancestors(index)
    if kernels != "eager":
        for i in range(len(ops)):
            for value in ops[i].inputs:
                source = index.producer.get(value)
                if source is None or value in barriers or not _may_fuse(index, source, i, kernels):
                    continue
                a, b = group[source], group[i]
                union = members[a] | members[b]
                if a != b and _convex(union, above):
                    low = min(a, b)
                    members[low] = union
                    group = [low if union >> j & 1 else g for j, g in enumerate(group)]
                    above = _merged(union, above)
    units = []
    for first in sorted(set(group)):
        inside = tuple(j for j in range(len(ops)) if group[j] == first)
        composite = ops[first].kind in FUSIBLE and len(ops[first].forward) > 1
        composite = composite and all(kernel.count == ONCE for kernel in ops[first].forward)
        fused = kernels != "eager" and (len(inside) > 1 or composite)
        units.append(_unit(index, inside, fused=fused))
    return _in_order(units, index)


def _ancestors(index: BlockIndex) -> list[int]:
    """For each operator the set (as bits) of operators it depends on, itself included."""
    above: list[int] = []
    for i, op in enumerate(index.block.operators):
        bits = 1 << i
        for value in op.inputs:
            if value in index.producer:
                bits |= above[index.producer[value]]
        above.append(bits)
    return above


def _convex(union: int, above: list[int]) -> bool:
    """No operator outside both depends on a member and feeds one."""
    feeding = 0
    rest = union
    while rest:
        low = rest & -rest
        feeding |= above[low.bit_length() - 1]
        rest ^= low
    outside = feeding & ~union
    while outside:
        low = outside & -outside
        if above[low.bit_length() - 1] & union:
            return False
        outside ^= low
    return True


def _merged(union: int, above: list[int]) -> list[int]:
    """Ancestors once the members of `union` are one: who depends on one of them depends on all."""
    together = union
    for j, bits in enumerate(above):
        if union >> j & 1:
            together |= bits
    return [bits | together if bits & union else bits for bits in above]


def _home(index: BlockIndex, module: str) -> str:
    """The nearest enclosing module that holds parameters: an activation's home is its parent."""
    while module and not any(p.name.startswith(module + ".") for p in index.block.parameters):
        module = module.rpartition(".")[0]
    return module


def _may_fuse(index: BlockIndex, source: int, reader: int, kernels: str) -> bool:
    a, b = index.block.operators[source], index.block.operators[reader]
    if a.kind not in FUSIBLE or b.kind not in FUSIBLE:
        return False
    if any(kernel.count != ONCE for op in (a, b) for kernel in op.forward):
        return False  # rounds of a loop, one after another
    if kernels == "compiled" or _home(index, a.module) == _home(index, b.module):
        return True
    return a.kind is OpKind.DROPOUT and b.kind is OpKind.ELEMENTWISE


def _unit(index: BlockIndex, inside: tuple[int, ...], *, fused: bool) -> Unit:
    ops, members = index.block.operators, frozenset(inside)
    inputs: dict[str, None] = {}
    outputs: dict[str, None] = {}
    for i in inside:
        for value in ops[i].inputs:
            if index.producer.get(value) not in members:
                inputs[value] = None
        for value in output_names(ops[i]):
            readers = index.consumers.get(value, ())
            if index.leaves_block(value) or any(r not in members for r in readers):
                outputs[value] = None
    saved = tuple((i, s) for i in inside for s in ops[i].saved)
    if fused:
        saved = _kept_by_fused(index, inside, tuple(inputs))
    return Unit(ops=inside, inputs=tuple(inputs), outputs=tuple(outputs), saved=saved, fused=fused)


def _kept_by_fused(
    index: BlockIndex, inside: tuple[int, ...], inputs: tuple[str, ...]
) -> tuple[tuple[int, Saved], ...]:
    """Storages kept by a fused unit: external inputs in place of what is computed inside."""
    ops, members = index.block.operators, frozenset(inside)
    kept: dict[tuple[str, int], tuple[int, Saved]] = {}
    needed: set[str] = set()
    for i in inside:
        for saved in ops[i].saved:
            source = index.producer.get(saved.value)
            if saved.value == "":
                if ops[i].kind is OpKind.DROPOUT:  # its mask cannot be computed again
                    kept["", i] = (i, saved)
                else:
                    needed |= {s for v in ops[i].inputs for s in _sources(index, v, members)}
                continue
            if source not in members:
                kept[saved.value, 0] = (i, saved)
                continue
            needed |= _sources(index, saved.value, members)
            storage = index.storage[saved.value]
            outside = [ops[r] for r in index.consumers.get(saved.value, ()) if r not in members]
            if storage not in inputs and any(o.kind in KEEPS_INPUT for o in outside):
                kept[storage, 0] = (i, saved)
    for value in inputs:
        if value in needed and index.is_activation(value):
            reader = next(i for i in inside if value in ops[i].inputs)
            kept.setdefault((value, 0), (reader, Saved(value=value, spec=index.specs[value])))
    return tuple(kept.values())


def _sources(index: BlockIndex, value: str, members: frozenset[int]) -> set[str]:
    """External inputs of the unit that `value` is computed from."""
    found, stack, seen = set(), [value], set()
    while stack:
        current = stack.pop()
        source = index.producer.get(current)
        if source not in members:
            found.add(current)
        elif source is not None and source not in seen:
            seen.add(source)
            stack.extend(index.block.operators[source].inputs)
    return found


def _in_order(units: list[Unit], index: BlockIndex) -> tuple[Unit, ...]:
    """A topological order that stays as near to the captured order as the fusion allows."""
    made_by = {op: n for n, unit in enumerate(units) for op in unit.ops}
    waits = {
        n: {made_by[index.producer[v]] for v in unit.inputs if v in index.producer} - {n}
        for n, unit in enumerate(units)
    }
    order: list[Unit] = []
    done: set[int] = set()
    pending = sorted(waits, key=lambda n: units[n].ops[0])
    while pending:
        ready = next((n for n in pending if waits[n] <= done), None)
        assert ready is not None, "fused units form a cycle"
        order.append(units[ready])
        done.add(ready)
        pending.remove(ready)
    return tuple(order)
