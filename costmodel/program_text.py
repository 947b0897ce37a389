"""The text form of a program's actions: one line a pipeline rank, `0F0 0SEND_F0 0RECV_B0 0B0 …`; round-trips."""

from __future__ import annotations

import re
from collections.abc import Sequence

from autoparallel.costmodel.program import Action, ActionKind
from autoparallel.errors import UserError

Ranks = tuple[tuple[Action, ...], ...]

WITHOUT_MICRO = frozenset({ActionKind.REDUCE_GRAD, ActionKind.STEP})
_KINDS = "|".join(sorted((kind.value for kind in ActionKind), key=len, reverse=True))
_ACTION = re.compile(rf"(\d+)({_KINDS})(\d*)")


class ProgramTextError(UserError):
    """A text is not a program."""


def show_action(action: Action) -> str:
    """`2F0`: stage 2, forward, micro-batch 0; `2STEP` where there is no micro-batch."""
    micro = "" if action.micro is None else str(action.micro)
    return f"{action.stage}{action.kind.value}{micro}"


def show(ranks: Sequence[Sequence[Action]]) -> str:
    """One line per pipeline rank, actions separated by a blank; `parse` is its inverse."""
    return "\n".join(" ".join(show_action(action) for action in actions) for actions in ranks)


def parse_action(text: str) -> Action:
    """Inverse of `show_action`; raises `ProgramTextError`."""
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ProgramTextError(
            f"action {text!r}: expected STAGE KIND MICRO-BATCH without blanks, such as 2F0, 1SEND_B3 or 0STEP; "
            f"kinds are {', '.join(kind.value for kind in ActionKind)}"
        )
    stage, kind, micro = int(match[1]), ActionKind(match[2]), match[3]
    if (kind in WITHOUT_MICRO) != (micro == ""):
        needs = "takes no micro-batch" if micro else "needs a micro-batch"
        raise ProgramTextError(f"action {text!r}: {kind.value} {needs}")
    return Action(stage, kind, int(micro) if micro else None)


def parse(text: str) -> Ranks:
    """The actions that `show` wrote: a line per rank (an empty line is a rank without actions)."""
    return tuple(tuple(parse_action(word) for word in line.split()) for line in text.split("\n"))


def grid(
    ranks: Sequence[Sequence[Action]],
    *,
    bad: tuple[int, int] | None = None,
    reason: str = "",
    around: int = 8,
) -> str:
    """A table of steps (rows) by ranks (columns); the cell `bad` = (rank, step) is marked, with its `reason`.

    With `bad`, only `around` rows on either side of it are shown.
    """
    longest = max((len(actions) for actions in ranks), default=0)
    first, last = 0, longest
    if bad is not None:
        first, last = max(0, bad[1] - around), min(longest, bad[1] + around + 1)
    head = ["", *(f"rank {rank}" for rank in range(len(ranks)))]
    rows = [head]
    for step in range(first, last):
        cells = [show_action(actions[step]) if step < len(actions) else "" for actions in ranks]
        if bad is not None and bad[1] == step:
            cells[bad[0]] = f">{cells[bad[0]]}<"
        rows.append([f"step {step}", *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if bad is not None and bad[1] - first + 1 < len(lines):
        lines[bad[1] - first + 1] += f"   <-- {reason}" if reason else "   <--"
    if first > 0:
        lines.insert(1, "…")
    if last < longest:
        lines.append("…")
    return "\n".join(lines)
