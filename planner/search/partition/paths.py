"""Paths through a timetable: lower bounds on the step for every partition of the layers under one schedule.

`costmodel.timetable.pipeline_times` computes a longest path. Whatever the stages take, no path through the timetable
takes longer than the step, and each is linear in what the stages take: it is a row of the stage problem. Every
timetable gives two paths for each rank, read off its actions; the critical path of each simulation is one more. No
schedule is known by name here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from autoparallel.costmodel.stage_cost import StageCost
from autoparallel.costmodel.timetable import PipelineTimes, Timetable, phase_of
from autoparallel.planner.search.partition.problem import Q, Row, merged
from autoparallel.planner.search.partition.ties import Ties

# What a stage takes, by the name that the timetable has for it.
_QUANTITIES = {q.name.lower(): q for q in Q if q < Q.END} | {
    "reduce_s": Q.REDUCE,
    "reduce_after_weight_s": Q.REDUCE_AFTER_WEIGHT,
}
# In the order of `Timetable.message`, whose last ones, the rest of late gathers, count as nothing.
_MESSAGES = (Q.SEND, Q.REDUCE, Q.REDUCE_AFTER_WEIGHT, Q.UPDATED)
# A last backward and what is left of its reduction are one quantity where both stand on a path.
_ENDS = ((Q.LAST_BACKWARD, Q.REDUCE, Q.END), (Q.LAST_BACKWARD_WEIGHT, Q.REDUCE_AFTER_WEIGHT, Q.END_WEIGHT))

Terms = Counter[tuple[int, int]]  # how often each (quantity, stage) stands on a path


@dataclass(slots=True)
class SchedulePaths:
    """The paths that are known of one timetable, as rows of stage problems."""

    timetable: Timetable
    ties: Ties = field(default_factory=Ties)  # of the chain that is divided
    rows: list[Row] = field(init=False)
    _before: list[int] = field(init=False)  # by row: the computation before it on its rank, -1 for none
    _held: list[int] = field(init=False)  # by row: the message before it on its link, -1 for none
    _last: list[int] = field(init=False)  # by rank: its last computation

    def __post_init__(self) -> None:
        self._before, self._held, self._last = _predecessors(self.timetable)
        self.rows = list(dict.fromkeys(_row(terms) for terms in self._rank_paths()))

    def learn(self, costs: Sequence[StageCost], times: PipelineTimes) -> Row:
        """The critical path of a simulation, from now on among the rows."""
        row = self.critical(costs, times)
        if row not in self.rows:
            self.rows.append(row)
        return row

    def critical(self, costs: Sequence[StageCost], times: PipelineTimes) -> Row:
        """The path that makes a simulated step as long as it is."""
        table, terms = self.timetable, Terms()
        at = self._through_steps(costs, times, terms)
        while at >= 0:
            following = self._before[at]
            start_s = times.end_s[following] if following >= 0 else 0.0
            self._count(at, terms)
            other = table.wait[at] if table.link[at] < 0 else self._held[at]
            if other >= 0 and times.arrival_s[other] > start_s:
                following = other
            at = following
        return _row(terms)

    def _count(self, at: int, terms: Terms) -> None:
        """Add what a row of the timetable takes."""
        if self.timetable.link[at] >= 0:
            kind, stage = divmod(self.timetable.message[at], len(self.timetable.homes))
            if kind < len(_MESSAGES):
                terms[int(_MESSAGES[kind]), stage] += 1
        elif self.timetable.cost[at] >= 0:
            stage, column = phase_of(self.timetable.cost[at])
            terms[int(_QUANTITIES[column]), stage] += 1

    def _through_steps(self, costs: Sequence[StageCost], times: PipelineTimes, terms: Terms) -> int:
        """Follow the optimizer back from the end of the step; the row that it waited for."""
        rank = max(range(len(times.steps)), key=lambda r: times.steps[r][-1][2] if times.steps[r] else 0.0)
        last, reduce_row = self._last[rank], self.timetable.reduce_row
        computed_s = times.end_s[last] if last >= 0 else 0.0
        for position in range(len(times.steps[rank]) - 1, -1, -1):
            stage, start_s, _ = times.steps[rank][position]
            terms[int(Q.STEP), stage] += 1
            free_s = times.steps[rank][position - 1][2] if position else computed_s
            if start_s <= free_s:
                continue
            if times.arrival_s[reduce_row[stage]] >= start_s:
                return reduce_row[stage]
            tied = [s for s, cost in enumerate(costs) if cost.tied_s > 0.0]
            longest = max(tied, key=lambda s: costs[s].tied_s)
            latest = max(tied, key=lambda s: times.arrival_s[reduce_row[s]])
            if not self._are_always_tied({stage, longest, latest}):
                self._alone(latest, times, terms)
            else:
                terms[int(Q.TIED), longest] += 1
            return reduce_row[latest]
        return last

    def _are_always_tied(self, stages: set[int]) -> bool:
        """Whether these stages wait for each other's gradients however layers are divided: where layer groups hold tied tensors,
        a path through others than the ends would be one of some partitions alone."""
        ends = {0, len(self.timetable.homes) - 1}
        return len(stages) == 1 or not self.ties.groups or (bool(self.ties.ends) and stages <= ends)

    def _alone(self, stage: int, times: PipelineTimes, terms: Terms) -> None:
        """From the reduction of a stage, whatever others wait for, to the end of its rank's steps."""
        steps = times.steps[self.timetable.homes[stage]]
        terms.clear()
        terms[int(Q.TIED), stage] += 1
        for after in range([step for step, _, _ in steps].index(stage), len(steps)):
            terms[int(Q.STEP), steps[after][0]] += 1

    def _rank_paths(self) -> list[Terms]:
        """For each rank: what its first action waits for, all that it computes, and its steps; and the same up to its last
        message, and on with the rank that gets it."""
        table = self.timetable
        first, sent, receiver = [-1] * len(table.steps), [-1] * len(table.steps), dict[int, int]()
        for at, (rank, wait, link) in enumerate(zip(table.rank, table.wait, table.link, strict=True)):
            if link < 0 and first[rank] < 0:
                first[rank] = at
            if wait >= 0 and table.rank[wait] != rank:  # not what it gathers itself
                receiver.setdefault(wait, at)
                sent[table.rank[wait]] = max(sent[table.rank[wait]], wait)
        found = []
        for rank, at in enumerate(first):
            start = self._into(at)
            for place, count in table.phases[rank]:
                stage, column = phase_of(place)
                start[int(_QUANTITIES[column]), stage] += count
            found.append(start.copy())
            self._end(rank, found[-1])
            if sent[rank] >= 0:
                start.subtract(self._since(sent[rank], rank))
                found.append(self._onward(sent, receiver, rank, start))
        return found

    def _onward(self, sent: list[int], receiver: dict[int, int], rank: int, terms: Terms) -> Terms:
        """A path that has come to the last message of a rank, to the end of the step."""
        while True:
            self._count(sent[rank], terms)
            at = receiver[sent[rank]]
            rank = self.timetable.rank[at]
            rest = self._since(at - 1, rank)
            if sent[rank] <= at:
                terms.update(rest)
                self._end(rank, terms)
                return terms
            terms.update(rest)
            terms.subtract(self._since(sent[rank], rank))

    def _since(self, start: int, rank: int) -> Terms:
        """What a rank computes after a row of the timetable."""
        at, terms = self._last[rank], Terms()
        while at > start:
            self._count(at, terms)
            at = self._before[at]
        return terms

    def _into(self, at: int) -> Terms:
        """What a computation waits for: the messages, each with the computation that it comes from."""
        table, terms = self.timetable, Terms()
        while (message := table.wait[at]) >= 0:
            self._count(message, terms)
            at = self._before[message]
            if at < 0:
                break
            self._count(at, terms)
        return terms

    def _end(self, rank: int, terms: Terms) -> None:
        """A rank's steps, and before them its last reduction where its first step waits for it."""
        table, last = self.timetable, self._last[rank]
        steps, stage = table.steps[rank], phase_of(table.cost[last])[0]
        reduced = table.reduce_row[stage]
        if steps and steps[0] == stage and reduced >= last:
            if reduced > last:
                self._count(reduced, terms)
            terms[int(Q.TIED), stage] += 1
        for step in steps:
            terms[int(Q.STEP), step] += 1


def _row(terms: Terms) -> Row:
    """A path as a row of the stage problem."""
    counts = {key: n for key, n in terms.items() if n}
    for last, reduce, end in _ENDS:
        for quantity, stage in list(counts):
            if quantity == last and counts.get((reduce, stage)) and counts[last, stage] == 1:
                counts[end, stage] = counts.pop((last, stage))
                del counts[reduce, stage]
    return Row(terms=merged([(quantity, stage, n) for (quantity, stage), n in sorted(counts.items())]))


def _predecessors(timetable: Timetable) -> tuple[list[int], list[int], list[int]]:
    """Per row, the computation before it on its rank, and the message before it on its link (-1: none); per rank, its last
    computation."""
    last_on_rank = [-1] * len(timetable.steps)
    last_on_link = [-1] * timetable.links
    before, held = [], []
    for at, (rank, link) in enumerate(zip(timetable.rank, timetable.link, strict=True)):
        before.append(last_on_rank[rank])
        if link < 0:
            held.append(-1)
            last_on_rank[rank] = at
        else:
            held.append(last_on_link[link])
            last_on_link[link] = at
    return before, held, last_on_rank
