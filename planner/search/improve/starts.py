"""Where to look first: variants that are likely good, so that all others have something to be measured by."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np

from autoparallel.planner.search.bounds.outer import bound_variants, expand_quickly
from autoparallel.planner.search.open import Upcoming
from autoparallel.planner.search.space.build import Shapes, Variants
from autoparallel.planner.search.space.candidates import Candidate, candidate
from autoparallel.planner.search.space.meshes import Bools, Ints, joined

SHAPES_EACH = 3  # shapes of each size of pp, tp and cp looked at
VARIANTS_EACH = 24  # of these shapes' variants, that are bounded rank by rank
MOST_ACTIONS = 20_000  # of a schedule: larger ones take over a sixth of a second to lay out. Kind: measured


def starts(
    upcoming: Upcoming,
    only: Callable[[Variants, Shapes], Bools] | None,
    most_actions: int | None,
    most_groups: int | None,
) -> tuple[list[tuple[Candidate, float]], int]:
    """For each size of pp, tp and cp, of the variants of its most promising shapes the one with the least bound and that
    bound, best first; and how many variants were looked at. Not more than `most_groups` sizes, those with the most promising
    shapes."""
    outer, space = upcoming.outer, upcoming.outer.space
    sizes = joined(space.shapes.pp, space.shapes.tp, space.shapes.cp)
    found, bounds = expand_quickly(outer, _first_shapes(upcoming, sizes, most_groups))
    chunks = space.shapes.pp[found.shape] * found.virtual_stages
    actions = 2 * chunks * space.shapes.micro_batches[found.shape]
    open_ = np.isfinite(bounds.time_s) & (actions <= (most_actions or MOST_ACTIONS))
    if only is not None:
        open_ &= only(found, space.shapes.take(found.shape))
    kept = np.flatnonzero(open_)
    kept = kept[outer.wires.inner_placements(found.take(kept)) == 0]
    kept = kept[np.argsort(bounds.time_s[kept], kind="stable")]
    kept = first_of_each(sizes[found.shape[kept]], kept, VARIANTS_EACH)
    time_s = bound_variants(outer, found.take(kept), inf).time_s
    best = np.argsort(time_s, kind="stable")
    best = best[np.isfinite(time_s[best])]
    best = best[np.sort(np.unique(sizes[found.shape[kept[best]]], return_index=True)[1])]
    promises = [(candidate(space, found, int(kept[i])), float(time_s[i])) for i in best]
    return promises, len(found)


def _first_shapes(upcoming: Upcoming, sizes: Ints, most_groups: int | None) -> Ints:
    rows = first_of_each(sizes[upcoming.rows], upcoming.rows, SHAPES_EACH)
    if most_groups is None:
        return rows
    groups, first = np.unique(sizes[rows], return_index=True)
    return np.asarray(rows[np.isin(sizes[rows], groups[np.argsort(first)][:most_groups])])


def first_of_each(groups: Ints, rows: Ints, number: int) -> Ints:
    """Of each group the first `number` of its rows, in the order of the rows."""
    by_group = np.argsort(groups, kind="stable")
    _, start, size = np.unique(groups[by_group], return_index=True, return_counts=True)
    place = np.arange(len(rows)) - np.repeat(start, size)
    return np.asarray(rows[np.sort(by_group[place < number])])
