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
    _better_at: float = 0.0  # the work after which something better was last found

    def note(self, work: float, value: float, bound: float) -> None:
        """Remember how far the search has come."""
        if not self._notes or work >= self._notes[-1][0] + EVERY:
            if not self._notes or value < self._notes[-1][1] * (1 - BETTER):
                self._better_at = work
            self._notes.append((work, value, bound))

    def found(self, work: float) -> None:
        """Something better was found after so much work, though it is not the best of all yet."""
        self._better_at = work

    @property
    def idle(self) -> float:
        """The work since something better was found."""
        return self._notes[-1][0] - self._better_at

    def will_close(self, gap: float, lately: float, more: float) -> bool:
        """Whether so much `more` work will leave no more than this gap, at the pace of the last piece of work so long; or the
        search has found something better in it, which nobody can foresee."""
        _, value, bound = self._notes[-1]
        if value == inf or self.idle <= lately:
            return True
        open_ = 1 - bound / value - gap
        return open_ * lately <= self.closed(lately) * more

    def closed(self, lately: float) -> float:
        """The share of the best value by which the bound has risen in the last piece of work so long."""
        work, value, bound = self._notes[-1]
        before = next((one for one in reversed(self._notes) if one[0] <= work - lately), self._notes[0])
        return (bound - before[2]) / value


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
