"""Searches of the parts of one cluster, side by side: they share what they have to beat, and the work.

Each part is glanced at first. Then slices of work go in turns to the part with the least bound, as nothing is proved before that one
is, to the part with the best strategy, as the local search goes on from it, and to the one that had least work, as nobody can
foresee what it finds. A part that cannot win any more gets none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf

from autoparallel.errors import UserError
from autoparallel.planner.heterogeneous.assign import assign, talks
from autoparallel.planner.heterogeneous.irregular import on_nodes
from autoparallel.planner.heterogeneous.mixed import Part
from autoparallel.planner.problem import NOTHING, Value, objective_value
from autoparallel.planner.search.bounds.outer import Outer
from autoparallel.planner.search.driver import NEAR, Search, Stopped, WorkDone
from autoparallel.planner.search.evaluate import TOLERANCE, Evaluation
from autoparallel.planner.search.headway import BETTER, Headway, Watched
from autoparallel.planner.search.space.candidates import Candidate
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles.hardware import Cluster

# Whose turn it is: of the part with the best strategy, with the least bound (which nobody has shown to be worse), with the least
# work; as long as something better was found lately, and after that. Kind: choice.
BEST, LEAST, LEAD = "best", "least", "lead"
FINDING, PROVING = (BEST, LEAD, LEAST, LEAD), (LEAD, BEST, LEAD, LEAST)
LATELY = 1500.0  # work
TIRES = 2000.0  # work after which a part counts as twice as long as what it promises: others may find more. Kind: choice
UNFOUND = 2.0  # times its bound: what may be found of a part of which nothing is. Kind: choice
GLANCE = 100.0  # work (`Search.work`) that tells what a part promises. Kind: choice
SLICE = 250.0  # and of each turn after it. Kind: choice
MOST_PLACED = 4  # placements with which no more are sought, of those that are too many to look at. Kind: choice: seconds each
MOST_ASSIGNED = 8  # strategies that are placed to find them
MOST_BEGINS = 24  # and that are simulated on each placement to begin with. Kind: choice


class SliceDone(Stopped):
    """A turn is over."""


@dataclass(slots=True, kw_only=True, eq=False)
class Searched:
    """A part and its search."""

    part: Part
    outer: Outer
    search: Search
    ended: bool = False  # looked at to the end, or no strategy at all
    # Of a loose part: its best strategy when placements were last sought, and those that were found.
    placed_for: Evaluation | None = None
    placements: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def bound(self) -> Value:
        """What no strategy of the part that may win goes below."""
        found = self.search.bound()
        return found if self.search.may_win(found) else self.search.value

    @property
    def own_value(self) -> Value:
        """Of its best strategy."""
        found = self.search.incumbent
        return NOTHING if found is None else objective_value(self.outer.problem, found)

    @property
    def promise(self) -> float:
        """The objective of its best strategy, better than other parts' or not, or what may well be found where there is none yet."""
        best = self.best
        return (
            UNFOUND * self.search.bound()[0] if best is None else objective_value(self.outer.problem, best)[0]
        )

    @property
    def best(self) -> Evaluation | None:
        """The best strategy that it simulated and that fits, better than other parts' or not."""
        return self.search.sims.leading


