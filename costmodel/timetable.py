"""When does every action of a program run, given what the stages take? An exact event simulation.

`prepare` puts the actions of all ranks into one order that respects every dependency, once per grid of actions;
`pipeline_times` then walks that order once per set of stage costs, which is what planning does thousands of
times. Each rank computes one action at a time, in its own order. A message leaves when its SEND is reached and
the link between the two ranks is free, and is waited for by the receiver; neither side computes less for it.
Gradient reductions run beside what follows on the same rank, and STEP waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Timetable:
    """Actions in an order that respects every dependency, as parallel columns.

    `wait[i]` is the row whose message row i needs (-1: none); `cost[i]` its duration's place in the table of
    durations (-1: none); `link[i]` the link that it sends on when it is done (-1: none) and `message[i]` the
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
class _Rows:
    """Rows of a timetable while it is built."""

    actions: list[Action]
    columns: list[tuple[int, int, int, int, int]]  # rank, wait, cost, link, message
    links: dict[tuple[int, int], int]
    messages: dict[tuple[ActionKind, int, int | None], int]  # the row that carries a message, by its sender

    def add(
        self, action: Action, rank: int, wait: int, cost: int, to: tuple[int, int] | None, message: int
    ) -> int:
        link = -1 if to is None else self.links.setdefault(to, len(self.links))
        self.actions.append(action)
        self.columns.append((rank, wait, cost, link, message))
        return len(self.actions) - 1


def prepare(ranks: Sequence[Sequence[Action]], *, overlap: bool = True) -> Timetable:
    """The timetable of a program that passes `check`; without `overlap` a rank waits for its reductions."""
    homes_by_stage = {action.stage: rank for rank, actions in enumerate(ranks) for action in actions}
    homes = tuple(homes_by_stage[stage] for stage in range(len(homes_by_stage)))
    rows = _Rows([], [], {}, {})
    reduce_row = [-1] * len(homes)
    last = _last_backwards(ranks)
    at = [0] * len(ranks)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(ranks):
            start = at[rank]
            while at[rank] < len(actions):
                action = actions[at[rank]]
                if not _place(action, rank, rows, homes, last, reduce_row, overlap):
                    break
                at[rank] += 1
            progress = progress or at[rank] > start
    assert all(a == len(actions) for a, actions in zip(at, ranks, strict=True)), "the program deadlocks"
    columns = tuple(zip(*rows.columns, strict=True))
    return Timetable(
        actions=tuple(rows.actions), rank=columns[0], wait=columns[1], cost=columns[2], link=columns[3],
        message=columns[4], reduce_row=tuple(reduce_row), homes=homes, links=len(rows.links),
        steps=tuple(tuple(a.stage for a in actions if a.kind is K.STEP) for actions in ranks),
    )  # fmt: skip


def _last_backwards(ranks: Sequence[Sequence[Action]]) -> dict[int, Action]:
    """The B or W of each stage beside which its gradients are reduced: the last before REDUCE_GRAD."""
    last: dict[int, Action] = {}
    for actions in ranks:
        for action in actions:
            if action.kind in _LAST:
                last[action.stage] = action
    return last


def _place(
    action: Action,
    rank: int,
    rows: _Rows,
    homes: tuple[int, ...],
    last: dict[int, Action],
    reduce_row: list[int],
    overlap: bool,
) -> bool:
    """Add the row of an action; False when the message that it needs has not been sent yet."""
    kind, stage = action.kind, action.stage
    column = _COMPUTE.get(kind)
    if column is not None:
        wait = -1
        source = stage - 1 if kind is K.FORWARD else stage + 1
        if kind is not K.BACKWARD_WEIGHT and 0 <= source < len(homes) and homes[source] != rank:
            send = K.SEND_F if kind is K.FORWARD else K.SEND_B
            wait = rows.messages.get((send, source, action.micro), -1)
            if wait < 0:
                return False
        if kind in _LAST and action == last[stage]:
            column = _LAST[kind]
        rows.add(action, rank, wait, stage * _WIDTH + column, None, 0)
    elif kind in (K.SEND_F, K.SEND_B):
        peer = stage + 1 if kind is K.SEND_F else stage - 1
        row = rows.add(action, rank, -1, -1, (rank, homes[peer]), stage if kind is K.SEND_F else stage - 1)
        rows.messages[kind, stage, action.micro] = row
    elif kind is K.REDUCE_GRAD:
        after = last[stage].kind
        if overlap:
            message = len(homes) * (1 if after is K.BACKWARD else 2) + stage
            reduce_row[stage] = rows.add(action, rank, -1, -1, (rank, -1), message)
        else:
            reduce_row[stage] = rows.add(action, rank, -1, stage * _WIDTH + _REDUCE[after], None, 0)
    return True


def pipeline_times(timetable: Timetable, costs: Sequence[StageCost]) -> PipelineTimes:
    """Walk the timetable; exact up to rounding. Seconds of planning grow with the number of actions only."""
    durations = [
        seconds
        for cost in costs
        for seconds in (
            *(getattr(cost, column).total_s for column in _COLUMNS),
            cost.reduce_s,
            cost.reduce_after_weight_s,
        )
    ]
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
            arrival_s.append(now_s)
    steps = _steps(timetable, costs, free_s, arrival_s)
    step_time_s = max((spans[-1][2] for spans in steps if spans), default=0.0)
    return PipelineTimes(end_s=end_s, arrival_s=arrival_s, steps=steps, step_time_s=step_time_s)


def message_seconds(costs: Sequence[StageCost]) -> list[float]:
    """What `Timetable.message` points into: sends of every stage, then its reductions after a B, and after a W."""
    return [
        *(cost.send_s for cost in costs),
        *(cost.reduce_s for cost in costs),
        *(cost.reduce_after_weight_s for cost in costs),
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
