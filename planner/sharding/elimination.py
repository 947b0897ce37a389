"""The cheapest assignment of unknowns under a sum of tables, unknown by unknown (bucket elimination).

A table says what some unknowns cost together, for every combination of their values that is legal. All tables that mention an
unknown are joined into one, in which its best value for each combination of the others is kept; what is left mentions it
no more. Going back over what was kept gives every value. Exact; the work grows with the widest join, which is small where
unknowns are joined as operators in a block of a model are.

Source: R. Dechter, Bucket elimination: a unifying framework for reasoning, Artificial Intelligence 113 (1999).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

Unknown = Hashable
Values = tuple[str, ...]

MOST_ROWS = 20_000  # of a join: a few tens of milliseconds. Kind: measured


class NoAssignment(Exception):
    """No combination of values is legal."""


class TooWide(Exception):
    """A join has more than `MOST_ROWS` rows."""


@dataclass(frozen=True, slots=True)
class Table:
    """The least cost of each legal combination of some unknowns' values."""

    scope: tuple[Unknown, ...]
    rows: Mapping[Values, int]


def least_assignment(tables: Iterable[Table]) -> dict[Unknown, str]:
    """The values of all unknowns whose costs sum to least; of equal ones the same in every process. Raises `NoAssignment`,
    and `TooWide`."""
    holding: dict[Unknown, dict[int, Table]] = {}
    number = 0
    for number, table in enumerate(tables):
        for unknown in table.scope:
            holding.setdefault(unknown, {})[number] = table
        if not table.rows:
            raise NoAssignment
    kept: list[tuple[Unknown, tuple[Unknown, ...], dict[Values, str]]] = []
    numbers = {unknown: n for n, unknown in enumerate(holding)}
    widths = {unknown: _width(here) for unknown, here in holding.items()}
    upcoming = [(width, numbers[unknown], unknown) for unknown, width in widths.items()]
    heapify(upcoming)
    while holding:
        width, _, unknown = heappop(upcoming)
        if widths.get(unknown) != width:  # it has another width now, or is gone
            continue
        del widths[unknown]
        here = holding.pop(unknown)
        joined = _joined(sorted(here.values(), key=lambda table: len(table.rows)))
        rest, best = _without(joined, unknown)
        kept.append((unknown, rest.scope, best))
        number += 1
        for other in rest.scope:
            for gone in here:
                holding[other].pop(gone, None)
            holding[other][number] = rest
            if (width := _width(holding[other])) != widths[other]:
                widths[other] = width
                heappush(upcoming, (width, numbers[other], other))
    found: dict[Unknown, str] = {}
    for unknown, scope, best in reversed(kept):
        found[unknown] = best[tuple(found[other] for other in scope)]
    return found


def _width(here: Mapping[int, Table]) -> tuple[int, int]:
    """How many other unknowns the one of these tables is joined with, and in how many rows."""
    others = {other for table in here.values() for other in table.scope}
    return len(others) - 1, sum(len(table.rows) for table in here.values())


def _joined(tables: Sequence[Table]) -> Table:
    """One table of the sums of several. Raises `NoAssignment` where it is empty."""
    whole = tables[0]
    for table in tables[1:]:
        at = {unknown: n for n, unknown in enumerate(whole.scope)}
        shared = [(n, at[unknown]) for n, unknown in enumerate(table.scope) if unknown in at]
        new = [n for n, unknown in enumerate(table.scope) if unknown not in at]
        alike: dict[Values, list[tuple[Values, int]]] = {}
        for values, cost in table.rows.items():
            key = tuple(values[n] for n, _ in shared)
            alike.setdefault(key, []).append((tuple(values[n] for n in new), cost))
        places = [place for _, place in shared]
        rows = {
            values + more: cost + other
            for values, cost in whole.rows.items()
            for more, other in alike.get(tuple(values[place] for place in places), ())
        }
        if not rows:
            raise NoAssignment
        if len(rows) > MOST_ROWS:
            raise TooWide
        whole = Table((*whole.scope, *(table.scope[n] for n in new)), rows)
    return whole


def _without(table: Table, unknown: Unknown) -> tuple[Table, dict[Values, str]]:
    """The table with an unknown at its best, and what that is for each combination of the others."""
    at = table.scope.index(unknown)
    rows: dict[Values, int] = {}
    best: dict[Values, str] = {}
    for values, cost in table.rows.items():
        others = values[:at] + values[at + 1 :]
        if others not in rows or cost < rows[others]:
            rows[others], best[others] = cost, values[at]
    return Table(table.scope[:at] + table.scope[at + 1 :], rows), best
