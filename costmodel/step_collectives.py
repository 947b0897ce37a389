"""The collectives of a step: how many of each a rank takes part in, and what they cost by kind and network level."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from autoparallel.costmodel.buckets import fill_buckets
from autoparallel.costmodel.collectives import collective_s
from autoparallel.costmodel.compression import wire_bytes
from autoparallel.costmodel.links import pattern_of
from autoparallel.costmodel.program import (
    ActionKind,
    BlockWork,
    Collective,
    CollectiveOp,
    Program,
    StageWork,
    Step,
)
from autoparallel.costmodel.topology import crossings, ranks_of
from autoparallel.profiles.hardware import Cluster

# Of a tensor, what each of n ranks sends: this often times (n - 1) / n. Kind: formula, a ring's.
_PASSES = {
    CollectiveOp.ALL_REDUCE: 2,
    CollectiveOp.ALL_GATHER: 1,
    CollectiveOp.REDUCE_SCATTER: 1,
    CollectiveOp.ALL_TO_ALL: 1,
    CollectiveOp.BROADCAST: 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """What one rank's collectives of a kind over a network level are in a step: how many, the bytes that it sends for them, and
    the seconds that each takes alone, summed."""

    op: str
    level: str  # the outermost that they cross
    count: int
    sent_bytes: float
    seconds: float


def sent_by_rank(op: CollectiveOp, size_bytes: float, ranks: int) -> float:
    """Bytes that each of `ranks` ranks sends for a tensor of `size_bytes`. Says the same of an all-reduce as of the reduce-scatter
    and all-gather that it can be made of."""
    if op is CollectiveOp.SEND:
        return size_bytes
    return _PASSES[op] * size_bytes * (ranks - 1) / ranks


def wire_size(collective: Collective) -> int:
    """Bytes of its tensor as they travel: compressed by the method of the outermost network level."""
    if not collective.compression:
        return collective.size_bytes
    return round(wire_bytes(collective.compression[-1], collective.size_bytes, collective.item_bytes))


def step_collectives(program: Program, *, bucketed: bool = False) -> tuple[Counter[Collective], ...]:
    """For each stage what its ranks take part in, and how often, in one step; reductions of gradients block by block, or
    `bucketed` as they travel. What spans no axis (one rank that holds experts alone gathers and reduces them for itself) is not sent."""
    halves = Counter(a.stage for row in program.ranks for a in row if a.kind is ActionKind.BACKWARD_WEIGHT)
    found = []
    for number, stage in enumerate(program.stages):
        own = _of_passes(stage, program, halves[number])
        times = program.micro_batches if program.reduce_every_micro else 1
        for reduction in _bucketed(stage, program) if bucketed else _unbucketed(stage):
            own[reduction] += times
        found.append(own)
    homes = {action.stage: rank for rank, row in enumerate(program.ranks) for action in row}
    for index, stage in enumerate(program.stages[:-1]):
        if homes[index] != homes[index + 1] and stage.send is not None:
            for end in (index, index + 1):  # activations on, their gradients back
                found[end][stage.send] += program.micro_batches
                if stage.received is not None:
                    found[end][stage.received] += program.micro_batches
    return tuple(Counter({c: count for c, count in one.items() if c.axes}) for one in found)


def priced_collectives(program: Program, cluster: Cluster) -> list[CollectiveCost]:
    """By kind and level, of the stage whose ranks spend longest on them; what crosses no level is left out."""
    longest: dict[tuple[str, str], CollectiveCost] = {}
    for stage in step_collectives(program, bucketed=True):
        own: dict[tuple[str, str], CollectiveCost] = {}
        for collective, count in stage.items():
            path = crossings(collective.axes, program.axes, cluster, pattern_of(collective))
            if not path or not collective.size_bytes:
                continue
            key = (str(collective.op), path[-1].level.name)
            so_far = own.get(key) or CollectiveCost(
                op=key[0], level=key[1], count=0, sent_bytes=0.0, seconds=0.0
            )
            sent = sent_by_rank(collective.op, wire_size(collective), ranks_of(collective.axes, program.axes))
            own[key] = CollectiveCost(
                op=key[0],
                level=key[1],
                count=so_far.count + count,
                sent_bytes=so_far.sent_bytes + count * sent,
                seconds=so_far.seconds + count * collective_s(collective, program.axes, cluster),
            )
        for key, cost in own.items():
            if key not in longest or cost.seconds > longest[key].seconds:
                longest[key] = cost
    return [longest[key] for key in sorted(longest)]


def _of_passes(stage: StageWork, program: Program, halves: int) -> Counter[Collective]:
    """All but the reductions of gradients, and what goes to other stages; `halves`: how many backward passes are split."""
    found: Counter[Collective] = Counter()
    for work, count in stage.blocks:
        for step in work.weight_again:
            if isinstance(step, Collective):
                found[step] += count * halves
        for step in _passes(work):
            if isinstance(step, Collective):
                found[step] += count * program.micro_batches
        for gather in (*work.gathers, *work.regathers):
            found[gather] += count * program.micro_batches
        for gather in work.regathers if work.weight_gathers else ():
            found[gather] += count * halves
    for collective in (*stage.after_step, *stage.tied_reduce):
        found[collective] += 1
    return found


def _passes(work: BlockWork) -> Iterable[Step]:
    return (*work.forward, *work.recompute, *work.backward_input, *work.backward_weight)


def _unbucketed(stage: StageWork) -> list[Collective]:
    return [reduction for work, count in stage.blocks for reduction in work.reduce for _ in range(count)]


def _bucketed(stage: StageWork, program: Program) -> list[Collective]:
    reductions = [work.reduce for work in reversed(stage.links)]
    return [c for bucket in fill_buckets(reductions, program.bucket_bytes) for c in bucket.collectives]
