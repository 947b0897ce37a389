"""Where to look first: variants that are likely good, so that all others have something to be measured by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf

import numpy as np

from autoparallel.planner.problem import Objective
from autoparallel.planner.search.bounds.outer import Outer, bound_variants, expand_quickly
from autoparallel.planner.search.bounds.variants import Bounds
from autoparallel.planner.search.open import Upcoming, values_of
from autoparallel.planner.search.space.build import Variants
from autoparallel.planner.search.space.candidates import Candidate, candidate
from autoparallel.planner.search.space.meshes import Bools, Floats, Ints, alike, joined
from autoparallel.planner.search.space.shapes import Shapes

SHAPES_EACH = 2  # shapes of each size of pp, tp, cp and the micro-batch looked at
VARIANTS_EACH = 12  # of these shapes' variants, that are bounded rank by rank
SMALLEST_EACH = 2  # variants of each size tried where nothing fits so far
UNPIPELINED = 16  # variants without a pipeline that are simulated
FEWER = 0.25  # of each of these for a number of devices that is not the most promising one's. Kind: choice
ROUGH = 0.01  # share to which bounds tell which of them is tried first. Kind: choice
MOST_ACTIONS = 8_000  # of a schedule: larger ones take over a tenth of a second to lay out, and
MOST_LARGE = 40_000  # still larger ones over a second. Kind: measured


Promises = list[list[tuple[Candidate, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Breadth:
    """How much is looked at for strategies to start from."""

    sizes: int | None  # of pp, tp and cp; all of them if None
    shapes: int  # of these whose variants are bounded, with a pipeline,
    variants: int  # and of these the most
    alone: int  # shapes without a pipeline whose variants are bounded,
    alone_bounded: int  # the first of these rank by rank


# A second's work. Kind: measured
WIDE = Breadth(sizes=None, shapes=512, variants=150_000, alone=384, alone_bounded=4096)
# For what is only told beside the answer. Kind: choice
NARROW = Breadth(sizes=8, shapes=64, variants=15_000, alone=48, alone_bounded=512)


def starts(
    upcoming: Upcoming,
    only: Callable[[Variants, Shapes], Bools] | None,
    most_actions: int | None,
    breadth: Breadth,
) -> tuple[Promises, Promises, int]:
    """For each size of pp, tp and cp (and of the mesh, where costs count), of the variants of its most promising shapes those with the least bounds, and these
    bounds: the best of each micro-batch, as what fits depends on that; the most promising size first. Likewise of those whose
    schedules take long to lay out, unless `most_actions` says how long these may be. And how many variants were looked at."""
    outer, space = upcoming.outer, upcoming.outer.space
    sizes = joined(space.shapes.pp, space.shapes.tp, space.shapes.cp)
    # Of fewer devices each size costs less, if it fits there, and may take less time.
    if outer.problem.objective != Objective.MEMORY:
        sizes = joined(sizes, space.shapes.devices)
    found, bounds = expand_quickly(outer, _first_shapes(upcoming, sizes, breadth))
    actions, open_ = space.actions(found), are_open(outer, found, bounds, only)
    open_ &= outer.communication.inner_placements(found) == 0
    few = actions <= (most_actions or MOST_ACTIONS)
    large = ~few & (actions <= MOST_LARGE) & (most_actions is None)
    first, then = (
        _promises(outer, found, bounds.time_s, np.flatnonzero(open_ & some), sizes) for some in (few, large)
    )
    return first, then, len(found)


def _promises(outer: Outer, found: Variants, time_s: Floats, kept: Ints, sizes: Ints) -> Promises:
    """Of the variants `kept`, which take so long at least, those that promise most."""
    space = outer.space
    kept = kept[_order(outer, found.shape[kept], time_s[kept])]
    both = joined(sizes[found.shape[kept]], space.shapes.micro[found.shape[kept]])
    kept = first_of_each(both, kept, VARIANTS_EACH)
    time_s = bound_variants(outer, found.take(kept), inf, close=ROUGH).time_s
    best = _order(outer, found.shape[kept], time_s)
    best = best[np.isfinite(time_s[best])]
    owners = found.shape[kept[best]]
    best = best[np.sort(np.unique(joined(sizes[owners], space.shapes.micro[owners]), return_index=True)[1])]
    promises: dict[int, list[tuple[Candidate, float]]] = {}
    for at in best.tolist():
        row = int(kept[at])
        promises.setdefault(int(sizes[found.shape[row]]), []).append(
            (candidate(space, found, row), float(time_s[at]))
        )
    every = list(promises.values())
    if outer.problem.objective != Objective.TIME:
        return every
    # All devices promise most: the best of each other number of them is not left for the end.
    devices = np.array([one[0][0].mesh.devices for one in every], dtype=np.int64)
    return [every[at] for at in np.argsort(_place_of_each(devices) > 0, kind="stable")]


def unpipelined(
    upcoming: Upcoming, only: Callable[[Variants, Shapes], Bools] | None, breadth: Breadth
) -> tuple[list[tuple[Candidate, float]], int]:
    """Variants without a pipeline, with their bounds, the least one first; and how many were looked at. There bounds are close and
    a simulation takes no time, so that several of each mesh are tried: with the same ZeRO level, recomputation and micro-batch
    the one with the least bound."""
    outer, space = upcoming.outer, upcoming.outer.space
    rows = upcoming.rows[space.shapes.pp[upcoming.rows] == 1]
    rows = rows[_first_of_counts(outer, rows, breadth.alone)]
    found, bounds = expand_quickly(outer, rows)
    open_ = are_open(outer, found, bounds, only)
    near = open_ & (outer.communication.inner_placements(found) == 0)  # elsewhere prices are not known yet
    kept = np.flatnonzero(near if near.any() else open_)
    kept = kept[_order(outer, found.shape[kept], bounds.time_s[kept])]
    kept = kept[_first_of_counts(outer, found.shape[kept], breadth.alone_bounded)]
    time_s = bound_variants(outer, found.take(kept), inf, close=ROUGH).time_s
    best = _order(outer, found.shape[kept], time_s)
    best = best[np.isfinite(time_s[best])]
    tried = found.take(kept[best])
    sizes = (
        getattr(space.shapes, name)[tried.shape]
        for name in ("dp_replicate", "dp_shard", "cp", "tp", "ep", "micro", "recompute")
    )
    best = best[np.sort(np.unique(joined(*sizes, tried.zero), return_index=True)[1])]
    best = best[_first_of_counts(outer, found.shape[kept[best]], UNPIPELINED)]
    return [(candidate(space, found, int(kept[at])), float(time_s[at])) for at in best], len(found)


def smallest_first(
    upcoming: Upcoming,
    only: Callable[[Variants, Shapes], Bools] | None,
    most_actions: int | None,
    *,
    by_schedule: bool = False,
) -> list[tuple[Candidate, float]]:
    """Where memory is short: of the sizes of pp, tp and cp (and of each schedule, where `by_schedule` asks for it) the variants that
    need least of it, with their bounds on time; the least bound of a size first."""
    outer, space = upcoming.outer, upcoming.outer.space
    rows = outer.best_first(upcoming.rows, len(upcoming.rows), by_memory=True)
    sizes = joined(space.shapes.pp, space.shapes.tp, space.shapes.cp)
    found, bounds = expand_quickly(outer, first_of_each(sizes[rows], rows, SMALLEST_EACH))
    open_ = are_open(outer, found, bounds, only) & (space.actions(found) <= (most_actions or MOST_ACTIONS))
    found = found.take(np.flatnonzero(open_))
    order = np.argsort(bound_variants(outer, found, 0.0, memory=True).memory_bytes, kind="stable")
    groups = sizes[found.shape]
    if by_schedule:
        groups = alike(groups, found.schedule, found.virtual_stages)[1]
    smallest = found.take(first_of_each(groups[order], order, SMALLEST_EACH))
    time_s = bound_variants(outer, smallest, inf, close=ROUGH).time_s
    best = _order(outer, smallest.shape, time_s)
    return [(candidate(space, smallest, int(at)), float(time_s[at])) for at in best]


def _order(outer: Outer, shapes: Ints, time_s: Floats) -> Ints:
    """Variants of shapes by their seconds, or by what so many seconds of the shapes' devices cost."""
    if outer.problem.objective != Objective.COST:
        return np.argsort(time_s, kind="stable")
    bounds = Bounds(time_s=time_s, memory_bytes=np.zeros(len(time_s)))
    return values_of(outer.problem, bounds, outer.space.shapes.devices[shapes]).order()


