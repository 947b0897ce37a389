"""Longest paths through a pipeline schedule: how long it takes for given stage times, and which of them count.

Computations and their order make a directed graph: an action waits for the one before it on its rank, a forward
for the forward of the stage before (and its hop), a backward for the backward of the stage after. Every path is
a lower bound on the step for *all* stage times, linear in them: that is what the stage problem's cuts are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoparallel.costmodel.program import Action, ActionKind

KINDS = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
_CODE = {kind: i for i, kind in enumerate(KINDS)}
Times = Sequence[Sequence[float]]  # [kind][stage], seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Dag:
    """Actions in an order that respects every dependency; -1 where there is none."""

    kind: tuple[int, ...]
    stage: tuple[int, ...]
    before: tuple[int, ...]  # the action before it on its rank
    source: tuple[int, ...]  # the action that makes its input
    crosses: tuple[bool, ...]  # the input comes from another rank
    last: tuple[int, ...]  # the last action of each rank
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """How often each (kind, stage) and each hop after a stage stands on one path that ends on `rank`."""

    rank: int
    counts: tuple[tuple[int, ...], ...]  # [kind][stage]
    forward_hops: tuple[int, ...]  # hops of activations out of stage s
    backward_hops: tuple[int, ...]  # hops of gradients out of stage s


def build_dag(order: Sequence[Sequence[Action]], stages: int) -> Dag:
    """The dependency graph of a compute order (only F, B, I and W)."""
    seat: dict[tuple[int, int, int | None], tuple[int, int]] = {}
    homes = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    at, done = [0] * len(order), [-1] * len(order)
    rows: list[tuple[int, int, int, int, bool]] = []
    waiting = True
    while waiting:
        waiting = False
        for rank, actions in enumerate(order):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                need = _needs(action, stages)
                if need is not None and need not in seat:
                    break
                source, home = seat[need] if need is not None else (-1, rank)
                code = _CODE[action.kind]
                rows.append((code, action.stage, done[rank], source, home != rank))
                done[rank] = len(rows) - 1
                produced = 1 if code in (1, 2) else code
                seat[produced, action.stage, action.micro] = (done[rank], homes[action.stage])
                at[rank] += 1
                waiting = True
    assert all(a == len(actions) for a, actions in zip(at, order, strict=True)), "the order deadlocks"
    kind, stage, before, source_of, crosses = zip(*rows, strict=True)
    return Dag(
        kind=kind, stage=stage, before=before, source=source_of, crosses=crosses, last=tuple(done), stages=stages
    )  # fmt: skip


def _needs(action: Action, stages: int) -> tuple[int, int, int | None] | None:
    """(kind, stage, micro-batch) of the action whose output this one needs from another stage, if any."""
    code = _CODE[action.kind]
    if code == 0:
        return (0, action.stage - 1, action.micro) if action.stage else None
    if code == 3:
        return None
    return (1, action.stage + 1, action.micro) if action.stage < stages - 1 else None


def finish_times(
    dag: Dag, times: Times, forward_hop: Sequence[float], backward_hop: Sequence[float]
) -> list[float]:
    """When each action ends at the earliest, in the order of the graph."""
    end: list[float] = []
    for kind, stage, before, source, crosses in zip(
        dag.kind, dag.stage, dag.before, dag.source, dag.crosses, strict=True
    ):
        start = end[before] if before >= 0 else 0.0
        if source >= 0:
            arrival = end[source]
            if crosses:
                arrival += forward_hop[stage - 1] if kind == 0 else backward_hop[stage + 1]
            if arrival > start:
                start = arrival
        end.append(start + times[kind][stage])
    return end


def longest_path(
    dag: Dag,
    times: Times,
    forward_hop: Sequence[float],
    backward_hop: Sequence[float],
    tails: Sequence[float],
) -> tuple[float, Path]:
    """The latest end of any rank, `tails[rank]` seconds after its last action, and the path that decides it."""
    end = finish_times(dag, times, forward_hop, backward_hop)
    rank = max(range(len(dag.last)), key=lambda r: end[dag.last[r]] + tails[r])
    counts = [[0] * dag.stages for _ in KINDS]
    hops = [[0] * dag.stages, [0] * dag.stages]
    at = dag.last[rank]
    while at >= 0:
        kind, stage, source = dag.kind[at], dag.stage[at], dag.source[at]
        counts[kind][stage] += 1
        before = dag.before[at]
        start = end[before] if before >= 0 else 0.0
        if source >= 0:
            sender = stage - 1 if kind == 0 else stage + 1
            delay = (forward_hop if kind == 0 else backward_hop)[sender] if dag.crosses[at] else 0.0
            if end[source] + delay > start:
                hops[0 if kind == 0 else 1][sender] += dag.crosses[at]
                at = source
                continue
        at = before
    path = Path(
        rank=rank, counts=tuple(map(tuple, counts)), forward_hops=tuple(hops[0]), backward_hops=tuple(hops[1])
    )
    return end[dag.last[rank]] + tails[rank], path


def path_length(
    path: Path,
    times: Times,
    forward_hop: Sequence[float],
    backward_hop: Sequence[float],
    tails: Sequence[float],
) -> float:
    """Seconds along a path: a lower bound on the step for any stage times."""
    work = sum(
        n * t
        for row, line in zip(path.counts, times, strict=True)
        for n, t in zip(row, line, strict=True)
        if n
    )
    there = sum(n * t for n, t in zip(path.forward_hops, forward_hop, strict=True))
    back = sum(n * t for n, t in zip(path.backward_hops, backward_hop, strict=True))
    return work + there + back + tails[path.rank]
