"""The shapes that a search has not expanded yet, the one with the least bound first."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autoparallel.planner.problem import NOTHING, Value
from autoparallel.planner.search.bounds.outer import Outer
from autoparallel.planner.search.bounds.runs import Values, values_of
from autoparallel.planner.search.bounds.variants import Bounds
from autoparallel.planner.search.space.meshes import Ints


def _none() -> Ints:
    return np.zeros(0, dtype=np.int64)


@dataclass(slots=True, kw_only=True)
class Upcoming:
    """Shapes of a space in the order of their bounds."""

    outer: Outer
    rows: Ints = field(default_factory=_none)
    values: Values = field(default_factory=lambda: Values(first=np.zeros(0), second=np.zeros(0)))

    @property
    def value(self) -> Value:
        """What none of them goes below."""
        return self.values.at(0) if len(self.rows) else NOTHING

    def begin(self, rows: Ints | None) -> None:
        """Take these shapes (all of them if None), those that do not fit left out."""
        bounds = self.outer.bounds
        rows = np.arange(len(bounds.time_s)) if rows is None else rows
        rows = rows[bounds.memory_bytes[rows] <= self.outer.capacity_bytes]
        devices = self.outer.space.shapes.devices[rows]
        own = Bounds(time_s=bounds.time_s[rows], memory_bytes=bounds.memory_bytes[rows])
        values = values_of(self.outer.problem, own, devices)
        order = values.order()
        self.rows, self.values = rows[order], values.take(order)

    def settle(self, rows: Ints) -> bool:
        """Price what of some shapes is only bounded, and put all in their new order; whether there was any."""
        if not self.outer.settle(rows):
            return False
        self.begin(self.rows)
        return True

    def take(self, number: int) -> Ints:
        """The first shapes, which are none of these any more."""
        taken = self.rows[:number]
        self.rows, self.values = self.rows[number:], self.values.take(slice(number, None))
        return taken

    def clear(self) -> None:
        """None of them can win."""
        self.take(len(self.rows))