def _first_of_counts(outer: Outer, shapes: Ints, number: int) -> Ints:
    """Where among these shapes, the most promising one first, the first `number` are; and where time counts, for which all devices
    promise most, of each other number of devices the first `FEWER` of so many."""
    if outer.problem.objective != Objective.TIME or not len(shapes):
        return np.arange(len(shapes))[:number]
    devices = outer.space.shapes.devices[shapes]
    most = np.where(devices == devices[0], number, ceil(number * FEWER))
    return np.flatnonzero(_place_of_each(devices) < most)


def _first_shapes(upcoming: Upcoming, sizes: Ints, breadth: Breadth) -> Ints:
    both = joined(sizes[upcoming.rows], upcoming.outer.space.shapes.micro[upcoming.rows])
    rows = first_of_each(both, upcoming.rows, SHAPES_EACH)
    if breadth.sizes is not None:
        groups, first = np.unique(sizes[rows], return_index=True)
        rows = rows[np.isin(sizes[rows], groups[np.argsort(first)][: breadth.sizes])]
    rows = rows[: breadth.shapes]
    counts = upcoming.outer.counts[rows]
    return np.asarray(rows[np.cumsum(counts) <= max(breadth.variants, counts.max(initial=0))])


def are_open(
    outer: Outer, found: Variants, bounds: Bounds, only: Callable[[Variants, Shapes], Bools] | None
) -> Bools:
    """Which variants may be strategies at all, of those that are looked at (all if None)."""
    open_ = np.isfinite(bounds.time_s)
    return open_ if only is None else open_ & only(found, outer.space.shapes.take(found.shape))


def first_of_each(groups: Ints, rows: Ints, number: int) -> Ints:
    """Of each group the first `number` of its rows, in the order of the rows."""
    return np.asarray(rows[_place_of_each(groups) < number])


def in_turns(groups: Ints, rows: Ints) -> Ints:
    """The first row of each group, then the second ones, and so on; each time in the order of the rows."""
    return np.asarray(rows[np.argsort(_place_of_each(groups), kind="stable")])


def _place_of_each(groups: Ints) -> Ints:
    """Of each row, how many before it are of its group."""
    by_group = np.argsort(groups, kind="stable")
    _, start, size = np.unique(groups[by_group], return_index=True, return_counts=True)
    place = np.empty(len(groups), dtype=np.int64)
    place[by_group] = np.arange(len(groups)) - np.repeat(start, size)
    return place
