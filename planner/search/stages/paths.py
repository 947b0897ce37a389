"""Which actions decide how long a step takes: the critical path through a timetable.

`costmodel.timetable.pipeline_times` is a longest-path computation. The path that it finds for one deal of blocks
to stages is a lower bound on the step for *every* deal under the same schedule, linear in what the stages take:
that is where the stage problem's rows come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autoparallel.costmodel.stage_cost import StageCost
from autoparallel.costmodel.timetable import PipelineTimes, Timetable, phase_of

SEND, STEP, TIED = "send", "step", "tied"
REDUCE, REDUCE_AFTER_WEIGHT = "reduce_s", "reduce_after_weight_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """How often each (part, stage) stands on one path. Parts: the fields of StageCost that hold a phase, "send"
    out of a stage and back into it, "reduce_s" or "reduce_after_weight_s" (what is left of it after the last
    backward), "tied"."""

    terms: tuple[tuple[str, int, int], ...]


def critical_path(timetable: Timetable, costs: Sequence[StageCost], times: PipelineTimes) -> Path:
    """The path that makes the step as long as it is."""
    terms: Counter[tuple[str, int]] = Counter()
    row = _through_steps(timetable, costs, times, terms)
    before, held = _predecessors(timetable)
    while row >= 0:
        start_s = 0.0
        following = before[row]
        if following >= 0:
            start_s = times.end_s[following]
        if timetable.link[row] < 0:
            stage, column = phase_of(timetable.cost[row])
            terms[column, stage] += 1
            other = timetable.wait[row]
        else:
            message = timetable.message[row]
            stages = len(costs)
            terms[(SEND, REDUCE, REDUCE_AFTER_WEIGHT)[message // stages], message % stages] += 1
            other = held[row]
        if other >= 0 and times.arrival_s[other] > start_s:
            following = other
        row = following
    return Path(terms=tuple((part, stage, count) for (part, stage), count in sorted(terms.items())))


def _predecessors(timetable: Timetable) -> tuple[list[int], list[int]]:
    """Per row, the computation before it on its rank, and the message before it on its link (-1: none)."""
    last_on_rank = [-1] * len(timetable.steps)
    last_on_link = [-1] * timetable.links
    before, held = [], []
    for row, (rank, link) in enumerate(zip(timetable.rank, timetable.link, strict=True)):
        before.append(last_on_rank[rank])
        if link < 0:
            held.append(-1)
            last_on_rank[rank] = row
        else:
            held.append(last_on_link[link])
            last_on_link[link] = row
    return before, held


def _through_steps(
    timetable: Timetable, costs: Sequence[StageCost], times: PipelineTimes, terms: Counter[tuple[str, int]]
) -> int:
    """Follow the optimizer back from the end of the step; the row that it waited for."""
    rank = max(range(len(times.steps)), key=lambda r: times.steps[r][-1][2] if times.steps[r] else 0.0)
    last = max(
        (row for row, r in enumerate(timetable.rank) if r == rank and timetable.link[row] < 0), default=-1
    )
    computed_s = times.end_s[last] if last >= 0 else 0.0
    for position in range(len(times.steps[rank]) - 1, -1, -1):
        stage, start_s, _ = times.steps[rank][position]
        terms[STEP, stage] += 1
        free_s = times.steps[rank][position - 1][2] if position else computed_s
        if start_s <= free_s:
            continue
        if times.arrival_s[timetable.reduce_row[stage]] >= start_s:
            return timetable.reduce_row[stage]
        tied = [s for s, cost in enumerate(costs) if cost.tied_s > 0.0]
        terms[TIED, max(tied, key=lambda s: costs[s].tied_s)] += 1
        return max((timetable.reduce_row[s] for s in tied), key=lambda r: times.arrival_s[r])
    return last
