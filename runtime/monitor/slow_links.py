"""Links between ranks that pass less than others, and what they cost.

Ranks send each other messages of the monitor's own (`links.py`). A link is compared with the links of its kind, inside nodes or
between them, and with itself at the beginning of the run: it is slow where the median of its last messages takes a share longer
than nearly the best of the others, and almost every one of them did. What all slow links of a rank have in common is that rank;
of all ranks of a node, that node. It stays slow until it is clearly back (hysteresis), so that nobody is told twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

Pair = tuple[int, int]
# Messages of a link looked at; above and below which share over the others' median a link becomes and is no longer slow; which
# share of its messages must be longer than by half of that. Kind: choice.
RECENT, ABOVE, BELOW, ALMOST_ALL = 10, 0.5, 0.25, 0.8
FEWEST = 8
BETWEEN, INSIDE = "between nodes", "inside nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """A message of `size` bytes that two ranks sent each other at once, and how long that took."""

    pair: Pair
    size: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """`where`, in words, messages take `share` longer than they should, which costs the run up to `costs_s` a step: what the
    step communicates would take so much less. `ranks`: those at the slow end; two where either may be it."""

    where: str
    ranks: tuple[int, ...]
    bytes_per_s: float
    usual_bytes_per_s: float
    costs_s: float

    @property
    def share(self) -> float:
        return self.usual_bytes_per_s / self.bytes_per_s - 1

    def __str__(self) -> str:
        return (
            f"{self.where} {rate_text(self.bytes_per_s)} pass where {rate_text(self.usual_bytes_per_s)} should, "
            f"which costs up to {self.costs_s:.3g} s a step"
        )


@dataclass(slots=True)
class _Link:
    """The first and the last messages of a link, seconds, all of one size."""

    size: int = 0
    first: list[float] = field(default_factory=list)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, passed: Passed) -> None:
        if passed.size != self.size:
            self.size, self.first = passed.size, []
            self.last.clear()
        if len(self.first) < FEWEST:
            self.first.append(passed.seconds)
        self.last.append(passed.seconds)

    @property
    def known(self) -> bool:
        return len(self.last) >= FEWEST

    def longer(self, usual_s: float, share: float) -> bool:
        """Whether messages take a share longer than usual, almost all of them by half of it."""
        late = sum(seconds > usual_s * (1 + share / 2) for seconds in self.last)
        return median(self.last) > usual_s * (1 + share) and late >= ALMOST_ALL * len(self.last)


class LinkHistory:
    """What the links of a run passed. `per_node`: ranks of a node, numbered node by node."""

    def __init__(self, per_node: int) -> None:
        self._per_node = per_node
        self._links: dict[Pair, _Link] = {}
        self._slow: frozenset[Pair] = frozenset()

    def add(self, passed: Iterable[Passed]) -> None:
        """Messages that were sent now."""
        for one in passed:
            self._links.setdefault(one.pair, _Link()).add(one)

    def kind(self, pair: Pair) -> str:
        """Inside nodes, or between them."""
        one, other = (rank // self._per_node for rank in pair)
        return INSIDE if one == other else BETWEEN

    def rates(self) -> dict[str, float]:
        """Bytes per second each way of the middle link of each kind."""
        found: dict[str, list[float]] = {}
        for pair, link in self._links.items():
            found.setdefault(self.kind(pair), []).append(link.size / median(link.last))
        return {kind: median(rates) for kind, rates in sorted(found.items())}

    def slow(self, communicating_s: float) -> list[SlowLink]:
        """What is slow now, what costs most first; a step communicates for `communicating_s`."""
        usual = self._usual_s()
        limits = {pair: BELOW if pair in self._slow else ABOVE for pair in usual}
        found = {p: s for p, s in usual.items() if self._links[p].longer(s, limits[p])}
        self._slow = frozenset(found)
        ends = [self._slow_link(*end, found, communicating_s) for end in self._ends(found)]
        return sorted(ends, key=lambda link: -link.costs_s)

    def _known(self) -> dict[str, dict[Pair, float]]:
        """Seconds that a message of each kind of link takes, of those with enough of them."""
        found: dict[str, dict[Pair, float]] = {BETWEEN: {}, INSIDE: {}}
        for pair, link in self._links.items():
            if link.known:
                found[self.kind(pair)][pair] = median(link.last)
        return found

    def _usual_s(self) -> dict[Pair, float]:
        """Seconds of a message over each link: nearly the best of the other links of its kind, where there are two, or of its
        own first ones."""
        found = {}
        for known in self._known().values():
            rates = {pair: seconds / self._links[pair].size for pair, seconds in known.items()}
            every = sorted(rates.values())
            nearly = max(len(every) - 2, 0) // 4  # of the others
            for pair, rate in rates.items():
                link = self._links[pair]
                found[pair] = median(link.first)
                if len(every) > 2:
                    others = every[nearly] if every[nearly] < rate else every[nearly + 1]
                    found[pair] = min(found[pair], others * link.size)
        return found

    def _ends(self, slow: Mapping[Pair, float]) -> list[tuple[str, tuple[int, ...], list[Pair]]]:
        """Slow links by what they have in common, in words and as ranks: all links of their kind, a node, a rank, or nothing."""
        found, left = list[tuple[str, tuple[int, ...], list[Pair]]](), dict.fromkeys(slow)
        for kind, known in self._known().items() if slow else ():
            # Links inside a node do not tell of the node as a whole.
            together = self._per_node if kind == BETWEEN else 1
            for ranks, pairs in [((), list(known)), *self._at(known, together), *self._at(known, 1)]:
                if len(pairs) > 1 and all(pair in left for pair in pairs):
                    name = (
                        f"node {ranks[0] // together}" if len(ranks) > 1 else "".join(map(self._name, ranks))
                    )
                    found.append((f"{kind}, at {name}," if ranks else f"everywhere {kind}", ranks, pairs))
                    left = {pair: None for pair in left if pair not in pairs}
        return [
            *found,
            *((f"between {self._name(a)} and {self._name(b)}", (a, b), [(a, b)]) for a, b in left),
        ]

    def _at(self, pairs: Iterable[Pair], together: int) -> list[tuple[tuple[int, ...], list[Pair]]]:
        """The links of each rank, or of each node of so many ranks `together`, with these ranks."""
        found: dict[int, dict[Pair, None]] = {}
        for pair in pairs:
            for rank in pair:
                found.setdefault(rank // together, {})[pair] = None
        return [
            (tuple(range(at * together, (at + 1) * together)), list(own)) for at, own in sorted(found.items())
        ]

    def _name(self, rank: int) -> str:
        return f"rank {rank} (node {rank // self._per_node})"

    def _slow_link(
        self,
        where: str,
        ranks: tuple[int, ...],
        pairs: Sequence[Pair],
        usual: Mapping[Pair, float],
        communicating_s: float,
    ) -> SlowLink:
        worst = max(pairs, key=lambda pair: median(self._links[pair].last) / usual[pair])
        link, usual_s = self._links[worst], usual[worst]
        taken_s = median(link.last)
        return SlowLink(
            where=where, ranks=ranks or tuple(sorted({rank for pair in pairs for rank in pair})),
            bytes_per_s=link.size / taken_s, usual_bytes_per_s=link.size / usual_s,
            costs_s=communicating_s * (1 - usual_s / taken_s),
        )  # fmt: skip


def rate_text(bytes_per_s: float) -> str:
    """`1.2 GB/s`."""
    for unit, name in ((1e9, "GB/s"), (1e6, "MB/s")):
        if bytes_per_s >= unit:
            return f"{bytes_per_s / unit:.3g} {name}"
    return f"{bytes_per_s / 1e3:.3g} kB/s"
