"""The search: its primal and its dual half take turns until the gap is closed or the work is done.

First a few promising strategies are simulated (`improve/starts.py`). Then the dual half looks at what has the least bound,
and the local search climbs from the best strategies found so far; either gets as much work as the other, but the dual half
begins, as easy problems are proved at once. What either finds, both know (`simulations.py`). Work is counted, not
timed, so that equal problems get equal answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from itertools import chain
from math import inf

from autoparallel.errors import UserError
from autoparallel.planner.problem import NOTHING, Objective, Value, objective_value
from autoparallel.planner.search import spending
from autoparallel.planner.search.bounds.outer import Outer
from autoparallel.planner.search.dual import SHAPES_AT_ONCE, Dual
from autoparallel.planner.search.evaluate import Evaluation
from autoparallel.planner.search.headway import Headway
from autoparallel.planner.search.improve.climb import Climb
from autoparallel.planner.search.improve.details import improve_details
from autoparallel.planner.search.improve.partitions import move_blocks, solve_partition
from autoparallel.planner.search.improve.starts import (
    WIDE,
    Breadth,
    Promises,
    smallest_first,
    starts,
    unpipelined,
)
from autoparallel.planner.search.partition.problem import has_choice
from autoparallel.planner.search.partition.solve import EFFORT
from autoparallel.planner.search.simulations import Simulations
from autoparallel.planner.search.space.build import Variants
from autoparallel.planner.search.space.candidates import Candidate
from autoparallel.planner.search.space.meshes import Bools, Ints
from autoparallel.planner.search.space.shapes import Shapes

CLIMBS = 2  # neighbourhoods looked at before the incumbent is polished again
RIVALS = 6  # strategies polished beside the incumbent,
NEAR = 1.3  # times as long as it at most: what another partition may take off them. Kind: measured
ASKED = 24  # of which so many are asked what they promise
CLOSE = (
    1.05  # likewise, once their stage problem is solved: what single blocks and details may. Kind: measured
)
EACH = 2  # micro-batches of one size with a pipeline, whose bubbles bounds do not tell apart
TRIES = 4  # variants of one size tried until one fits
MUCH_BETTER = (
    0.7  # times what was found: the bound of a schedule that may take a second to lay out. Kind: choice
)
ENOUGH = 3  # starts that fit, with which none are looked for that need least memory, though some did not fit
LAST_POLISHES = 3  # at the end of a search that proved its answer
LAST_SHARE = 0.2  # of all work, once it is done, to end what was begun. Kind: choice
AGAIN = 4.0  # looks at what was looked at before get so much less of the work. Kind: choice
MOST_SMALLEST = (
    2000.0  # work on further ones of them, of each schedule, as long as nothing fits. Kind: choice
)
ALONE_EACH = 2  # without a pipeline, for each of the starts: a short search has some work left for those with one. Kind: choice
STARTS = 12  # strategies simulated before the search proper
DUAL_SHARE = 1.0  # work of the dual half for each unit of the local search. Kind: measured
SMALL = 512  # actions of a schedule that is simulated in a millisecond or two. Kind: measured
FIRST_DUAL = 150.0  # work of the dual half before the local search begins: easy problems are proved by then
ENDED = object()  # of an iterator


class Stopped(Exception):
    """A limit ended the search."""


class WorkDone(Stopped):
    """That limit is one of work: what was found may still be polished."""


@dataclass(slots=True, kw_only=True, eq=False)
class Search:
    """The state of a search. `check` is called before every step and raises `Stopped` at a limit."""

    outer: Outer
    check: Callable[[Search], None]
    effort: float = EFFORT  # of each stage problem
    starts: int = STARTS  # strategies simulated before the search proper, to have something to measure by
    climbs: bool = True  # whether the local search takes part
    only: Callable[[Variants, Shapes], Bools] | None = None  # variants to look at; all if None
    most_actions: int | None = None  # variants with larger schedules are left open
    at_once: int = SHAPES_AT_ONCE
    breadth: Breadth = WIDE  # of what is looked at before the search proper
    below: InitVar[Value] = NOTHING  # of a strategy that is known elsewhere: what is no better is not wanted
    rival: Value = (
        NOTHING  # likewise, but some strategy is wanted all the same: it counts once there are starts
    )
    sims: Simulations = field(init=False)
    dual: Dual = field(init=False)
    headway: Headway = field(default_factory=Headway)
    taken: list[Search] = field(default_factory=list)  # searches of more of the space that belong to this one
    _climb: Climb = field(init=False)
    _begun: bool = False
    _starting: Iterator[None] = field(init=False)  # what is left of the starts
    _proving: float = 0.0  # work of either half
    _climbing: float = field(init=False)
    _polished: Evaluation | None = None
    _polishing: Iterator[None] | None = None  # what is left of it
    _was_polished: set[Candidate] = field(default_factory=set)
    _promises: dict[Candidate, Value] = field(
        default_factory=dict
    )  # what none of their partitions goes below
    _climbed: int = 0  # since the incumbent was polished
    settled: bool = False  # whether the local search has nothing left to climb from or to polish

    def __post_init__(self, below: Value) -> None:
        self.sims = Simulations(outer=self.outer, value=below)
        self.dual = Dual(
            sims=self.sims, effort=self.effort, only=self.only, most_actions=self.most_actions,
            at_once=self.at_once,
        )  # fmt: skip
        self._climb = Climb(sims=self.sims, only=self.only, most_actions=self.most_actions)
        self._climbing = FIRST_DUAL if self.climbs else inf

    def open(self, rows: Ints | None = None) -> None:
        """From now on the shapes `rows` (all of them if None) count in the bound."""
        self.dual.open(rows)

    def run(self, rows: Ints | None = None) -> None:
        """Search the shapes `rows` (all of them if None) to the end; go on where an earlier call was stopped."""
        try:
            self._run(rows)
        except WorkDone:
            self.finish()
            raise

    def finish(self) -> None:
        """Polish what was found, once the work is done, for a while longer."""
        work = self.work
        while self.work < work * (1 + LAST_SHARE) and self._polish_on():
            pass
        self.sims.work = work  # what other searches have left is as it was

    def _run(self, rows: Ints | None) -> None:
        if not self._begun:
            self.open(rows)
            self._begun = True
            self._starting = self._start() if self.starts else iter(())
        for _ in self._starting:
            self.check(self)
        self.sims.value = min(self.sims.value, self.rival)
        while True:
            self.sims.count_prices()
            self.check(self)
            before = self.work
            if self._proving <= self._climbing * DUAL_SHARE:
                if not self.dual.step():
                    for _ in range(LAST_POLISHES if self.climbs or self._is_small() else 0):
                        if self._to_polish():
                            list(self._polish())
                    return
                self._proving += self.work - before
            elif self._improve():
                self._climbing += (self.work - before) * (AGAIN if self.settled else 1.0)
            else:
                self._climbing = self._proving + FIRST_DUAL  # until something better is found to climb from

    def _improve(self) -> bool:
        """One step of the local search; False where it has nothing left to do."""
        climbs_first = self._was_polished and self._climbed < CLIMBS and self._polishing is None
        self.settled = not (
            self._climb_on() or self._polish_on() if climbs_first else self._polish_on() or self._climb_on()
        )
        return not self.settled or self._climb.try_others() or self._climb.step(again=True)

    def _climb_on(self) -> bool:
        """Look at one more neighbourhood; False where none is new."""
        self._climbed += 1
        return self._climb.step()

    def _polish_on(self) -> bool:
        """Polish one more of what has not been; False where nothing promises to be better for it."""
        if self._polishing is None:
            if not self._to_polish():
                return False
            self._polishing = self._polish()
        if next(self._polishing, ENDED) is ENDED:
            self._polishing, self._climbed = None, 0
        return True

    def _is_small(self) -> bool:
        """Whether the best strategy is simulated in no time."""
        return self.sims.leader is not None and self.sims.leader.actions <= SMALL

    def _polish(self) -> Iterator[None]:
        """Improve, one after the other, what bounds tell badly of the incumbent, or not at all: its schedule, its partition, and details; and of
        what comes close to it, as the one may gain more by that than the other. Then single keys of the incumbent."""
        self._climb.try_schedules()
        for chosen in self._to_polish():
            self._polish_one(chosen)
            yield
            if chosen == self.sims.leader and self.climbs:
                self._climb.try_chunks(chosen)
                yield
                self._climb.try_keys(chosen)
                yield
        self._polished = self.sims.leading
        if self.climbs and self.sims.leader is not None:
            self._climb.try_keys(self.sims.leader)  # what is better is polished in its turn

    def _polish_one(self, chosen: Candidate) -> None:
        """Improve the partition of a candidate, and its details where it is close to the incumbent then."""
        self._was_polished.add(chosen)
        solve_partition(self.sims, chosen)
        if self._is_within(chosen, CLOSE):
            move_blocks(self.sims, chosen)
            improve_details(self.sims, chosen, self.sims.candidates[chosen])

    def _to_polish(self) -> list[Candidate]:
        """The incumbent, and of the candidates near it that have not been polished those that take least time and those that
        promise most, in turns; the first time the incumbent alone."""
        own, problem = self.sims.leader, self.outer.problem
        if own is not None and not self._was_polished and not self._is_far_behind():
            return [own]
        values = {
            one: objective_value(problem, found)
            for one, found in (self.sims.candidates.items() if self.climbs else ())
            if one != own and one not in self._was_polished
        }
        near = [one for one in sorted(values, key=lambda one: values[one]) if self._is_within(one, NEAR)]
        for one in near[:ASKED]:
            if one not in self._promises:
                self._promises[one] = self._promise(one)
        known = [one for one in near if self.sims.may_win(self._promises.get(one, NOTHING))]
        promised = sorted(known, key=lambda one: (self._promises[one], values[one]))
        found = sorted(known, key=lambda one: (values[one], self._promises[one]))
        rivals = list(dict.fromkeys(chain.from_iterable(zip(found, promised, strict=True))))[:RIVALS]
        if own is None or self.sims.leading is self._polished or self._is_far_behind():
            return rivals
        return [own, *rivals]

    def _promise(self, chosen: Candidate) -> Value:
        """What no partition of a candidate goes below, by the paths that are known; where there is but one, what details may."""
        problem = self.sims.problem(chosen)
        if problem is None:
            return NOTHING
        if not has_choice(problem) or self.outer.problem.objective == Objective.MEMORY:
            first, second = objective_value(self.outer.problem, self.sims.candidates[chosen])
            return first / CLOSE, second
        return self.sims.relaxed(chosen, problem)

    def _is_within(self, chosen: Candidate, share: float) -> bool:
        """Whether a candidate is so many times as long as the incumbent at most."""
        return objective_value(self.outer.problem, self.sims.candidates[chosen])[0] <= self.value[0] * share

    def _is_far_behind(self) -> bool:
        """Whether something much better than the best strategy here is known elsewhere."""
        best = self.sims.leading
        return best is not None and objective_value(self.outer.problem, best)[0] > self.value[0] * NEAR

    def _start(self) -> Iterator[None]:
        """Simulate easily found partitions of promising variants, so that the rest has something to be measured by; before each it
        may be stopped."""
        alone, looked_at = unpipelined(self.dual.upcoming, self.only, self.breadth)
        self.sims.work += spending.PER_START * looked_at
        for chosen, bound_s in alone[: ALONE_EACH * self.starts]:
            yield
            if bound_s < self.sims.below_s(chosen.mesh.devices):
                self.sims.try_quickly(chosen)
        promises, large, looked_at = starts(self.dual.upcoming, self.only, self.most_actions, self.breadth)
        self.sims.work += spending.PER_START * looked_at
        left, found, in_vain = self.starts, set[object](), False
        for promised in promises:
            fitting = 0
            for chosen, bound_s in promised[:TRIES] if left else ():
                yield
                if not bound_s < self.sims.below_s(chosen.mesh.devices):
                    continue
                if self.sims.try_quickly(chosen) is None:
                    in_vain = True
                    continue
                found.add(chosen.size)
                fitting += 1
                if fitting == EACH or chosen.mesh.pp == 1:
                    break
            left -= fitting > 0
        yield from self._start_large(large)
        if left <= self.starts - ENOUGH or not (in_vain or self.sims.nothing_fits):
            return
        args = self.dual.upcoming, self.only, self.most_actions
        for chosen, bound_s in smallest_first(*args):
            yield
            if left and chosen.size not in found and bound_s < self.sims.below_s(chosen.mesh.devices):
                left -= 1
                if self.sims.try_quickly(chosen) is not None:
                    found.add(chosen.size)
        begun = self.work
        for chosen, _ in smallest_first(*args, by_schedule=True) if self.sims.nothing_fits else ():
            yield
            if not self.sims.nothing_fits or self.work - begun > MOST_SMALLEST:
                return
            self.sims.try_quickly(chosen)

    def _start_large(self, promises: Promises) -> Iterator[None]:
        """Likewise of the most promising schedule that takes long to lay out, where it may be much better than what was found."""
        every = sorted((one for promised in promises for one in promised), key=lambda one: one[1])
        for chosen, bound_s in every[:TRIES]:
            yield
            if not bound_s < self.sims.below_s(chosen.mesh.devices) * MUCH_BETTER:
                return
            if self.sims.try_quickly(chosen) is not None:
                return

    def ended(self, rows: Ints | None = None) -> bool:
        """Search as `run` does; whether to the end."""
        with suppress(Stopped):
            self.run(rows)
            return True
        return False

    def bound(self) -> Value:
        """What nothing that is still open, or was given up, goes below."""
        taken = min((other.bound() for other in self.taken), default=NOTHING)
        return min(self.dual.bound(), taken)

    def may_win(self, bound: Value) -> bool:
        """Whether something with this bound could be better than the incumbent."""
        return self.sims.may_win(bound)

    @property
    def incumbent(self) -> Evaluation | None:
        """The best strategy that was simulated and fits."""
        return self.sims.incumbent

    @property
    def value(self) -> Value:
        """The objective of the incumbent."""
        return self.sims.value

    @property
    def work(self) -> float:
        """Done so far, about milliseconds; the same on every machine."""
        return self.sims.work

    @property
    def seen(self) -> list[Evaluation]:
        """Everything that was simulated."""
        return self.sims.seen

    @property
    def errors(self) -> list[UserError]:
        """Why candidates are no strategies at all."""
        return self.sims.errors

    @property
    def solved(self) -> int:
        """Candidates that were looked at one by one; bounds ruled out the others."""
        return len(self.dual.solved | set(self.sims.candidates)) + sum(other.solved for other in self.taken)

    @property
    def candidates(self) -> int:
        """Variants of the space."""
        return int(self.outer.counts.sum()) + sum(other.candidates for other in self.taken)

    def consider(self, *simulated: Evaluation) -> None:
        """Take a simulated strategy as the incumbent if it fits and is better."""
        self.sims.consider(*simulated)


def after(most_work: float) -> Callable[[Search], None]:
    """A check that stops a search after so much work."""

    def check(search: Search) -> None:
        if search.work >= most_work:
            raise Stopped

    return check
