"""Families of variants, bounded as one: the least that any of them communicates.

A family is a shape with a level of ZeRO and a schedule with its chunks. Its variants place the axes in different orders and
compress differently, which decides what they communicate. *Alike* are shapes that differ in nothing but how many of their
replicas share state: the one with the most shards holds the least. So a family of the most sharded one, communicating as
little as any variant of any shape alike, is below all of them, and bounds of a space need no look at each of its variants.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autoparallel.planner.search.bounds.communication import RATES, Communication, CommunicationPrices
from autoparallel.planner.search.space.build import Shapes, Variants
from autoparallel.planner.search.space.meshes import Bools, Floats, Ints, alike, joined

ANYWHERE = -1  # as the number of where blocks communicate: all orders of the axes count


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastCommunication:
    """What no variant of a family communicates faster, remembered by all that it depends on."""

    prices: CommunicationPrices
    number: Ints  # by shape: the same where the rates are
    _rates: dict[tuple[int, int], Floats] = field(
        default_factory=dict, repr=False
    )  # by level of ZeRO and where blocks communicate, [number, RATES]; not a number where it is not known

    @staticmethod
    def of(prices: CommunicationPrices) -> LeastCommunication:
        """The book of a space, empty."""
        shapes = prices.space.shapes
        several = (shapes.micro_batches > 1).astype(np.int64)
        _, number = alike(shapes.mesh, prices.exchanges.offloaded, several, prices.exchanges.held)
        return LeastCommunication(prices=prices, number=number)

    def price(self, shapes: Ints, zero: Ints, placed: Ints, group: Ints, groups: int) -> Communication:
        """Of each of so many groups of shapes with their levels of ZeRO and where their blocks communicate; infinite where a
        group has none."""
        rates = np.empty((len(shapes), len(RATES)))
        first, which = alike(zero, placed - ANYWHERE)
        for number, row in enumerate(first.tolist()):
            some = which == number
            rates[some] = self._rates_of(shapes[some], int(zero[row]), int(placed[row]))
        least = np.full((groups, len(RATES)), np.inf)
        np.minimum.at(least, group, rates)
        first, _ = alike(group, shapes, placed - ANYWHERE)  # messages ask for no level of ZeRO
        sent = self._sends_s(shapes[first], placed[first])
        sends_s = np.full((groups, sent.shape[1]), np.inf)
        np.minimum.at(sends_s, group[first], sent)
        return Communication(sends_s=sends_s, **dict(zip(RATES, least.T, strict=True)))

    def _rates_of(self, shapes: Ints, zero: int, placed: int) -> Floats:
        """Columns RATES of some shapes, the least of all orders that place blocks there, and of all compressions."""
        numbers = self.number[shapes]
        if (zero, placed) not in self._rates:
            size = int(self.number.max(initial=0)) + 1
            self._rates[zero, placed] = np.full((size, len(RATES)), np.nan)
        known = self._rates[zero, placed]
        unknown = np.isnan(known[numbers, 0])
        first, _ = alike(numbers[unknown])
        if len(first):
            owners = shapes[unknown][first]
            known[self.number[owners]] = self._made(owners, zero, placed)
        return known[numbers]

    def _made(self, owners: Ints, zero: int, placed: int) -> Floats:
        space, least = self.prices.space, np.full((len(owners), len(RATES)), np.inf)
        at, order = np.nonzero(self._there(owners, np.full_like(owners, placed)))
        for compression in range(space.methods(zero)):
            found = Variants(
                shape=owners[at], order=order, zero=np.full_like(at, zero), schedule=np.zeros_like(at),
                virtual_stages=np.ones_like(at), compression=np.full_like(at, compression),
            )  # fmt: skip
            np.minimum.at(least, at, self.prices.rates(found))
        return least

    def _there(self, shapes: Ints, placed: Ints) -> Bools:
        """Which orders place the blocks of some shapes there."""
        meshes = self.prices.space.shapes.mesh[shapes]
        found = np.array(self.prices.space.meshes.placed[meshes])
        some = placed != ANYWHERE
        found[some] = self.prices.inner_of(meshes[some]) == placed[some][:, None]
        return found

    def _sends_s(self, shapes: Ints, placed: Ints) -> Floats:
        """The messages between neighbouring stages, the shortest ones of these orders, [shape, one of `Chain.messages`]."""
        space, (_, message) = self.prices.space, self.prices.messages
        first, which = alike(space.shapes.mesh[shapes], message[shapes], placed - ANYWHERE)
        owners = shapes[first]
        at, order = np.nonzero(self._there(owners, placed[first]))
        each = self.prices.messages_s(owners[at], order)
        least = np.full((len(owners), each.shape[1]), np.inf)
        np.minimum.at(least, at, each)
        return np.asarray(least[which])


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
