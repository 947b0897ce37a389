"""Partial deals that another one is at least as good as, whatever comes after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoparallel.planner.search.space.meshes import Bools, Floats, Ints, joined
from autoparallel.planner.search.stages.pieces import Layer

AT_ONCE = 256  # partial deals compared with each other at once. Kind: formula


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """What partial deals after some chunk are measured by. Of rows to which all chunks to come add the same, only the one
    that is most ahead matters: each column is the largest of some rows' sums and their `offsets`."""

    rows: Ints  # those of one column after those of another
    starts: Ints  # of each column among them
    offsets: Floats

    def of(self, sums: Floats) -> Floats:
        """The columns to compare, of each partial deal's sums by row."""
        if not len(self.rows):
            return np.zeros((len(sums), 0))
        return np.asarray(np.maximum.reduceat(sums[:, self.rows] + self.offsets, self.starts, axis=1))


def measures(layers: Sequence[Layer], offsets: Floats, paths: int) -> list[Measures]:
    """After each chunk. The first `paths` rows are paths, the others moments of memory: one to which nothing more is added
    fits, or the partial deal would not be there."""
    added = [layer.which for layer in layers]
    so_far = _numbered(added)
    to_come = [*_numbered(added[::-1])[::-1][1:], np.zeros(len(offsets), dtype=np.int64)]
    is_path = np.arange(len(offsets)) < paths
    found = []
    for chunk, (past, future) in enumerate(zip(so_far, to_come, strict=True)):
        ended = ~np.array(added[chunk + 1 :]).reshape(-1, len(offsets)).any(axis=0)
        # By what is to come: what was, and the row most ahead.
        columns: dict[tuple[bool, int], dict[int, int]] = {}
        for row in np.flatnonzero(is_path | ~ended).tolist():
            ahead = columns.setdefault((row < paths, int(future[row])), {})
            if offsets[row] > offsets[ahead.setdefault(int(past[row]), row)]:
                ahead[int(past[row])] = row
        distinct = {
            tuple(sorted((was, float(offsets[row])) for was, row in ahead.items())): tuple(ahead.values())
            for ahead in columns.values()
        }
        rows = np.array([row for column in distinct.values() for row in column], dtype=np.int64)
        starts = np.cumsum([0, *map(len, distinct.values())])[:-1]
        found.append(Measures(rows=rows, starts=starts, offsets=offsets[rows]))
    return found


def _numbered(added: Sequence[Ints]) -> list[Ints]:
    """For each row a number that is the same where it is the same here and before."""
    found, before = [], np.zeros(len(added[0]), dtype=np.int64)
    for which in added:
        _, _, before = distinct_pairs(which, before)
        found.append(before)
    return found


def distinct_pairs(first: Ints, second: Ints) -> tuple[Ints, Ints, Ints]:
    """The distinct pairs of two numbers, and which of them each pair is."""
    _, at, which = np.unique(joined(first, second), return_index=True, return_inverse=True)
    return first[at], second[at], which.reshape(-1)


def undominated(ends: Ints, columns: Floats, powerless: Bools) -> Bools:
    """Which partial deals no other one that ends at the same unit is at least as good as in every column; of equals the
    first. Those that are `powerless` rule out no other."""
    kept = np.ones(len(ends), dtype=np.bool_)
    order = np.lexsort((columns.sum(axis=1), ends))  # whoever is better in every column comes before
    starts = np.flatnonzero(np.diff(ends[order], prepend=-1))
    for group in np.split(order, starts[1:]):
        if len(group) > 1:
            kept[group] = _undominated(columns[group], powerless[group])
    return kept


def _undominated(columns: Floats, powerless: Bools) -> Bools:
    kept = np.ones(len(columns), dtype=np.bool_)
    for start in range(0, len(columns), AT_ONCE):
        here = np.arange(start, min(start + AT_ONCE, len(columns)))
        before = np.flatnonzero(kept[:start] & ~powerless[:start])
        for part in range(0, len(before), AT_ONCE):
            better = columns[before[part : part + AT_ONCE], None] <= columns[None, here]
            kept[here] &= ~better.all(axis=2).any(axis=0)
        here = here[kept[here]]
        better = (columns[here, None] <= columns[None, here]).all(axis=2) & ~powerless[here, None]
        kept[here] &= ~np.triu(better, 1).any(axis=0)
    return kept
