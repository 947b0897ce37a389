"""Families of variants, bounded as one: the least that any of them communicates.

A family is a shape with a level of ZeRO and a schedule with its chunks. Its variants place the axes in different orders and
compress differently, which decides what they communicate. What is near for one axis is far for another: messages between
stages inside a node mean gradients between nodes. So a family has a few *alternatives*, one for each order that is faster in
something than all others, and its bound is the least of theirs. *Alike* are shapes that differ in nothing but how many of
their replicas share state: the one with the most shards holds the least. So a family of the most sharded one, communicating as
little as any variant of any shape alike, is below all of them, and bounds of a space need no look at each of its variants.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autoparallel.planner.search.bounds.communication import RATES, Communication, CommunicationPrices
from autoparallel.planner.search.space.build import Variants
from autoparallel.planner.search.space.meshes import Bools, Floats, Ints, alike, joined
from autoparallel.planner.search.space.shapes import Shapes

ANYWHERE = -1  # as the number of where blocks communicate: all orders of the axes count
MOST_ALTERNATIVES = 4  # of a group; the last one stands for all that are left. Kind: choice
HARDLY = 0.01  # share by which an alternative must be faster in something to be one of its own. Kind: choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternatives:
    """What some variants of each group communicate at least; every variant of a group is no faster than one of its alternatives."""

    communication: Communication  # a row each, those of a group one after the other
    group: Ints  # of each row, ascending

    def of(self, groups: Ints) -> tuple[Ints, Ints]:
        """The alternatives of each of these groups, one group after the other: which of `groups` it is of, and its row."""
        first, last = (np.searchsorted(self.group, groups, side=side) for side in ("left", "right"))
        number = last - first
        at = np.repeat(np.arange(len(groups)), number)
        within = np.arange(len(at)) - np.repeat(np.cumsum(number) - number, number)
        return at, first[at] + within


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastCommunication:
    """What no variant of a family communicates faster, remembered by all that it depends on."""

    prices: CommunicationPrices
    number: Ints  # by shape: the same where the rates are
    _rates: dict[int, Floats] = field(
        default_factory=dict, repr=False
    )  # by level of ZeRO, [number, order, RATES]; not a number where it is not known, infinite where there is no such order

    @staticmethod
    def of(prices: CommunicationPrices) -> LeastCommunication:
        """The book of a space, empty."""
        shapes = prices.space.shapes
        several = (shapes.micro_batches > 1).astype(np.int64)
        _, number = alike(shapes.mesh, prices.exchanges.offloaded, several, prices.exchanges.held)
        return LeastCommunication(prices=prices, number=number)

    def price(self, shapes: Ints, zero: Ints, placed: Ints, group: Ints) -> Alternatives:
        """The alternatives of each group of shapes with their levels of ZeRO and where their blocks communicate."""
        rows, order = np.nonzero(self._there(shapes, placed))
        rates = np.empty((len(rows), len(RATES)))
        for level in np.unique(zero).tolist():
            some = zero[rows] == level
            rates[some] = self._rates_of(shapes[rows[some]], level)[np.arange(some.sum()), order[some]]
        sends_s = self.prices.messages_s(shapes[rows], order)
        found, of = least_of_each(np.concatenate([rates, sends_s], axis=1), group[rows])
        columns = dict(zip(RATES, found.T, strict=False))
        return Alternatives(
            communication=Communication(sends_s=found[:, len(RATES) :], **columns), group=of,
        )  # fmt: skip

    def _rates_of(self, shapes: Ints, zero: int) -> Floats:
        """Columns RATES of some shapes by order, the least of all compressions."""
        numbers = self.number[shapes]
        if zero not in self._rates:
            size = int(self.number.max(initial=0)) + 1
            orders = len(self.prices.space.meshes.orders)
            self._rates[zero] = np.full((size, orders, len(RATES)), np.nan)
        known = self._rates[zero]
        unknown = np.isnan(known[numbers, 0, 0])
        first, _ = alike(numbers[unknown])
        if len(first):
            owners = shapes[unknown][first]
            known[self.number[owners]] = self._made(owners, zero)
        return known[numbers]

    def _made(self, owners: Ints, zero: int) -> Floats:
        space = self.prices.space
        least = np.full((len(owners), len(space.meshes.orders), len(RATES)), np.inf)
        at, order = np.nonzero(space.meshes.placed[space.shapes.mesh[owners]])
        for compression in range(space.methods(zero)):
            found = Variants(
                shape=owners[at], order=order, zero=np.full_like(at, zero), schedule=np.zeros_like(at),
                virtual_stages=np.ones_like(at), compression=np.full_like(at, compression),
            )  # fmt: skip
            some = np.flatnonzero(space.secondary(found)) if space.copies(compression) else slice(None)
            rows = at[some], order[some]
            least[rows] = np.minimum(least[rows], self.prices.rates(found.take(some)))
        return least

    def _there(self, shapes: Ints, placed: Ints) -> Bools:
        """Which orders place the blocks of some shapes there."""
        meshes = self.prices.space.shapes.mesh[shapes]
        found = np.array(self.prices.space.meshes.placed[meshes])
        some = placed != ANYWHERE
        found[some] = self.prices.inner_of(meshes[some]) == placed[some][:, None]
        return found


def least_of_each(rows: Floats, group: Ints) -> tuple[Floats, Ints]:
    """For each group rows of which one is no larger than any row of it in any column, at most `MOST_ALTERNATIVES`; and the
    group of each. Rows that are hardly better than another in anything are taken together with it."""
    kept: list[tuple[Floats, Ints]] = []
    scale = rows.max(axis=0, initial=0.0, where=np.isfinite(rows))
    size = (rows / np.where(scale > 0, scale, 1.0)).sum(axis=1)
    order = np.lexsort((size, group))
    rows, group = rows[order], group[order]
    while len(group):
        first = np.flatnonzero(np.diff(group, prepend=-1))
        which = np.cumsum(np.diff(group, prepend=-1) != 0) - 1
        best = rows[first]
        last = len(kept) + 1 == MOST_ALTERNATIVES
        covered = (rows >= best[which] * (1 - HARDLY)).all(axis=1) | last
        least = best.copy()
        np.minimum.at(least, which[covered], rows[covered])
        kept.append((least, group[first]))
        rows, group = rows[~covered], group[~covered]
    if not kept:
        return rows, group
    found, of = (np.concatenate(parts) for parts in zip(*kept, strict=True))
    order = np.argsort(of, kind="stable")
    return found[order], of[order]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """Which shapes differ in nothing but how many of their replicas share state."""

    number: Ints  # by shape, the same where they do
    _shapes: Ints  # by number, one after the other, the most sharded ones first
    _first: Ints  # where each one's begin

    @staticmethod
    def of(shapes: Shapes, setting_of: Ints, offloaded: Ints) -> Alike:
        """Shapes by what they have in common: sizes, micro-batches, a setting, a share of the optimizer's state on the host."""
        sharded = (shapes.dp_shard > 1).astype(np.int64)  # else other levels of ZeRO are legal
        number = joined(setting_of, shapes.pp, shapes.micro_batches, offloaded, sharded)
        _, number = np.unique(number, return_inverse=True)
        number = number.reshape(-1)
        order = np.lexsort((-shapes.dp_shard, number))
        first = np.searchsorted(number[order], np.arange(int(number.max(initial=-1)) + 2))
        return Alike(number=number, _shapes=order, _first=first)

    def members(self, shapes: Ints) -> Ints:
        """All shapes that are like one of these, those that are alike together, the most sharded ones first."""
        numbers = np.unique(self.number[shapes])
        first, sizes = self._first[numbers], np.diff(self._first)[numbers]
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return np.asarray(self._shapes[np.repeat(first, sizes) + within])
