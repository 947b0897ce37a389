"""When does every action of a program run, given what the stages take? An exact event simulation.

`prepare` puts the actions of all ranks into one order that respects every dependency, once per grid of actions;
`pipeline_times` then walks that order once per set of stage costs, which is what planning does thousands of
times. Each rank computes one action at a time, in its own order. A message leaves when its SEND is reached and
the link between the two ranks is free, and is waited for by the receiver; neither side computes less for it.
Gradient reductions run beside what follows on the same rank, and STEP waits for them. Late gathers of updated parameters
run from the start of the step, one stage of a rank after the other, and the first forward of a stage waits for its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from autoparallel.costmodel.collecting import without_collection
from autoparallel.costmodel.program import Action, ActionKind
from autoparallel.costmodel.stage_cost import StageCost

K = ActionKind
# Columns of a stage in the table of durations.
_COLUMNS = (
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "last_backward",
    "last_backward_weight",
)
_COMPUTE = {K.FORWARD: 0, K.BACKWARD: 1, K.BACKWARD_INPUT: 2, K.BACKWARD_WEIGHT: 3}
_LAST = {K.BACKWARD: 4, K.BACKWARD_WEIGHT: 5}
_REDUCE = {
    K.BACKWARD: len(_COLUMNS),
    K.BACKWARD_WEIGHT: len(_COLUMNS) + 1,
}  # a reduction that the rank waits for
_WIDTH = len(_COLUMNS) + 2
_NO_ROW = frozenset({K.RECV_F, K.RECV_B, K.STEP})  # what a computation waits for, and what follows everything
_BLOCKING = -2  # in place of a duration: the rank waits until its message has been sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Timetable:
    """Actions in an order that respects every dependency, as parallel columns.

    `wait[i]` is the row whose message row i needs (-1: none); `cost[i]` its duration's place in the table of
    durations (-1: none, the last entry, -2: that of its message); `link[i]` the link that it sends on when it is done (-1: none) and `message[i]` the
    place of the sending time. `ranks[r]` and `steps[r]` are the stages that rank r reduces and steps.
    """

    actions: tuple[Action, ...]
    rank: tuple[int, ...]
    wait: tuple[int, ...]
    cost: tuple[int, ...]
    link: tuple[int, ...]
    message: tuple[int, ...]
    reduce_row: tuple[int, ...]  # by stage
    steps: tuple[tuple[int, ...], ...]  # by rank: stages in the order of their STEPs
    homes: tuple[int, ...]  # by stage: rank
    phases: tuple[tuple[tuple[int, int], ...], ...]  # by rank: (place in the table of durations, how often)
    links: int


def phase_of(cost: int) -> tuple[int, str]:
    """Stage, and field of its `StageCost` (or `reduce_s`, `reduce_after_weight_s`), that an entry of `Timetable.cost` stands for."""
    stage, column = divmod(cost, _WIDTH)
    return stage, (*_COLUMNS, "reduce_s", "reduce_after_weight_s")[column]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """Seconds from the start of the step: `end_s` and `arrival_s` by row of the timetable.

    `steps` are the spans of the optimizer: (stage, start_s, end_s) by rank.
    """

    end_s: list[float]
    arrival_s: list[float]
    steps: tuple[tuple[tuple[int, float, float], ...], ...]
    step_time_s: float


@dataclass(slots=True)
class _Builder:
    """Rows of a timetable while it is built."""

    homes: tuple[int, ...]
    last: dict[int, Action]
    overlap: bool
    blocking_sends: bool
    actions: list[Action] = field(default_factory=list)
    columns: list[tuple[int, int, int, int, int]] = field(
        default_factory=list
    )  # rank, wait, cost, link, message
    links: dict[tuple[int, int], int] = field(default_factory=dict)
    sent: dict[tuple[bool, int, int | None], int] = field(
        default_factory=dict
    )  # (forward, stage, micro): row
    reduce_row: dict[int, int] = field(default_factory=dict)
    gathered: dict[int, int] = field(default_factory=dict)  # late gathers nobody has waited for: row

    def gather_late(self, stages: Sequence[int], rank: int) -> None:
        """The rank's late gathers, which all stand before its first action: of each stage what its first forward waits for, then
        the rest, for which those of further stages wait."""
        for stage in stages:
            self.gathered[stage] = len(self.actions)
            for kind in (3, 4):
                message = kind * len(self.homes) + stage
                self._add(Action(stage, K.STEP), (rank, -1, -1, self._link(rank, -2), message))

    def place(self, action: Action, rank: int) -> bool:
        """Add the row of an action; False when the message that it needs has not been sent yet."""
        kind, stage = action.kind, action.stage
        column = _COMPUTE.get(kind)
        if column is not None:
            wait = self._wait(action, rank)
            if wait is None:
                return False
            if action is self.last[stage]:
                column = _LAST[kind]
            if (
                kind is K.FORWARD and stage in self.gathered
            ):  # a row of no duration, for the other thing to wait for
                self._add(action, (rank, self.gathered.pop(stage), -1, -1, 0))
            self._add(action, (rank, wait, stage * _WIDTH + column, -1, 0))
        elif kind is K.SEND_F or kind is K.SEND_B:
            forward = kind is K.SEND_F
            link = self._link(rank, self.homes[stage + 1 if forward else stage - 1])
            self.sent[forward, stage, action.micro] = len(self.actions)
            cost = _BLOCKING if self.blocking_sends else -1
            self._add(action, (rank, -1, cost, link, stage if forward else stage - 1))
        elif kind is K.REDUCE_GRAD:
            self.reduce_row[stage] = len(self.actions)
            after = self.last[stage].kind
            if self.overlap:
                message = len(self.homes) * (1 if after is K.BACKWARD else 2) + stage
                self._add(action, (rank, -1, -1, self._link(rank, -1), message))
            else:
                self._add(action, (rank, -1, stage * _WIDTH + _REDUCE[after], -1, 0))
        return True

    def _wait(self, action: Action, rank: int) -> int | None:
        """The row of the message that a computation needs; -1 where it needs none, None where it is not sent."""
        if action.kind is K.BACKWARD_WEIGHT:
            return -1
        forward = action.kind is K.FORWARD
        source = action.stage - 1 if forward else action.stage + 1
        if not 0 <= source < len(self.homes) or self.homes[source] == rank:
            return -1
        return self.sent.get((forward, source, action.micro))

    def _link(self, sender: int, receiver: int) -> int:
        return self.links.setdefault((sender, receiver), len(self.links))

    def _add(self, action: Action, columns: tuple[int, int, int, int, int]) -> None:
        self.actions.append(action)
        self.columns.append(columns)


@without_collection()
def prepare(
    ranks: Sequence[Sequence[Action]],
    *,
    overlap: bool = True,
    blocking_sends: bool = False,
    late_gathers: bool = False,
) -> Timetable:
    """The timetable of a program that passes `check`.

    Without `overlap` a rank waits for its reductions, with `blocking_sends` for each message that it sends, and with
    `late_gathers` its stages wait for their parameters.
    """
    homes = {action.stage: rank for rank, actions in enumerate(ranks) for action in actions}
    builder = _Builder(
        homes=tuple(homes[stage] for stage in range(len(homes))), last=_last_backwards(ranks),
        overlap=overlap, blocking_sends=blocking_sends,
    )  # fmt: skip
    if late_gathers:
        for rank, actions in enumerate(ranks):
            builder.gather_late(tuple(dict.fromkeys(a.stage for a in actions if a.kind is K.FORWARD)), rank)
    at = [0] * len(ranks)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(ranks):
            start = now = at[rank]
            while now < len(actions) and (actions[now].kind in _NO_ROW or builder.place(actions[now], rank)):
                now += 1
            at[rank] = now
            progress = progress or now > start
    assert all(a == len(actions) for a, actions in zip(at, ranks, strict=True)), "the program deadlocks"
    columns = tuple(zip(*builder.columns, strict=True))
    return Timetable(
        actions=tuple(builder.actions), rank=columns[0], wait=columns[1], cost=columns[2], link=columns[3],
        message=columns[4], reduce_row=tuple(builder.reduce_row[stage] for stage in range(len(homes))),
        homes=builder.homes, phases=_count_phases(columns[0], columns[2], len(ranks)), links=len(builder.links),
        steps=tuple(tuple(a.stage for a in actions if a.kind is K.STEP) for actions in ranks),
    )  # fmt: skip


def _count_phases(
    rank: Sequence[int], cost: Sequence[int], ranks: int
) -> tuple[tuple[tuple[int, int], ...], ...]:
    counted: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for (home, place), count in sorted(Counter(zip(rank, cost, strict=True)).items()):
        if place >= 0:
            counted[home].append((place, count))
    return tuple(map(tuple, counted))


def _last_backwards(ranks: Sequence[Sequence[Action]]) -> dict[int, Action]:
    """The B or W of each stage beside which its gradients are reduced: the last before REDUCE_GRAD."""
    last: dict[int, Action] = {}
    for actions in ranks:
        for action in actions:
            if action.kind in _LAST:
                last[action.stage] = action
    return last


def pipeline_times(timetable: Timetable, costs: Sequence[StageCost]) -> PipelineTimes:
    """Walk the timetable; exact up to rounding. Seconds of planning grow with the number of actions only."""
    durations = action_seconds(costs)
    messages = message_seconds(costs)
    free_s = [0.0] * len(timetable.steps)
    link_free_s = [0.0] * timetable.links
    end_s: list[float] = []
    arrival_s: list[float] = []
    for rank, wait, cost_at, link, message in zip(
        timetable.rank, timetable.wait, timetable.cost, timetable.link, timetable.message, strict=True
    ):
        now_s = free_s[rank]
        if link < 0:
            if wait >= 0 and arrival_s[wait] > now_s:
                now_s = arrival_s[wait]
            now_s += durations[cost_at]
            free_s[rank] = now_s
            end_s.append(now_s)
            arrival_s.append(now_s)
        else:
            end_s.append(now_s)
            if link_free_s[link] > now_s:
                now_s = link_free_s[link]
            now_s += messages[message]
            link_free_s[link] = now_s
            if cost_at == _BLOCKING:
                free_s[rank] = now_s - costs[message].joined_s
            arrival_s.append(now_s)
    steps = _steps(timetable, costs, free_s, arrival_s)
    step_time_s = max((spans[-1][2] for spans in steps if spans), default=0.0)
    return PipelineTimes(end_s=end_s, arrival_s=arrival_s, steps=steps, step_time_s=step_time_s)


def action_seconds(costs: Sequence[StageCost]) -> list[float]:
    """The table of durations that `Timetable.cost` points into; the last entry is that of what takes no time."""
    found = [
        seconds
        for cost in costs
        for seconds in (
            *(getattr(cost, column).total_s for column in _COLUMNS),
            cost.reduce_s,
            cost.reduce_after_weight_s,
        )
    ]
    return [*found, 0.0]


def message_seconds(costs: Sequence[StageCost]) -> list[float]:
    """What `Timetable.message` points into: sends of every stage, then its reductions after a B, and after a W, and of
    its late gathers what is waited for, and the rest."""
    return [
        *(cost.send_s for cost in costs),
        *(cost.reduce_s for cost in costs),
        *(cost.reduce_after_weight_s for cost in costs),
        *(cost.updated_s for cost in costs),
        *(cost.updated_rest_s for cost in costs),
    ]


def _steps(
    timetable: Timetable, costs: Sequence[StageCost], free_s: Sequence[float], arrival_s: Sequence[float]
) -> tuple[tuple[tuple[int, float, float], ...], ...]:
    """The optimizer of each rank: after its computation, its reductions, and those of tied tensors."""
    reduced_s = [arrival_s[row] for row in timetable.reduce_row]
    tied = [stage for stage, cost in enumerate(costs) if cost.tied_s > 0.0]
    tied_s = max((reduced_s[stage] for stage in tied), default=0.0) + max(
        (costs[s].tied_s for s in tied), default=0.0
    )
    result = []
    for rank, stages in enumerate(timetable.steps):
        now_s, spans = free_s[rank], []
        for stage in stages:
            start_s = max(now_s, reduced_s[stage], tied_s if stage in tied else 0.0)
            now_s = start_s + costs[stage].step.total_s
            spans.append((stage, start_s, now_s))
        result.append(tuple(spans))
    return tuple(result)
