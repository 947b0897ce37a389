"""Variants in the order of their bounds, and how much is known of each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from autoparallel.planner.problem import Objective, Problem, Value
from autoparallel.planner.search.bounds.tables import added_up, setting_columns
from autoparallel.planner.search.bounds.variants import Bounds
from autoparallel.planner.search.space.build import Shapes, Variants
from autoparallel.planner.search.space.meshes import Bools, Floats, Ints


class Known(IntEnum):
    """What bounds take into account: each is no lower than the one before."""

    WHOLE = 0  # the model as a whole (`bounds.quick_bounds`)
    RANKS = 1  # each pipeline rank (`bounds.variant_bounds`), blocks communicating between neighbours
    PLACED = 2  # likewise where it is placed (`outer.refined_bounds`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Bounds in the objective's units, by row: what counts, and what counts among equals."""

    first: Floats
    second: Floats

    def take(self, rows: Ints | Bools | slice) -> Values:
        return Values(first=self.first[rows], second=self.second[rows])

    def order(self) -> Ints:
        """The rows from the best bound on."""
        return np.lexsort((np.arange(len(self.first)), self.second, self.first))

    def at(self, row: int) -> Value:
        return float(self.first[row]), float(self.second[row])


def values_of(problem: Problem, bounds: Bounds, devices: Ints) -> Values:
    """The objective, from bounds on seconds and bytes."""
    nothing = np.zeros(len(devices))
    match problem.objective:
        case Objective.COST:
            distinct, which = np.unique(devices, return_inverse=True)
            rates = np.array([problem.rate_per_s(int(d)) for d in distinct], dtype=np.float64)
            return Values(first=bounds.time_s * rates[which.reshape(-1)], second=nothing)
        case Objective.MEMORY:
            return Values(first=bounds.memory_bytes, second=bounds.time_s)
        case _:
            return Values(first=bounds.time_s, second=nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Variants of some shapes, the one with the least bound first; `placed`: where their blocks communicate, as
    `WireBook.inner_placements` numbers it."""

    variants: Variants
    values: Values
    placed: Ints
    known: Known

    def __len__(self) -> int:
        return len(self.placed)

    def take(self, rows: Ints | Bools | slice) -> Run:
        return Run(
            variants=self.variants.take(rows), values=self.values.take(rows), placed=self.placed[rows],
            known=self.known,
        )  # fmt: skip

    @property
    def bound(self) -> Value:
        return self.values.at(0)


def priced_alike(problem: Problem, shapes: Shapes, run: Run) -> Bools:
    """Which variants of a run have the same prices of blocks as its first one."""
    owners = run.variants.shape
    same = run.placed == run.placed[0]
    for column in (*setting_columns(shapes), shapes.micro):
        same &= column[owners] == column[owners[0]]
    added = added_up(problem, shapes.take(owners))
    return np.asarray(same & (added == added[0]))
