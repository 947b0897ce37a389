"""The simulated step as a picture: every action that takes time, when it starts and when it ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoparallel.costmodel.collecting import without_collection
from autoparallel.costmodel.prediction import Span
from autoparallel.costmodel.program import Action, ActionKind
from autoparallel.costmodel.program_text import show_action
from autoparallel.costmodel.stage_cost import StageCost
from autoparallel.costmodel.timetable import PipelineTimes, Timetable, action_seconds, message_seconds

_LABELS = {
    ActionKind.FORWARD: "forward",
    ActionKind.SEND_F: "pp_comm",
    ActionKind.SEND_B: "pp_comm",
    ActionKind.REDUCE_GRAD: "dp_comm",
    ActionKind.STEP: "dp_comm",  # the late gather of its parameters
}
Cut = tuple[float, float]


@without_collection()
def timeline(
    timetable: Timetable, times: PipelineTimes, costs: Sequence[StageCost], *, most: int | None = None
) -> tuple[tuple[Span, ...], Cut | None]:
    """Every action that takes time, by rank and start; messages and reductions beside the computation included.

    Of more than `most` about so many are kept, two thirds of them from the beginning and one third from the end; then the
    seconds between which the others lie are the second value.
    """
    end_s = np.array(times.arrival_s)
    sends = np.array(timetable.link) >= 0
    seconds, messages = np.array(action_seconds(costs)), np.array(message_seconds(costs))
    start_s = end_s - np.where(
        sends, messages[np.array(timetable.message)], seconds[np.array(timetable.cost)]
    )
    steps = _steps(times, costs)
    kept = end_s > start_s
    cut = cut_between([*start_s[kept].tolist(), *(step.start_s for step in steps)], most)
    if cut is not None:
        kept &= (start_s < cut[0]) | (start_s >= cut[1])
        steps = [step for step in steps if step.start_s < cut[0] or step.start_s >= cut[1]]
    spans = [
        Span(
            rank=timetable.rank[row], action=show_action(timetable.actions[row]), start_s=float(start_s[row]),
            end_s=float(end_s[row]), label=_LABELS.get(timetable.actions[row].kind, "backward"),
        )
        for row in np.flatnonzero(kept).tolist()
    ]  # fmt: skip
    spans += steps
    return tuple(sorted(spans, key=lambda span: (span.rank, span.start_s, span.end_s))), cut


def _steps(times: PipelineTimes, costs: Sequence[StageCost]) -> list[Span]:
    """The optimizer of each stage, then the gather of its updated parameters where the next step waits for it: one span
    for each part of the breakdown that it counts for."""
    found = []
    for rank, stages in enumerate(times.steps):
        for stage, start_s, _ in stages:
            action = show_action(Action(stage, ActionKind.STEP))
            for label, seconds in sorted(costs[stage].step.parts, key=lambda part: part[0].endswith("_comm")):
                end_s = start_s + seconds
                found.append(Span(rank=rank, action=action, start_s=start_s, end_s=end_s, label=label))
                start_s = end_s
    return [span for span in found if span.end_s > span.start_s]


def cut_between(start_s: Sequence[float], most: int | None) -> Cut | None:
    """Between which seconds spans that start then are left out; None where there are not more than `most`."""
    if most is None or len(start_s) <= most:
        return None
    in_order = sorted(start_s)
    from_s, until_s = in_order[most * 2 // 3], in_order[-(most // 3)]
    return (from_s, until_s) if until_s > from_s else None
