"""Whether it is worth while to search on: what was found and proved of late; and what may be asked of one that runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from autoparallel.planner.problem import Value

EVERY = 100.0  # work between two notes
BETTER = 0.002  # share by which a strategy must be shorter to count as found


@dataclass(slots=True)
class Headway:
    """The best value and the bound of a search, by the work that was done."""

    _notes: list[tuple[float, float, float]] = field(default_factory=list)

    def note(self, work: float, value: float, bound: float) -> None:
        """Remember how far the search has come."""
        if not self._notes or work >= self._notes[-1][0] + EVERY:
            self._notes.append((work, value, bound))

    def will_close(self, gap: float, lately: float, more: float) -> bool:
        """Whether so much `more` work will leave no more than this gap, at the pace of the last piece of work so long; or the
        search has found something better in it, which nobody can foresee."""
        work, value, bound = self._notes[-1]
        before = next((one for one in reversed(self._notes) if one[0] <= work - lately), None)
        if before is None or value == inf or value < before[1] * (1 - BETTER):
            return True
        closed = (bound - before[2]) / value  # since then, against the best strategy of now
        open_ = 1 - bound / value - gap
        return open_ * (work - before[0]) <= closed * more


class Watched(Protocol):
    """A search that runs, or several, as its limits and its progress see it."""

    headway: Headway

    @property
    def work(self) -> float: ...

    @property
    def value(self) -> Value: ...

    @property
    def incumbent(self) -> object | None: ...

    @property
    def candidates(self) -> int: ...

    @property
    def solved(self) -> int: ...

    @property
    def settled(self) -> bool: ...

    def bound(self) -> Value: ...
