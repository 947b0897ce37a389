"""What a rank sends in a step: by the program that is priced, in the form in which a run is counted. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoparallel.costmodel.program import Collective, CollectiveOp, Program, StageWork, Step
from autoparallel.costmodel.step_collectives import sent_by_rank, step_collectives, wire_size

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
    ranks = message.ranks or 1
    for name in () if message.ranks else message.axis.split(" x "):
        ranks *= sizes.get(name, 1)
    return sent_by_rank(message.op, message.size_bytes, ranks)


def program_messages(program: Program) -> tuple[Counter[Message], ...]:
    """For each stage what its ranks send in one step: `program` is the one that is priced. What spans no axis (one rank that holds
    experts alone gathers and reduces them for itself) is not sent."""
    found = []
    for stage in step_collectives(program):
        messages: Counter[Message] = Counter()
        for collective, count in stage.items():
            messages[_message(collective)] += count
        found.append(messages)
    return tuple(found)


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


def _message(collective: Collective) -> Message:
    return Message(op=collective.op, axis=" x ".join(collective.axes), size_bytes=wire_size(collective))
