"""What a rank sends in a step: by the program that is priced, in the form in which a run is counted. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoparallel.costmodel.compression import wire_bytes
from autoparallel.costmodel.program import (
    ActionKind,
    BlockWork,
    Collective,
    CollectiveOp,
    Program,
    StageWork,
    Step,
)

# Of a tensor, what each of n ranks sends: this often times (n - 1) / n. Kind: formula, a ring's.
_PASSES = {
    CollectiveOp.ALL_REDUCE: 2,
    CollectiveOp.ALL_GATHER: 1,
    CollectiveOp.REDUCE_SCATTER: 1,
    CollectiveOp.ALL_TO_ALL: 1,
    CollectiveOp.BROADCAST: 1,
}

TIED = "tied parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One kind of collective: `size_bytes` is the full tensor, as in `costmodel.program.Collective`; `ranks` take part, 0
    for all along the axis."""

    op: CollectiveOp
    axis: str
    size_bytes: int
    ranks: int = 0


def sent_bytes(message: Message, sizes: Mapping[str, int]) -> float:
    """What one rank sends for it; `sizes` are those of the mesh axes. Says the same of an all-reduce as of the
    reduce-scatter and all-gather that it can be made of."""
    if message.op is CollectiveOp.SEND:
        return message.size_bytes
    ranks = message.ranks or 1
    for name in () if message.ranks else message.axis.split(" x "):
        ranks *= sizes.get(name, 1)
    return _PASSES[message.op] * message.size_bytes * (ranks - 1) / ranks


def program_messages(program: Program) -> tuple[Counter[Message], ...]:
    """For each stage what its ranks send in one step: `program` is the one that is priced. What spans no axis (one rank that holds
    experts alone gathers and reduces them for itself) is not sent."""
    halves = Counter(a.stage for row in program.ranks for a in row if a.kind is ActionKind.BACKWARD_WEIGHT)
    found = [_stage_messages(stage, program, halves[n]) for n, stage in enumerate(program.stages)]
    homes = {action.stage: rank for rank, row in enumerate(program.ranks) for action in row}
    for index, stage in enumerate(program.stages[:-1]):
        if (
            homes[index] != homes[index + 1] and stage.send is not None
        ):  # activations on, their gradients back
            for end in (index, index + 1):
                found[end][_message(stage.send)] += program.micro_batches
                if stage.received is not None:
                    found[end][_message(stage.received)] += program.micro_batches
    return tuple(Counter({m: count for m, count in one.items() if m.axis}) for one in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a message belongs: a kind of action of the program (F, B, UNSHARD, REDUCE_GRAD, STEP), and a module."""

    action: str
    module: str


def priced_places(stage: StageWork) -> dict[Message, Counter[Place]]:
    """Of the messages that are priced for a stage, where each belongs."""
    found: dict[Message, Counter[Place]] = {}

    def note(steps: Iterable[Step | None], action: str, module: str, often: int) -> None:
        for step in steps:
            if isinstance(step, Collective):
                places = found.setdefault(_message(step), Counter())
                places[Place(action=action, module=module)] += often

    for work, count in stage.blocks:
        note(work.forward, "F", work.name, count)
        note(
            (*work.recompute, *work.backward_input, *work.backward_weight, *work.weight_again),
            "B",
            work.name,
            count,
        )
        note(dict.fromkeys((*work.gathers, *work.regathers)), "UNSHARD", work.name, count)
        note(work.reduce, "REDUCE_GRAD", work.name, count)
    note(stage.tied_reduce, "REDUCE_GRAD", TIED, 1)
    note(stage.after_step, "STEP", "updated parameters", 1)
    note((stage.send,), "SEND", "the stage's output", 1)
    return found


def _stage_messages(stage: StageWork, program: Program, halves: int) -> Counter[Message]:
    """`halves`: how many of its backward passes are split."""
    found: Counter[Message] = Counter()
    micro_batches = program.micro_batches
    for work, count in stage.blocks:
        for step in work.weight_again:
            if isinstance(step, Collective):
                found[_message(step)] += count * halves
        for step in _passes(work):
            if isinstance(step, Collective):
                found[_message(step)] += count * micro_batches
        for gather in (*work.gathers, *work.regathers):
            found[_message(gather)] += count * micro_batches
        for gather in work.regathers if work.weight_gathers else ():
            found[_message(gather)] += count * halves
        for reduction in work.reduce:
            found[_message(reduction)] += count * (micro_batches if program.reduce_every_micro else 1)
    for collective in (*stage.after_step, *stage.tied_reduce):
        found[_message(collective)] += 1
    return found


def _passes(work: BlockWork) -> Iterable[Step]:
    return (*work.forward, *work.recompute, *work.backward_input, *work.backward_weight)


def _message(collective: Collective) -> Message:
    """As it travels: compressed by the method of the outermost network level."""
    size = collective.size_bytes
    if collective.compression:
        size = round(wire_bytes(collective.compression[-1], size, collective.item_bytes))
    return Message(op=collective.op, axis=" x ".join(collective.axes), size_bytes=size)
