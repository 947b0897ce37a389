"""Partial deals that another one is at least as good as, whatever comes after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

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


def measures(tables: Sequence[Floats], offsets: Floats, paths: int) -> list[Measures]:
    """After each chunk, from what each of its pieces adds to each row ([row, piece]). The first `paths` rows are paths, the
    others moments of memory: one to which nothing more is added fits, or the partial deal would not be there."""
    to_come = _numbered(tables[::-1])[
        ::-1
    ]  # what chunks from one on add, and below what those before it have added
    so_far = _numbered(tables)
    nothing = np.zeros(len(offsets), dtype=np.int64)
    found = []
    for chunk, past in enumerate(so_far):
        last = chunk + 1 == len(tables)
        future = nothing if last else to_come[chunk + 1]
        ended = (
            ~np.any([table.any(axis=1) for table in tables[chunk + 1 :]], axis=0)
            if not last
            else nothing == 0
        )
        columns: dict[
            tuple[bool, int], dict[int, int]
        ] = {}  # by what is to come: what was, and the row most ahead
        for row in np.flatnonzero(~(ended & (np.arange(len(offsets)) >= paths))).tolist():
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


def _numbered(tables: Sequence[Floats]) -> list[Ints]:
    """For each row a number that is the same where a table and all before it are."""
    found, before = [], np.zeros(len(tables[0]), dtype=np.int64)
    for table in tables:
        numbers: dict[tuple[int, bytes], int] = {}
        pairs = zip(before.tolist(), table, strict=True)
        before = np.array([numbers.setdefault((was, row.tobytes()), len(numbers)) for was, row in pairs])
        found.append(before)
    return found


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
