"""Micro-batches in flight, in closed form, are what the schedules' own actions hold when a rank's first backward comes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from autoparallel.costmodel.program import ActionKind
from autoparallel.planner.expand.schedules import build_schedule, schedule_problem
from autoparallel.planner.search.bounds.flight import deferred_weights, in_flight, most_on_their_way
from autoparallel.planner.search.space.build import SCHEDULES

CASES = [
    (name, ranks, chunks, micro)
    for name in SCHEDULES[1:]
    for ranks in (2, 3, 4)
    for chunks in (1, 2, 3)
    for micro in (1, 2, 4, 6, 8, 12)
    if schedule_problem(name, ranks, chunks, micro) is None
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_more_is_said_to_be_in_flight_than_a_rank_ever_holds(case: tuple[str, int, int, int]) -> None:
    name, ranks, chunks, micro = case
    for rank, actions in enumerate(build_schedule(*case)):
        one = np.array([1])
        scheduled = SCHEDULES.index(name) * one, chunks * one, micro * one, np.array([[rank]]), ranks
        said, waiting = in_flight(*scheduled), int(np.ravel(deferred_weights(*scheduled))[0])
        held, split, last = Counter[int](), Counter[int](), rank + ranks * (chunks - 1)
        fullest: list[tuple[list[int], int, int]] = []  # in flight by chunk, and of the last one; its weights
        for action in actions:
            if action.kind is ActionKind.FORWARD:
                held[action.stage] += 1
                fullest.append((sorted(held.values()), held[last], split[last]))
            elif action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
                held[action.stage] -= 1
            split[action.stage] += action.kind is ActionKind.BACKWARD_INPUT
            split[action.stage] -= action.kind is ActionKind.BACKWARD_WEIGHT
        moments = [m for m in fullest if len(m[0]) == chunks or chunks == 1]
        least, most, total = (int(np.ravel(x)[0]) for x in (said.least, said.most, said.all))
        assert any(
            m[0] >= least
            and m[-1] >= most
            and sum(m) >= total
            and own >= least * (waiting > 0)
            and w >= waiting
            for m, own, w in moments or [([0], 0, 0)]
        ), (rank, least, most, total, waiting, fullest[-3:])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_more_are_on_their_way_through_all_stages_than_is_said(case: tuple[str, int, int, int]) -> None:
    name, ranks, chunks, micro = case
    on_their_way = fullest = 0
    for action in build_schedule(*case)[0]:
        if action.stage == 0:
            on_their_way += action.kind is ActionKind.FORWARD
            fullest = max(fullest, on_their_way)
            on_their_way -= action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
    said = most_on_their_way(*(np.array([x]) for x in (SCHEDULES.index(name), chunks, micro, ranks)))
    assert fullest <= int(said[0]) <= max(fullest * 1.5, fullest + 1)