@dataclass(slots=True, kw_only=True, eq=False)
class Pool:
    """All parts that are searched, `Watched` as one search is. `outer_of` makes a part's space; `check` raises `Stopped` at a limit of
    the whole."""

    outer_of: Callable[[Part], Outer | None]
    check: Callable[[Watched], None]
    searched: list[Searched] = field(default_factory=list)
    errors: list[UserError] = field(default_factory=list)  # why parts are no strategies at all
    headway: Headway = field(default_factory=Headway)
    opened: bool = False  # all parts
    work_done: bool = False  # a limit of work ended the search
    _until: float = inf
    _turns: int = 0
    _best: Value = NOTHING  # so far,
    _found_at: float = 0.0  # and after how much work

    def run(self, parts: Sequence[Part]) -> None:
        """Search the parts until nothing may win; raises `Stopped` at a limit."""
        for part in parts:
            self._open(part, ())
        self.opened = True
        self._share_value()
        while (one := self._next()) is not None:
            self._turn(one, SLICE)
            self._share_value()

    def _open(self, part: Part, begins: Sequence[tuple[Candidate, Strategy]]) -> None:
        """Glance at one more part, from strategies that are known of the same devices otherwise placed."""
        try:
            outer = self.outer_of(part)
        except UserError as error:  # such as a device that does not compute in the dtype
            self.errors.append(error)
            return
        if outer is None:
            return
        one = Searched(part=part, outer=outer, search=Search(outer=outer, check=self._check))
        self.searched.append(one)
        for chosen, strategy in begins:
            one.search.sims.try_elsewhere(chosen, strategy)
        with suppress(Stopped):  # then its bound is all that is wanted, and the next turn stops, too
            self._turn(one, GLANCE)

    def _turn(self, one: Searched, work: float) -> None:
        """Some work on a part; a loose one is placed as soon as it knows a better strategy."""
        self._until, before = one.search.work + work, one.promise
        try:
            one.search.run()
            one.ended = True
        except SliceDone:
            self._place(one)
        except Stopped:
            if not one.placements:  # nothing would be found else
                self._place(one)
            raise
        except UserError as error:
            self.errors.append(error)
            one.ended = True
        else:
            self._place(one)
        self._note(one, before)

    def _note(self, one: Searched, before: float) -> None:
        """A part that comes nearer to the best of all is worth more work as much as that one is."""
        if one.promise < before * (1 - BETTER) and one.promise < self.value[0] * NEAR:
            self._found_at = self.work
            self.headway.found(self.work)

    def _place(self, one: Searched) -> None:
        """Open placements of a loose part that knows a better strategy than when these were last sought."""
        if one.part.loose and one.search.incumbent is not one.placed_for:
            one.placed_for = one.search.incumbent
            for part, begins in self._placed(one):
                self._open(part, begins)

    def _check(self, search: Search) -> None:
        """Called before every step of each search."""
        try:
            self.check(self)
        except WorkDone as error:  # what is polished then is the best of all
            self.work_done = True
            raise Stopped from error
        if search.work >= self._until:
            raise SliceDone

    def _share_value(self) -> None:
        """What one part found is what the others have to beat; nothing is found of a loose one."""
        value = self.value
        if value[0] < self._best[0] * (1 - TOLERANCE):
            self._best, self._found_at = value, self.work
        for one in self.searched:
            one.search.sims.value = min(one.search.sims.value, value)

    def _next(self) -> Searched | None:
        """The part to work on; None where none may win."""
        open_ = [one for one in self.searched if not one.ended and one.search.may_win(one.search.bound())]
        moving = [one for one in open_ if not one.search.settled and not one.part.loose]
        self._turns += 1
        found_lately = self.work - self._found_at < LATELY
        match (FINDING if found_lately else PROVING)[self._turns % len(FINDING)] if moving else LEAD:
            case "best":
                return min(moving, key=lambda one: one.promise * (1.0 + one.search.work / TIRES))
            case "least":
                return min(moving, key=lambda one: one.promise**2 * one.search.work)
            case _:
                return min(open_, key=lambda one: one.search.bound(), default=None)

    def finish(self) -> None:
        """Polish the best strategy, where a limit of work ended the search."""
        winner = self.winner if self.work_done else None
        if winner is not None:
            winner.search.finish()

    def _placed(self, loose: Searched) -> Iterator[tuple[Part, tuple[tuple[Candidate, Strategy], ...]]]:
        """The part on the nodes that suit its best strategies, as each of them talks; and the best of each candidate, to begin with
        there."""
        network, outer = loose.part.problem.cluster.network, loose.outer
        assert network is not None
        value_of = partial(objective_value, outer.problem)
        fitting = sorted(filter(outer.fits, loose.search.seen), key=value_of)
        before = len(loose.placements)
        for one in fitting[:MOST_ASSIGNED] if before < MOST_PLACED else ():
            placement = assign(network, talks(outer.book.expander.program(one.strategy), network))
            if placement not in loose.placements:
                loose.placements.append(placement)
        candidates = loose.search.sims.candidates
        best = sorted(candidates, key=lambda one: value_of(candidates[one]))[:MOST_BEGINS]
        begins = tuple((one, candidates[one].strategy) for one in best)
        yield from ((on_nodes(loose.part, placement), begins) for placement in loose.placements[before:])

    @property
    def winner(self) -> Searched | None:
        """The part with the best strategy that runs."""
        found = [one for one in self.searched if one.search.incumbent is not None and not one.part.loose]
        return min(found, key=lambda one: one.own_value, default=None)

    @property
    def incumbent(self) -> Evaluation | None:
        winner = self.winner
        return winner.search.incumbent if winner is not None else None

    @property
    def value(self) -> Value:
        """The objective of the best strategy that runs."""
        winner = self.winner
        return winner.own_value if winner is not None else NOTHING

    def bound(self) -> Value:
        """What no strategy of any part goes below: a loose part's bound is that of all its placements."""
        loose = [one.part.problem.cluster for one in self.searched if one.part.loose]
        counted = [
            one.bound for one in self.searched
            if one.part.loose or not any(_same_nodes(one.part.problem.cluster, cluster) for cluster in loose)
        ]  # fmt: skip
        return min(counted, default=NOTHING)

    @property
    def work(self) -> float:
        return sum(one.search.work for one in self.searched)

    @property
    def settled(self) -> bool:
        """Whether the local search has nothing left in any part that may win."""
        return not any(
            not one.ended and not one.search.settled and one.search.may_win(one.search.bound())
            for one in self.searched
        )

    @property
    def candidates(self) -> int:
        return sum(one.search.candidates for one in self.searched)

    @property
    def solved(self) -> int:
        return sum(one.search.solved for one in self.searched)


def _same_nodes(one: Cluster, other: Cluster) -> bool:
    return one.groups == other.groups and one.network is not None and other.network is not None
