"""Slow links: named where they are, and nothing else is."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from itertools import combinations

import pytest

from autoparallel.runtime.monitor.links import link_rounds, ring_rounds
from autoparallel.runtime.monitor.slow_links import FEWEST, RECENT, LinkHistory, Pair, Passed, SlowLink

SIZE = 1 << 20


def _history(
    ranks: int, per_node: int, slow: Collection[Pair], factor: float, noise: float, seed: int, calm: int = 0
) -> list[SlowLink]:
    """What is told after `calm` rounds without, and enough with links that are slower by a factor; log-normal noise."""
    draw, history, found = random.Random(seed), LinkHistory(per_node), list[SlowLink]()
    every = [pair for rounds in link_rounds(ranks, per_node).values() for pairs in rounds for pair in pairs]
    for number in range(calm + RECENT):
        late = slow if number >= calm else ()
        seconds = {p: math.exp(draw.gauss(0.0, noise)) * (factor if p in late else 1.0) for p in every}
        history.add(Passed(pair=p, size=SIZE, seconds=s) for p, s in seconds.items())
        found = history.slow(communicating_s=0.5)
    return found


def _of(rank: int, ranks: int, per_node: int) -> list[Pair]:
    return [
        p for rounds in link_rounds(ranks, per_node).values() for pairs in rounds for p in pairs if rank in p
    ]


@pytest.mark.parametrize("places", [1, 2, 3, 4, 5, 8, 9])
def test_a_ring_is_measured_in_rounds_of_pairs(places: int) -> None:
    rounds = ring_rounds(places)
    for pairs in rounds:
        assert len({place for pair in pairs for place in pair}) == 2 * len(pairs), (
            "at most one partner a round"
        )
    found = sorted(pair for pairs in rounds for pair in pairs)
    ring = {tuple(sorted((place, (place + 1) % places))) for place in range(places)} if places > 1 else set()
    assert found == sorted(ring)


def test_ranks_are_paired_inside_nodes_and_between_them() -> None:
    for rounds, apart in zip(link_rounds(12, 4).values(), (False, True), strict=True):
        for a, b in (pair for pairs in rounds for pair in pairs):
            assert (a // 4 != b // 4) == apart
            assert not apart or a % 4 == b % 4


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.2])
def test_a_slow_link_is_named_and_nothing_else(noise: float) -> None:
    alarms = sum(bool(_history(6, 1, (), 1.0, noise, seed, calm=seed % 20)) for seed in range(400))
    assert alarms < 4, "less than 1 % false alarms"
    factor = 1.6 + 3 * noise
    named = [_history(6, 1, _of(2, 6, 1), factor, noise, seed) for seed in range(300)]
    right = [found for found in named if [one.ranks for one in found] == [(2,)]]
    assert len(right) >= 297, "99 % of those that are slower by more than half, and by more than the noise"
    between = [_history(6, 1, [(2, 3)], factor, noise, seed) for seed in range(300)]
    assert sum([one.ranks for one in found] == [(2, 3)] for found in between) >= 297


def test_what_slow_links_have_in_common_is_named() -> None:
    node = [pair for rank in (4, 5) for pair in _of(rank, 8, 2) if pair[0] // 2 != pair[1] // 2]
    (one,) = _history(8, 2, node, 3.0, 0.0, 0)
    assert one.ranks == (4, 5)
    assert str(one) == (
        "between nodes, at node 2, 350 kB/s pass where 1.05 MB/s should, which costs up to 0.333 s a step"
    )
    (one,) = _history(8, 2, [p for p in node if 4 in p], 3.0, 0.0, 0)
    assert "at rank 4 (node 2)" in str(one)
    (one,) = _history(8, 2, [(4, 5)], 3.0, 0.0, 0, calm=FEWEST)
    assert "between rank 4 (node 2) and rank 5 (node 2)" in str(one)


def test_where_there_is_nothing_to_compare_with_a_link_is_compared_with_its_beginning() -> None:
    assert _history(2, 1, [(0, 1)], 3.0, 0.05, 0) == []
    (one,) = _history(2, 1, [(0, 1)], 3.0, 0.05, 0, calm=FEWEST)
    assert one.ranks == (0, 1)
    assert one.share == pytest.approx(2.0, rel=0.1)
    every = [pair for pairs in ring_rounds(4) for pair in pairs]
    (one,) = _history(4, 1, every, 3.0, 0.05, 0, calm=FEWEST)
    assert str(one).startswith("everywhere between nodes")


def test_a_link_is_slow_until_it_is_clearly_back() -> None:
    history = LinkHistory(1)

    def told(factor: float) -> list[SlowLink]:
        for _ in range(RECENT):
            history.add(
                Passed(pair=p, size=SIZE, seconds=factor if p == (0, 1) else 1.0)
                for p in combinations(range(3), 2)
            )
            found = history.slow(1.0)
        return found

    assert [bool(told(factor)) for factor in (1.4, 1.6, 1.4, 1.2, 1.4)] == [False, True, True, False, False]


def test_other_sizes_of_messages_are_not_compared() -> None:
    history = LinkHistory(1)
    for size, seconds in ((SIZE, 1.0), (2 * SIZE, 2.0)):
        for _ in range(FEWEST + 2):
            history.add([Passed(pair=(0, 1), size=size, seconds=seconds)])
    assert history.slow(1.0) == []
    assert history.rates() == {"between nodes": float(SIZE)}
