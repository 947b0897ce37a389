"""The dual half of the search: what no strategy goes below, the most promising parts of the space first.

What is open is ordered by its bound: shapes, then variants of some (bounded as a whole, then rank by rank, then where
they are placed), then single candidates, whose stage problem CP-SAT bounds. A candidate that still leads is simulated;
its critical path becomes a cut of the stage problems of its schedule, and it goes back with the bound that it then has.
The bound of the whole search is that of the first item. Nothing open is below the incumbent: the incumbent is proved.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil, inf

import numpy as np

from autoparallel.errors import UserError
from autoparallel.planner.problem import NOTHING, Objective, Value
from autoparallel.planner.search import spending
from autoparallel.planner.search.bounds.outer import (
    Outer,
    bound_alike,
    bound_families,
    bound_variants,
    families_of,
    quickly_bounded,
    rows_of,
    spread_families,
)
from autoparallel.planner.search.bounds.ranks import rates_of
from autoparallel.planner.search.bounds.variants import Bounds
from autoparallel.planner.search.open import (
    FamilyRun,
    Item,
    Known,
    Node,
    Run,
    Upcoming,
    Values,
    scheduled_alike,
    shape_values,
    values_of,
)
from autoparallel.planner.search.partition.forms import PS
from autoparallel.planner.search.partition.problem import has_choice
from autoparallel.planner.search.partition.quick import quick_partition
from autoparallel.planner.search.partition.solve import EFFORT, SHORT, solve_for_memory, solve_stages
from autoparallel.planner.search.simulations import Simulations
from autoparallel.planner.search.space.build import Variants
from autoparallel.planner.search.space.candidates import Candidate, candidate
from autoparallel.planner.search.space.meshes import Bools, Ints
from autoparallel.planner.search.space.shapes import Shapes

SHAPES_AT_ONCE = 192  # shapes expanded together: some ten thousand variants, a few tens of milliseconds
AHEAD = 4096  # shapes that are bounded together, in the end, before some of them are expanded
FAMILIES_AT_ONCE = 64  # of which all variants are bounded together
ASKED_AT_ONCE = 32  # settings that are priced together
VARIANTS_AT_ONCE = 1024  # variants bounded together rank by rank, those with the least bounds first
MOST_WEIGHTS = 12  # of one schedule's paths, each the best ones for some variant
TIGHTER = 0.005  # share by which a linear program must be above the paths' bound for its weights to be wanted
MOST_CUTS = 12  # partitions of one candidate that are simulated for the paths that they show, as long as others are open


@dataclass(slots=True, kw_only=True)
class Dual:
    """What is open of a space, best bound first."""

    sims: Simulations
    effort: float = EFFORT  # of each stage problem
    only: Callable[[Variants, Shapes], Bools] | None = None  # variants to look at; all if None
    most_actions: int | None = None  # variants with larger schedules are left open
    at_once: int = SHAPES_AT_ONCE
    solved: set[Candidate] = field(default_factory=set)
    upcoming: Upcoming = field(init=False)
    _ahead: int = SHAPES_AT_ONCE  # shapes that are bounded together now: a short search looks at few
    _heap: list[tuple[Value, int, Item]] = field(default_factory=list)
    _undecided: list[tuple[Value, int, Item]] = field(
        default_factory=list
    )  # looked at again when no other is open
    _pushed: int = 0
    _current: Value = NOTHING
    _given_up: Value = NOTHING  # stage problems that the solver did not decide in its time

    def __post_init__(self) -> None:
        self.upcoming = Upcoming(outer=self.sims.outer)

    @property
    def outer(self) -> Outer:
        return self.sims.outer

    def open(self, rows: Ints | None = None) -> None:
        """From now on the shapes `rows` (all of them if None) count in the bound."""
        self.upcoming.begin(rows)

    def step(self) -> bool:
        """Look more closely at what has the least bound; False where nothing that is open may win."""
        self._current = NOTHING
        if len(self.upcoming.rows) and (not self._heap or self.upcoming.value < self._heap[0][0]):
            self._expand()
            return True
        heap = self._heap if self._heap and self.sims.may_win(self._heap[0][0]) else self._undecided
        if not heap or not self.sims.may_win(heap[0][0]):
            return False
        self._current, _, item = heapq.heappop(heap)
        if isinstance(item, FamilyRun):
            self._spread(item)
        elif isinstance(item, Run):
            self._look_into(item)
        else:
            self._simulate(item)
        self._current = NOTHING
        return True

    def may_step(self) -> bool:
        """Whether something that is open may win."""
        return self.sims.may_win(self.bound())

    def bound(self) -> Value:
        """What nothing that is still open, or was given up, goes below."""
        undecided = self._undecided[0][0] if self._undecided else NOTHING
        return min(self.lead, undecided, self._current, self._given_up)

    @property
    def lead(self) -> Value:
        """The least bound of what is looked at next."""
        return min(self._heap[0][0] if self._heap else NOTHING, self.upcoming.value)

    def _push(self, bound: Value, item: Item, heap: list[tuple[Value, int, Item]] | None = None) -> None:
        self._pushed += 1
        heapq.heappush(self._heap if heap is None else heap, (bound, self._pushed, item))

    def _expand(self) -> None:
        """Bound the variants of the next shapes; keep those that could win."""
        if not self.sims.may_win(self.upcoming.value):
            self.upcoming.clear()
            return
        self._current = self.upcoming.value
        rows = self._priced(self.upcoming.take(self._ahead))
        self._ahead = min(2 * self._ahead, AHEAD)
        if len(rows):
            self._families(rows)

    def _families(self, rows: Ints) -> None:
        """Bound the families of some shapes; keep those that could win."""
        found = families_of(self.outer, rows)
        bounds = self.outer.bounds.take(found.shape)
        values = values_of(self.outer.problem, bounds, self.outer.space.shapes.devices[found.shape])
        self._push_families(self._bounded(FamilyRun(families=found, values=values)))

    def _bounded(self, run: FamilyRun) -> FamilyRun:
        """The families of a run that may win, the one with the least bound first, none below the bound that it had."""
        outer, found = self.outer, run.families
        values, below_s = run.values, self._below_all_s(found.shape)
        if below_s < inf:
            ranks = float(outer.space.shapes.pp[found.shape].sum())
            self.sims.work += spending.PER_PASS + spending.PER_FAMILY_RANK * ranks
            bounds = Bounds(time_s=bound_families(outer, found, below_s), memory_bytes=np.zeros(len(found)))
            values = values.no_less_than(
                values_of(outer.problem, bounds, outer.space.shapes.devices[found.shape])
            )
        order = values.order()
        order = order[self.sims.rows_that_may_win(values.take(order))]
        return FamilyRun(families=found.take(order), values=values.take(order))

    def _push_families(self, run: FamilyRun) -> None:
        """Put families among the open ones, those whose blocks communicate with neighbours apart from others."""
        near = run.families.placed == 0
        for part in (run.take(near), run.take(~near)):
            if len(part):
                self._push(part.bound, part)

    def _are_priced(self, run: FamilyRun) -> Bools:
        """Which families have prices of where their blocks communicate."""
        far, shapes, found = self.outer.far, self.outer.space.shapes, run.families
        pairs = zip(found.shape.tolist(), found.placed.tolist(), strict=True)
        return np.array([not at or self._by_memory or far.knows(shapes, row, at) for row, at in pairs])

    def _priced_far(self, run: FamilyRun) -> bool:
        """Price blocks where the run's first family has them communicate, and bound all families again that this tells of;
        False where nothing is told that is not known."""
        outer, shapes, found = self.outer, self.outer.space.shapes, run.families
        owner, at = int(found.shape[0]), int(found.placed[0])
        if self._are_priced(run.take(slice(1))).all():
            return False
        row = outer.far.widest(shapes, np.unique(found.shape[found.placed == at]), owner)
        told = outer.far.told_by(shapes, found.shape, found.placed, row, at)
        self._push_families(run.take(~told))
        self.sims.work += spending.PER_PLACE
        first = spread_families(outer, found.take(slice(1)))[0]
        try:
            outer.far.price(candidate(outer.space, first, 0).mesh, shapes, row, at)
        except UserError as error:
            self.sims.errors.append(error)
            return True
        self._push_families(self._bounded(run.take(told)))
        return True

    def _spread(self, run: FamilyRun) -> None:
        """Bound the variants of the first families of a run whose blocks are priced where they communicate; the rest of it goes
        back."""
        if self._priced_far(run):
            return
        priced = np.zeros(len(run), dtype=np.bool_)
        priced[:FAMILIES_AT_ONCE] = self._are_priced(run.take(slice(FAMILIES_AT_ONCE)))
        self._push_families(run.take(~priced))
        run = run.take(priced)
        found, of = spread_families(self.outer, run.families)
        self.sims.work += spending.PER_PASS + spending.PER_VARIANT * len(found)
        bounds = quickly_bounded(self.outer, found)
        open_ = np.isfinite(bounds.time_s)
        if self.only is not None:
            open_ &= self.only(found, self.outer.space.shapes.take(found.shape))
        self._queue(found.take(open_), bounds.take(open_), Known.WHOLE, run.values.take(of[open_]))

    def _priced(self, rows: Ints) -> Ints:
        """Of these shapes the first ones that are priced and still lead; the rest goes back, with the bounds it has now."""
        outer, known = self.outer, self.outer.prices.knows(rows)
        if not known.all():
            unknown = rows[~known]
            _, first = np.unique(outer.prices.setting_of[unknown], return_index=True)
            outer.ask(unknown[np.sort(first)[:ASKED_AT_ONCE]])
        ready = outer.prices.knows(rows) & (outer.bounds.memory_bytes[rows] <= outer.capacity_bytes)
        below_s = self._below_all_s(rows)
        if below_s < inf:
            ranks = bound_alike(outer, rows[ready], below_s)
            if ranks:
                self.sims.work += spending.PER_PASS + spending.PER_FAMILY_RANK * ranks
                self.upcoming.refresh(self.sims.rows_that_may_win)
        values = shape_values(outer, rows)
        open_ = self.sims.rows_that_may_win(values)
        ready &= open_ & (values.first <= self.upcoming.value[0])
        ready[np.flatnonzero(ready)[self.at_once :]] = False
        self.upcoming.put_back(rows[open_ & ~ready])
        return rows[ready]

    def _queue(self, found: Variants, bounds: Bounds, known: Known, before: Values | None = None) -> None:
        """Put variants among the open ones, best first, none of them below the bounds that it had `before`; those that cannot
        win are dropped."""
        space = self.outer.space
        values = values_of(self.outer.problem, bounds, space.shapes.devices[found.shape])
        values = values if before is None else values.no_less_than(before)
        rows = values.order()
        rows = rows[self.sims.rows_that_may_win(values.take(rows))]
        self._push_run(Run(variants=found.take(rows), values=values.take(rows), known=known))

    def _push_run(self, run: Run) -> None:
        if len(run):
            self._push(run.bound, run)

    @property
    def _by_memory(self) -> bool:
        return self.outer.problem.objective == Objective.MEMORY

    def _below_all_s(self, rows: Ints) -> float:
        """Seconds that a variant of one of these shapes must stay below to be better than the incumbent."""
        devices = self.outer.space.shapes.devices[rows]
        return max((self.sims.below_s(int(d)) for d in np.unique(devices)), default=0.0)

    def _look_into(self, run: Run) -> None:
        """Bound variants more closely, or give the first one of a run its stage problem; the rest of the run goes back."""
        if run.known < Known.RANKS:
            self._bound_ranks(run)
        elif not self._bound_paths(run):
            self._push_run(run.take(slice(1, None)))
            self._open(run.bound, candidate(self.outer.space, run.variants, 0))

    def _bound_paths(self, run: Run) -> bool:
        """Bound the variants of the first one's schedule by the paths of it; False where that was done or says nothing."""
        chosen = candidate(self.outer.space, run.variants, 0)
        if self._by_memory or chosen.mesh.pp == 1:
            return False
        if self.most_actions is not None and chosen.actions > self.most_actions:
            return False
        key = chosen.schedule_key
        if key not in self.sims.weights:
            problem = self.sims.problem(chosen)
            if problem is None:
                return False
            self.sims.weigh(chosen, problem)
        every = self.sims.weights[key]
        if run.known == Known.PATHS and run.weighed == len(every):
            return False
        same = scheduled_alike(self.outer.space.shapes, run)
        self._push_run(run.take(~same))
        run = run.take(same)
        rows = rows_of(self.outer, run.variants)
        held, room = rates_of(self.outer.problem, rows.shapes, rows.zero), self.outer.capacity_bytes
        each_s = [one.bounds_s(rows, self.outer.chain, held, room) for one in every[run.weighed :]]
        bounds_s = np.max([np.zeros(len(run)), *each_s], axis=0)
        self.sims.work += spending.PER_PASS + spending.PER_RANK * len(run) * chosen.chunks * len(each_s)
        devices = self.outer.space.shapes.devices[run.variants.shape]
        rates = np.array([self.outer.problem.value_of(1.0, 0.0, int(d))[0] for d in devices])
        values = Values(first=np.maximum(run.values.first, bounds_s * rates), second=run.values.second)
        order = values.order()
        order = order[self.sims.rows_that_may_win(values.take(order))]
        run = replace(run, values=values, known=Known.PATHS, weighed=len(every))
        self._push_run(run.take(order))
        return True

    def _bound_ranks(self, run: Run) -> None:
        """Bound the first variants of a run rank by rank; the rest of it goes back."""
        self._push_run(run.take(slice(VARIANTS_AT_ONCE, None)))
        found = run.variants.take(slice(VARIANTS_AT_ONCE))
        ranks = float(self.outer.space.shapes.pp[found.shape].sum())
        self.sims.work += spending.PER_PASS + spending.PER_RANK * ranks
        bounds = bound_variants(self.outer, found, self._below_all_s(found.shape), memory=self._by_memory)
        open_ = np.isfinite(bounds.time_s)
        self._queue(found.take(open_), bounds.take(open_), Known.RANKS)

    def _open(self, bound: Value, chosen: Candidate) -> None:
        """Give a candidate its stage problem: the first one of a schedule is simulated to learn a path, too."""
        if self.most_actions is not None and chosen.actions > self.most_actions:
            self._given_up = min(self._given_up, bound)
            return
        self.solved.add(chosen)
        problem = self.sims.problem(chosen)
        if problem is None:
            return
        if not has_choice(problem):  # one partition, which decides
            self.sims.try_quickly(chosen, bound)
            return
        if not self._by_memory:
            relaxed = self.sims.relaxed(chosen, problem)
            known = self.sims.weights.get(chosen.schedule_key)
            if known and len(known) < MOST_WEIGHTS and relaxed[0] > bound[0] * (1 + TIGHTER):
                self.sims.weigh(chosen, problem)
            bound = max(bound, relaxed)
            if not self.sims.may_win(bound):
                return
            node = Node(chosen=chosen, bound=bound, problem=problem, relaxed=True)
            if bound > self.lead:  # something else is looked at sooner
                self._push(bound, node)
                return
            self._begin(node)
            return
        self._resolve(Node(chosen=chosen, bound=bound, problem=problem), SHORT)

    def _begin(self, node: Node) -> None:
        """Simulate an easily found partition of a candidate that leads, then give its stage problem to the solver."""
        chosen, problem = node.chosen, node.problem
        if chosen not in self.sims.candidates:
            self.sims.try_quickly(chosen, node.bound)
        problem = self.sims.with_paths(chosen, problem)
        self._resolve(replace(node, problem=problem, relaxed=False), SHORT)

    def _resolve(self, node: Node, share: float = 1.0) -> None:
        """Solve a node's stage problem with a share of the effort; it goes back with the bound that it has now."""
        chosen, bound, problem, excluded = node.chosen, node.bound, node.problem, node.excluded
        effort = self.effort * share
        if not self._by_memory and not excluded:
            bound = max(bound, self.sims.relaxed(chosen, problem))
            if not self.sims.may_win(bound):
                return
        if self._by_memory:
            least = int(min(self.sims.value[0], float(problem.capacity_bytes))) + 1
            answer = solve_for_memory(problem, excluded, least, effort, self.sims.spend)
            value = (max(bound[0], float(answer.bound)), bound[1]) if answer else NOTHING
        else:
            below_s = self.sims.below_s(chosen.mesh.devices)
            below = ceil(below_s * PS) if below_s < inf else None
            to_solve = node.to_solve
            answer = solve_stages(
                to_solve, excluded=excluded, below=below, effort=effort, spend=self.sims.spend,
                hint=quick_partition(to_solve) if not excluded else None, fitted=node.fits,
            )  # fmt: skip
            value = NOTHING
            if answer is not None:
                value = max(bound, self.outer.problem.value_of(answer.bound / PS, 0.0, chosen.mesh.devices))
        if answer is None or not self.sims.may_win(value):
            return
        node = replace(node, bound=value, partition=answer.partition)
        if answer.partition is None and share == 1.0:
            self._given_up = min(self._given_up, value)
        elif answer.partition is None or len(excluded) >= MOST_CUTS:
            self._push(value, node, self._undecided)
        else:
            self._push(value, node)

    def _simulate(self, node: Node) -> None:
        """Simulate a node's partition, learn from it, and solve again for what is left."""
        if node.relaxed:
            self._begin(node)
            return
        if node.partition is None:
            self._resolve(node)
            return
        found = self.sims.simulate(node.chosen, node.problem, node.partition, node.bound)
        if not has_choice(node.problem):
            return
        excluded = (*node.excluded, node.partition)
        problem, fits = self.sims.with_paths(node.chosen, node.problem), node.fits and self.outer.fits(found)
        self._resolve(replace(node, problem=problem, excluded=excluded, fits=fits), SHORT)
