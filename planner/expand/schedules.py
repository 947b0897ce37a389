"""Pipeline schedules as grids of actions: a compute order per rank, then passes that complete it.

The orders are those of `torch.distributed.pipelining` for the same schedule, so that what is priced is what
runs. `build_schedule` = compute order -> sends and receives -> gradient reduction -> optimizer step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from autoparallel.costmodel.collecting import without_collection
from autoparallel.costmodel.program import Action, ActionKind
from autoparallel.errors import UserError
from autoparallel.planner.expand.schedule_orders import (
    dualpipev_order,
    gpipe_order,
    one_forward_one_backward_order,
    zbv_order,
)

K = ActionKind
Schedule = tuple[tuple[Action, ...], ...]
V_SHAPED = frozenset({"zbv", "dualpipev"})  # schedules whose first rank holds both ends of the model
_LOOPED = frozenset({"interleaved-1f1b", "zb1p"})
BUILT_SCHEDULES = ("none", "gpipe", "1f1b", "interleaved-1f1b", "zb1p", "zbv", "dualpipev")
SPLIT_BACKWARD = frozenset({"zb1p", "zbv", "dualpipev"})  # schedules with I and W
SOME_WHOLE = frozenset({"dualpipev"})  # of these the ones with B, too


class ScheduleError(UserError):
    """A schedule that does not exist for these numbers of ranks, virtual stages and micro-batches."""


def schedule_problem(name: str, ranks: int, virtual_stages: int, micro_batches: int) -> str | None:
    """Why the combination is illegal, in words; None when it is legal.

    The rules are those of torch's runtime, except that 1f1b also takes fewer micro-batches than stages.
    """
    if name not in BUILT_SCHEDULES:
        return f"schedule {name!r} is not one of {', '.join(BUILT_SCHEDULES)}"
    if micro_batches < 1 or ranks < 1 or virtual_stages < 1:
        return "ranks, virtual stages and micro-batches must be at least 1"
    if name == "none" and ranks > 1:
        return f"schedule none needs pp = 1, not {ranks}; try 1f1b"
    if name not in ("none", "1f1b", "gpipe") and ranks == 1:
        return f"schedule {name} needs at least two pipeline ranks; with pp = 1 use none"
    if name in V_SHAPED and virtual_stages != 2:
        return f"schedule {name} needs virtual_stages = 2, not {virtual_stages}"
    if name == "interleaved-1f1b" and virtual_stages < 2:
        return "schedule interleaved-1f1b needs virtual_stages of at least 2; with 1 use 1f1b"
    if name not in V_SHAPED | _LOOPED and virtual_stages != 1:
        return f"schedule {name} needs virtual_stages = 1, not {virtual_stages}; try interleaved-1f1b"
    rounds = max(1, micro_batches // ranks)
    if name in _LOOPED and micro_batches % rounds:
        return f"schedule {name} needs micro-batches ({micro_batches}) divisible by its {rounds} rounds of {ranks} ranks"
    if name == "dualpipev" and micro_batches < 2 * ranks:
        return f"schedule dualpipev needs at least {2 * ranks} micro-batches on {ranks} ranks, not {micro_batches}"
    return None


def rank_of_stage(name: str, ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """Pipeline rank of each stage: around the ranks again and again, or down and up again (V) for zbv, dualpipev."""
    stages = ranks * virtual_stages
    if name in V_SHAPED:
        return tuple(stage if stage < ranks else stages - 1 - stage for stage in range(stages))
    return tuple(stage % ranks for stage in range(stages))


@without_collection()
def build_schedule(name: str, ranks: int, virtual_stages: int, micro_batches: int) -> Schedule:
    """The complete actions of every rank; raises `ScheduleError` for an illegal combination."""
    problem = schedule_problem(name, ranks, virtual_stages, micro_batches)
    if problem is not None:
        raise ScheduleError(f"pipeline.schedule: {problem}")
    schedule = compute_order(name, ranks, virtual_stages, micro_batches)
    schedule = add_reduce_grad(schedule)
    schedule = add_sends_and_receives(schedule, rank_of_stage(name, ranks, virtual_stages))
    return add_step(schedule)


@without_collection()
def compute_order(name: str, ranks: int, virtual_stages: int, micro_batches: int) -> Schedule:
    """Only F, B, I and W of a legal combination, in the order in which each rank computes them."""
    looped = partial(
        one_forward_one_backward_order,
        ranks=ranks,
        virtual_stages=virtual_stages,
        micro_batches=micro_batches,
    )
    orders: dict[str, Callable[[int], list[Action]]] = {
        "none": partial(looped, warmup_per_hop=1, split=False),
        "gpipe": lambda rank: gpipe_order(rank, micro_batches),
        "1f1b": partial(looped, warmup_per_hop=1, split=False),
        "interleaved-1f1b": partial(looped, warmup_per_hop=2, split=False),
        "zb1p": partial(looped, warmup_per_hop=1, split=True),
        "zbv": lambda rank: zbv_order(rank, ranks, micro_batches),
        "dualpipev": lambda rank: dualpipev_order(rank, ranks, micro_batches),
    }
    return tuple(tuple(orders[name](rank)) for rank in range(ranks))


def add_reduce_grad(schedule: Schedule) -> Schedule:
    """REDUCE_GRAD of a stage after the last B or W of its micro-batches."""
    result = []
    for actions in schedule:
        left = Counter(action.stage for action in actions if action.kind in (K.BACKWARD, K.BACKWARD_WEIGHT))
        row: list[Action] = []
        for action in actions:
            row.append(action)
            if action.kind in (K.BACKWARD, K.BACKWARD_WEIGHT):
                left[action.stage] -= 1
                if not left[action.stage]:
                    row.append(Action(action.stage, K.REDUCE_GRAD))
        result.append(tuple(row))
    return tuple(result)


def add_sends_and_receives(schedule: Schedule, homes: Sequence[int]) -> Schedule:
    """Sends right after the computation; the sender places the receive on its peer, which no order can deadlock.

    The ranks take turns, one action each. Raises `ScheduleError` when the compute order cannot be completed.
    """
    placed: list[list[Action]] = [[] for _ in schedule]
    # (stage, micro-batch) whose input is there; the first stage needs no activation, the last no gradient.
    arrived = {K.FORWARD: set[tuple[int, int | None]](), K.BACKWARD: set[tuple[int, int | None]]()}
    arrived[K.BACKWARD_INPUT] = arrived[K.BACKWARD]
    starts = {K.FORWARD: 0, K.BACKWARD: len(homes) - 1, K.BACKWARD_INPUT: len(homes) - 1}
    at = [0] * len(schedule)
    active = [rank for rank, actions in enumerate(schedule) if actions]
    while active:
        progress = False
        for rank in active:
            action = schedule[rank][at[rank]]
            kind, stage = action.kind, action.stage
            first = starts.get(kind, stage)
            if stage != first and (stage, action.micro) not in arrived[kind]:
                continue
            progress = True
            at[rank] += 1
            placed[rank].append(action)
            if kind in arrived:
                _hand_on(action, homes, placed, arrived[kind])
        if not progress:
            waiting = ", ".join(f"rank {rank} at {schedule[rank][at[rank]]}" for rank in active)
            raise ScheduleError(f"the compute order cannot be completed with sends and receives: {waiting}")
        active = [rank for rank in active if at[rank] < len(schedule[rank])]
    return tuple(tuple(actions) for actions in placed)


def _hand_on(
    action: Action, homes: Sequence[int], placed: list[list[Action]], arrived: set[tuple[int, int | None]]
) -> None:
    """The output of an F, B or I reaches the neighbouring stage: at once on the same rank, else by a send."""
    stage, micro = action.stage, action.micro
    forward = action.kind is K.FORWARD
    neighbour = stage + 1 if forward else stage - 1
    if not 0 <= neighbour < len(homes):
        return
    if homes[neighbour] != homes[stage]:
        placed[homes[stage]].append(Action(stage, K.SEND_F if forward else K.SEND_B, micro))
        placed[homes[neighbour]].append(Action(neighbour, K.RECV_F if forward else K.RECV_B, micro))
    arrived.add((neighbour, micro))


def add_step(schedule: Schedule) -> Schedule:
    """STEP of every stage of a rank, in model order, at its end."""
    return tuple(
        (*actions, *(Action(stage, K.STEP) for stage in sorted({action.stage for action in actions})))
        for actions in schedule
    )
