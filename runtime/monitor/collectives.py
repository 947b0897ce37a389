"""What the collectives of a step took, by kind and level of the network, on this rank and over all ranks.

A collective is under way from when a rank begins it until it is there. Seconds are those during which at least one of a group's
collectives of a kind is under way: several at once share the links. Who comes first waits for the others, so that of a
group's ranks the least counts; where they take turns in being late that is still too much, and the bandwidth too little. Bytes are
those that a rank sends by a ring, so that bandwidths are those of ports. Where nobody knows when one ended
there are bytes alone: messages to another stage, for which nobody waits, and all that an accelerator sends, by the clock of the host.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from autoparallel.costmodel.program import CollectiveOp
from autoparallel.costmodel.step_collectives import CollectiveCost, sent_by_rank
from autoparallel.runtime.collectives_private import Ear, Sent, hooked
from autoparallel.runtime.monitor.slow_links import BETWEEN, INSIDE
from autoparallel.runtime.ranks.agreement import AGREEMENT, Agreement

# Smaller ones are not counted: losses, norms, flags. Kind: choice.
LEAST_BYTES = 65
# What counting one takes, seconds, and which share of a step it may take: else one step in so many is counted. Kind: measured (two
# busy cores), choice.
HOOK_S, SHARE = 2e-5, 0.005

Levels = Sequence[tuple[str, int]]  # name, and ranks below one port, innermost first
_Key = tuple[str, tuple[int, ...]]  # kind, and who takes part


def host_levels(ranks: int, per_node: int) -> Levels:
    """Levels where no cluster is known."""
    return ((INSIDE, per_node), (BETWEEN, ranks))


def level_of(members: Sequence[int], levels: Levels) -> str:
    """The outermost level that a group crosses."""
    for name, size in levels:
        if len({rank // size for rank in members}) == 1:
            return name
    return levels[-1][0]


@dataclass(slots=True)
class _Sum:
    """Of one kind and group, of this rank's step."""

    count: int = 0
    sent_bytes: float = 0.0
    seconds: float = 0.0


class Meter:
    """Hears of what this rank sends between `begin` and `end`, inside of `around`."""

    def __init__(self) -> None:
        self._ear, self._sent = Ear(), list[Sent]()
        self._known: dict[int, tuple[object, tuple[int, ...]]] = {}

    @contextmanager
    def around(self) -> Iterator[None]:
        """The steps of a run."""
        with hooked(self._ear):
            yield

    def begin(self) -> None:
        """A step begins that is counted."""
        self._sent = []
        self._ear.hear = self._sent.append

    def end(self) -> dict[_Key, _Sum]:
        """What was sent since, by kind and group; nothing where the step is not counted."""
        sent, self._sent = self._sent, []
        self._ear.hear = None
        self._ear.forget()
        by_key: dict[_Key, list[Sent]] = {}
        for one in sent:
            if one.size_bytes >= LEAST_BYTES and len(members := self._members(one)) > 1:
                by_key.setdefault((one.op, members), []).append(one)
        return {key: _summed(found, len(key[1])) for key, found in by_key.items()}

    def _members(self, sent: Sent) -> tuple[int, ...]:
        """The ranks of its group; none of groups by which ranks agree, whose messages are not the model's, and of those that are
        not torch's own: replicas that may drop out have no ranks."""
        known = self._known.get(id(sent.group))
        if known is None or known[0] is not sent.group:
            group, ranks = sent.group_now(), tuple[int, ...]()
            with contextlib.suppress(KeyError):
                ranks = () if group.group_desc == AGREEMENT else tuple(dist.get_process_group_ranks(group))
            known = self._known[id(sent.group)] = sent.group, ranks
        return known[1]


