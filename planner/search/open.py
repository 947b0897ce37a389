"""What of a search is open, each with a bound: shapes, then the variants of some, then single candidates.

Upcoming    shapes that have not been expanded
FamilyRun   families of some shapes, bounded by the least that their variants communicate
Run         variants of some of them, with bounds of the kind that `Known` says
Node        a candidate with its stage problem
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from autoparallel.planner.problem import NOTHING, Objective, Problem, Value
from autoparallel.planner.search.bounds.outer import Outer
from autoparallel.planner.search.bounds.variants import Bounds
from autoparallel.planner.search.partition.problem import (
    Partition,
    StageProblem,
    without_needless_recomputation,
)
from autoparallel.planner.search.space.build import Families, Variants
from autoparallel.planner.search.space.candidates import Candidate
from autoparallel.planner.search.space.meshes import Bools, Floats, Ints
from autoparallel.planner.search.space.shapes import Shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Bounds in the objective's units, by row: what counts, and what counts among equals."""

    first: Floats
    second: Floats

    def take(self, rows: Ints | Bools | slice) -> Values:
        return Values(first=self.first[rows], second=self.second[rows])

    def no_less_than(self, other: Values) -> Values:
        """The larger bound of either, by row."""
        return Values(first=np.maximum(self.first, other.first), second=np.maximum(self.second, other.second))

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


def shape_values(outer: Outer, rows: Ints) -> Values:
    """The bounds of some shapes, by what is known of their prices now."""
    time_s = np.maximum(outer.bounds.time_s[rows], outer.families_s[rows])
    bounds = Bounds(time_s=time_s, memory_bytes=outer.bounds.memory_bytes[rows])
    return values_of(outer.problem, bounds, outer.space.shapes.devices[rows])


@dataclass(slots=True, kw_only=True)
class Upcoming:
    """Shapes of a space in the order of their bounds."""

    outer: Outer
    rows: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
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
        values = shape_values(self.outer, rows)
        order = values.order()
        self.rows, self.values = rows[order], values.take(order)

    def put_back(self, rows: Ints) -> None:
        """Shapes that were taken, with the bounds that they have now, if they may fit."""
        rows = rows[self.outer.bounds.memory_bytes[rows] <= self.outer.capacity_bytes]
        values = shape_values(self.outer, rows)
        order = values.order()
        at = np.searchsorted(self.values.first, values.first[order])
        self.rows = np.insert(self.rows, at, rows[order])
        self.values = Values(
            first=np.insert(self.values.first, at, values.first[order]),
            second=np.insert(self.values.second, at, values.second[order]),
        )

    def refresh(self, may_win: Callable[[Values], Bools]) -> None:
        """Order them by the bounds that they have now; those that cannot win are dropped."""
        values = shape_values(self.outer, self.rows)
        kept = np.flatnonzero(
            may_win(values) & (self.outer.bounds.memory_bytes[self.rows] <= self.outer.capacity_bytes)
        )
        kept = kept[values.take(kept).order()]
        self.rows, self.values = self.rows[kept], values.take(kept)

    def take(self, number: int) -> Ints:
        """The first shapes, which are none of these any more."""
        taken = self.rows[:number]
        self.rows, self.values = self.rows[number:], self.values.take(slice(number, None))
        return taken

    def clear(self) -> None:
        """None of them can win."""
        self.take(len(self.rows))


class Known(IntEnum):
    """What bounds take into account: each is no lower than the one before."""

    WHOLE = 0  # the model as a whole (`bounds.quick_bounds`)
    RANKS = 1  # each pipeline rank (`bounds.variant_bounds`)
    PATHS = 2  # and the known paths of its schedule (`paths.PathWeights`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Variants of some shapes, the one with the least bound first."""

    variants: Variants
    values: Values
    known: Known
    weighed: int = 0  # how many weights of its schedule's paths it is bounded by

    def __len__(self) -> int:
        return len(self.variants)

    def take(self, rows: Ints | Bools | slice) -> Run:
        return Run(
            variants=self.variants.take(rows), values=self.values.take(rows), known=self.known, weighed=self.weighed,
        )  # fmt: skip

    @property
    def bound(self) -> Value:
        return self.values.at(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRun:
    """Families of some shapes, the one with the least bound first."""

    families: Families
    values: Values

    def __len__(self) -> int:
        return len(self.families)

    def take(self, rows: Bools | slice) -> FamilyRun:
        return FamilyRun(families=self.families.take(rows), values=self.values.take(rows))

    @property
    def bound(self) -> Value:
        return self.values.at(0)


def scheduled_alike(shapes: Shapes, run: Run) -> Bools:
    """Which variants of a run have the same actions in the same order as its first one."""
    owners, first = run.variants.shape, run.variants.shape[0]
    same = (run.variants.schedule == run.variants.schedule[0]) & (
        run.variants.virtual_stages == run.variants.virtual_stages[0]
    )
    same &= shapes.pp[owners] == shapes.pp[first]
    return np.asarray(same & (shapes.micro_batches[owners] == shapes.micro_batches[first]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A variant with its stage problem, the partitions already simulated, and the one to simulate next; None where a first,
    short solve found none, and left open whether there is one. `fits`: all that were simulated did, as their rows say;
    `relaxed`: its bound is that of its linear relaxation, and the solver has not looked at it."""

    chosen: Candidate
    bound: Value
    problem: StageProblem
    excluded: tuple[Partition, ...] = ()
    partition: Partition | None = None
    fits: bool = True
    relaxed: bool = False

    @property
    def to_solve(self) -> StageProblem:
        """The stage problem as it is solved: nothing is recomputed where all fits without it. Rows bound memory from below:
        after a partition that did not fit though they said so, that is not known."""
        return without_needless_recomputation(self.problem) if self.fits else self.problem


Item = Node | Run | FamilyRun
