"""Where a search begins, and in which order it looks at what differs in one key."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.planner.problem import Problem
from autoparallel.planner.search.bounds.outer import outer_of
from autoparallel.planner.search.improve.starts import WIDE, in_turns, starts, unpipelined
from autoparallel.planner.search.open import Upcoming
from autoparallel.profiles.load import load_cluster
from tests.toy_graphs import toy_transformer


def test_every_number_of_devices_is_started_from_where_time_counts() -> None:
    """With lossy methods there are thousands of variants on all devices, each of which promises more than any on a node."""
    cluster = load_cluster("a100-sxm-80gb:32x8")
    problem = Problem(
        graph=toy_transformer(layers=8, hidden=2048), cluster=cluster, global_batch=256, allow_lossy=True
    )
    outer = outer_of(problem)
    assert outer is not None
    upcoming = Upcoming(outer=outer)
    upcoming.begin(None)
    counts = {int(n) for n in np.unique(outer.space.shapes.devices)}
    assert counts == {8, 256}
    alone, _ = unpipelined(upcoming, None, WIDE)
    assert {chosen.mesh.devices for chosen, _ in alone} == counts
    promises, _, _ = starts(upcoming, None, None, WIDE)
    first = [promised[0][0].mesh.devices for promised in promises[: len(counts)]]
    assert sorted(first) == sorted(counts), "one of each before any other"


@given(st.lists(st.integers(0, 4), max_size=40))
def test_groups_take_turns(groups: list[int]) -> None:
    rows = np.arange(len(groups)) * 3
    found = (in_turns(np.array(groups, dtype=np.int64), rows) // 3).tolist()
    assert sorted(found) == list(range(len(groups)))
    turn = {at: groups[:at].count(groups[at]) for at in found}
    assert found == sorted(found, key=lambda at: (turn[at], at))