def _summed(sent: Sequence[Sent], ranks: int) -> _Sum:
    """Those of which nobody knows the end are taken to be as fast as the others, where these are a half of the bytes."""
    size_bytes = sum(one.size_bytes for one in sent)
    known = sum(one.size_bytes for one in sent if one.ended_s is not None)
    seconds = under_way_s([(one.begun_s, one.ended_s) for one in sent if one.ended_s is not None])
    return _Sum(
        count=len(sent),
        sent_bytes=sent_by_rank(CollectiveOp(sent[0].op), size_bytes, ranks),
        seconds=seconds * size_bytes / known if known >= size_bytes / 2 else math.nan,
    )


def under_way_s(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds during which at least one of the spans (begin, end) lasts."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return total


class CollectiveTable:
    """What all ranks tell each other of a step's collectives, as numbers beside the step's others.

    The numbers are `[collectives, 0 or 1: other kinds or groups than the last time, then (count, bytes, seconds) of each kind and group]`;
    which these are each rank tells the others once, when they change.
    """

    def __init__(self, everyone: Agreement, levels: Levels) -> None:
        self._all, self._levels, self._every = everyone, levels, 1
        self._keys: list[list[_Key]] = [[] for _ in range(everyone.ranks)]
        self._own: dict[_Key, _Sum] = {}

    def counts(self, recorded: int) -> bool:
        """Whether the collectives of the so-manieth recorded step are counted: as many as cost no more than `SHARE` of the steps."""
        return recorded % self._every == 0

    @property
    def _width(self) -> int:
        return max(map(len, self._keys))

    def numbers(self, own: Mapping[_Key, _Sum]) -> list[float]:
        """This rank's."""
        self._own = dict(own)
        known = self._keys[self._all.rank]
        found = [float(sum(one.count for one in own.values())), float(any(key not in known for key in own))]
        for key in known:
            one = own.get(key, _Sum())
            found += [float(one.count), one.sent_bytes, one.seconds]
        return found + [0.0] * (3 * (self._width - len(known)))

    def costs(self, rows: Sequence[Sequence[float]], step_s: float, *, counted: bool) -> list[CollectiveCost]:
        """Of all ranks' numbers what each kind took at each level, of the rank that spent longest on it. Collective where one has
        others than before, which begins anew: nothing is said of that step."""
        if counted and step_s > 0:
            self._every = max(math.ceil(max(row[0] for row in rows) * HOOK_S / (SHARE * step_s)), 1)
        if any(row[1] for row in rows):
            self._keys = self._all.gathered(sorted({*self._keys[self._all.rank], *self._own}))
            return []
        if not counted or self._all.rank:
            return []
        return self._costs([row[2:] for row in rows])

    def _costs(self, rows: Sequence[Sequence[float]]) -> list[CollectiveCost]:
        sums = [
            {
                key: _Sum(count=int(row[3 * n]), sent_bytes=row[3 * n + 1], seconds=row[3 * n + 2])
                for n, key in enumerate(keys)
            }
            for keys, row in zip(self._keys, rows, strict=True)
        ]
        least: dict[_Key, float] = {}
        for own in sums:
            for key, one in own.items():
                if one.count:
                    so_far = least.get(key, math.inf)
                    least[key] = one.seconds if one.seconds < so_far or math.isnan(one.seconds) else so_far
        longest: dict[tuple[str, str], CollectiveCost] = {}
        for own in sums:
            for cost in self._by_level(own, least):
                place = cost.op, cost.level
                if place not in longest or not cost.seconds <= longest[place].seconds:
                    longest[place] = cost
        return [longest[key] for key in sorted(longest)]

    def _by_level(self, own: Mapping[_Key, _Sum], least: Mapping[_Key, float]) -> list[CollectiveCost]:
        found: dict[tuple[str, str], CollectiveCost] = {}
        for (op, members), one in own.items():
            if not one.count:
                continue
            key = op, level_of(members, self._levels)
            before = found.get(key) or CollectiveCost(
                op=op, level=key[1], count=0, sent_bytes=0.0, seconds=0.0
            )
            found[key] = CollectiveCost(
                op=op, level=key[1], count=before.count + one.count, sent_bytes=before.sent_bytes + one.sent_bytes,
                seconds=before.seconds + least[op, members],
            )  # fmt: skip
        return list(found.values())
