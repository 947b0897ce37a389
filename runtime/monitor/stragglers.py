"""Ranks that are slower than their peers, and what they cost.

A rank's peers are those of its pipeline stage: they have the same work. Over a window of steps it is a straggler where the
median of its computing time is a share above the peers' median, and it was slower than that median in almost all steps: for a
rank that is not, each step is a toss of a coin, so that 40 of 50 come up in fewer than one of 10,000 windows (the binomial
tail). It stays one until it is clearly back (hysteresis), so that nobody is told twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

# Steps looked at; above and below which share over its peers' median a rank becomes and is no longer a straggler; in which
# share of the steps it must be slower than they are. Kind: choice.
WINDOW, ABOVE, BELOW, ALMOST_ALL = 50, 0.10, 0.05, 0.8
FEWEST = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that takes `share` longer than its peers, which costs the run up to `costs_s` a step."""

    rank: int
    share: float
    costs_s: float

    def __str__(self) -> str:
        return f"rank {self.rank} computes {100 * self.share:.0f} % longer than its peers, which costs up to {self.costs_s:.3g} s a step"


def communicating_s(step: Mapping[str, Any]) -> float:
    """What a recorded step communicates, outside of its passes: of the rank that waits least."""
    return float(max(step["communicating_s"]))


def stragglers(
    computing_s: Sequence[Sequence[float]], stages: Sequence[int], known: frozenset[int] = frozenset()
) -> list[Straggler]:
    """Of the last steps' computing times (by step, then rank), who is slow. `stages`: the stage of each rank; `known`:
    who was a straggler before."""
    window = [step for step in computing_s[-WINDOW:] if len(step) == len(stages)]
    if len(window) < FEWEST:
        return []
    found = []
    for rank, stage in enumerate(stages):
        peers = [r for r, s in enumerate(stages) if s == stage and r != rank]
        if not peers:
            continue
        of_peers = [median(step[r] for r in peers) for step in window]
        own, usual = median(step[rank] for step in window), median(of_peers)
        slower = sum(step[rank] > other for step, other in zip(window, of_peers, strict=True))
        limit = BELOW if rank in known else ABOVE
        if usual > 0 and own > usual * (1 + limit) and slower >= ALMOST_ALL * len(window):
            found.append(Straggler(rank=rank, share=own / usual - 1, costs_s=own - usual))
    return sorted(found, key=lambda s: -s.costs_s)
