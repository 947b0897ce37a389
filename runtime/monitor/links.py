"""What the links between ranks pass: pairs of ranks send each other a message, all pairs of a round at once.

Inside a node ranks next to each other are pairs, between nodes the ranks of the same number in nodes next to each other, so that
every rank has two partners of a kind where there are three; a round is a set of pairs in which each rank has at most one. Messages
are as large as a share of the steps' time allows, and of one size once they are. They go by the backend that gradients go by.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from autoparallel.runtime.monitor.slow_links import BETWEEN, INSIDE, Pair, Passed
from autoparallel.runtime.ranks.agreement import Agreement
from autoparallel.runtime.ranks.gathers import all_gather_single

LEAST_BYTES, MOST_BYTES = 1 << 18, 1 << 26  # of a message: latency counts below, memory above. Kind: choice
SETTLED = 12  # rounds after which messages keep their size. Kind: choice


def ring_rounds(places: int) -> list[list[Pair]]:
    """Neighbours in a ring of so many places, in rounds in which each place has at most one partner."""
    pairs = [(place, place + 1) for place in range(places - 1)]
    rounds = [pairs[0::2], pairs[1::2]]
    if places > 2:
        around = (0, places - 1)
        if places % 2:
            rounds.append([around])
        else:
            rounds[1].append(around)
    return [pairs for pairs in rounds if pairs]


def link_rounds(ranks: int, per_node: int) -> dict[str, list[list[Pair]]]:
    """The rounds inside nodes, and between them, of ranks that are numbered node by node."""
    nodes = ranks // per_node
    inside = [
        [(n * per_node + a, n * per_node + b) for n in range(nodes) for a, b in pairs]
        for pairs in ring_rounds(per_node)
    ]
    between = [
        [(a * per_node + at, b * per_node + at) for at in range(per_node) for a, b in pairs]
        for pairs in ring_rounds(nodes)
    ]
    return {kind: rounds for kind, rounds in ((INSIDE, inside), (BETWEEN, between)) if rounds}


class LinkProbe:
    """Measures one round of each kind at a time."""

    def __init__(self, everyone: Agreement, per_node: int) -> None:
        self._all, self._done = everyone, 0
        self._rounds = link_rounds(everyone.ranks, per_node) if everyone.ranks % per_node == 0 else {}
        self._sizes = dict.fromkeys(self._rounds, LEAST_BYTES)
        on_device = everyone.group is not None and dist.get_backend() != dist.Backend.GLOO
        self._group = None if on_device else everyone.group
        self._device = torch.accelerator.current_accelerator() if on_device else torch.device("cpu")

    def measure(self, budget_s: float) -> list[Passed]:
        """Send the messages of the next rounds; messages grow while they take less than `budget_s` together. Collective."""
        found = list[Passed]()
        for kind, rounds in self._rounds.items():
            passed = self._round(rounds[self._done % len(rounds)], self._sizes[kind])
            slowest_s = max(one.seconds for one in passed)
            found += passed
            if self._done < SETTLED and 4 * slowest_s * len(self._rounds) <= budget_s:
                self._sizes[kind] = min(2 * self._sizes[kind], MOST_BYTES)
        self._done += 1
        return found

    def _round(self, pairs: Sequence[Pair], size: int) -> list[Passed]:
        partner = {a: b for one, other in pairs for a, b in ((one, other), (other, one))}
        own_s = self._exchange(partner[self._all.rank], size) if self._all.rank in partner else 0.0
        seconds = torch.empty(self._all.ranks, dtype=torch.float64)
        mine = torch.tensor([own_s], dtype=torch.float64)
        all_gather_single(seconds, mine, group=self._all.group)
        every: list[float] = seconds.tolist()
        return [Passed(pair=(a, b), size=size, seconds=max(every[a], every[b])) for a, b in pairs]

    def _exchange(self, partner: int, size: int) -> float:
        """Seconds from when both are there until both messages are."""
        out = torch.zeros(size, dtype=torch.uint8, device=self._device)
        into = torch.zeros_like(out)
        self._both_ways(partner, out[:1], into[:1])
        begun = time.perf_counter()
        self._both_ways(partner, out, into)
        return time.perf_counter() - begun

    def _both_ways(self, partner: int, out: torch.Tensor, into: torch.Tensor) -> None:
        sent = [
            dist.P2POp(dist.isend, out, partner, group=self._group),
            dist.P2POp(dist.irecv, into, partner, group=self._group),
        ]
        for work in dist.batch_isend_irecv(sent):
            work.wait()
        if self._device is not None and self._device.type != "cpu":
            torch.accelerator.synchronize()
