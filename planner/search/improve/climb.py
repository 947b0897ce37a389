"""Local search: the neighbours of the best strategies simulated so far, until none is better.

Each step takes the best strategy whose neighbourhood has not been looked at, out of the `BEAM` best, and simulates of its
neighbours those that promise most. Bounds order them and drop those that cannot win; where bounds are weak, simulation
decides: most of all between schedules, where links are slow. So its own shape is tried under each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from autoparallel.planner.problem import Objective, Value, objective_value
from autoparallel.planner.search import spending
from autoparallel.planner.search.bounds.outer import bound_variants, quickly_bounded
from autoparallel.planner.search.improve.neighbours import beside, key_changed, neighbours, one_key_apart
from autoparallel.planner.search.improve.starts import are_open, first_of_each, in_turns
from autoparallel.planner.search.open import shape_values, values_of
from autoparallel.planner.search.simulations import Simulations
from autoparallel.planner.search.space.build import SCHEDULES, Variants, variants
from autoparallel.planner.search.space.candidates import Candidate, candidate, shape_row
from autoparallel.planner.search.space.meshes import Bools, Ints
from autoparallel.planner.search.space.shapes import Shapes
from autoparallel.planner.strategy.types import Offload

BEAM = 3  # strategies of different shapes whose neighbours are looked at
NEAR = 1.6  # times as long as the incumbent at most: the best of each size of pp, tp and cp, whose neighbours are, too
SCHEDULES_EACH = 3  # of a neighbouring shape, that are simulated
VARIANTS_EACH = 2  # of the shape itself, under each schedule: numbers of chunks, most of all
MOST_TRIED = 16  # simulations of one step, of the shape itself and of its neighbours
MOST_KEYS = 32  # simulations of what differs from one strategy in one key
MOST_WORK = 600.0  # of these simulations: schedules with tens of thousands of actions take long to lay out. Kind: choice
MOST_LOOKS = 6  # at the neighbours of one shape, each time at those that promise most of what is left
MOST_ASKED = 64  # shapes whose prices are made for one step, those that promise most
MOST_VARIANTS = 300_000  # of a step that are bounded as a whole, those of the shapes that promise most
MOST_BOUNDED = 4096  # variants of a step that are bounded rank by rank
MOST_ACTIONS = 40_000  # of a schedule that is simulated here: a third of a second. Kind: measured


@dataclass(slots=True, kw_only=True)
class Climb:
    """A local search over the candidates of a space."""

    sims: Simulations
    only: Callable[[Variants, Shapes], Bools] | None = None
    most_actions: int | None = None
    _looks: Counter[int] = field(default_factory=Counter)  # at the neighbours of each shape
    _scheduled: set[int] = field(default_factory=set)  # shapes that were tried under every schedule
    _tried: set[Candidate] = field(default_factory=set)
    _varied: set[Candidate] = field(default_factory=set)  # key by key

    def step(self, *, again: bool = False) -> bool:
        """Look at one more neighbourhood, or `again` at what is left of one; False where those of the best strategies have all
        been seen."""
        row = self._next()
        if row is None or self._looks[row] >= (MOST_LOOKS if again else 1):
            return False
        self._try_schedules(row)
        near = self._expanded(neighbours(self.sims.outer.space.shapes, row))
        promising = self._promising(near, 1, SCHEDULES_EACH)
        self._looks[row] = self._looks[row] + 1 if promising else MOST_LOOKS
        self._try(promising)
        return True

    def try_schedules(self) -> None:
        """Simulate the shape of the best strategy under every schedule."""
        row = self._row(self.sims.leader) if self.sims.leader is not None else None
        if row is not None:
            self._try_schedules(row)

    def try_keys(self, chosen: Candidate) -> None:
        """Simulate what differs from a candidate in one key alone, whatever else promises more: bounds of partial
        recomputation and of sharding are weak, and hide it from `step`."""
        row = self._row(chosen) if chosen not in self._varied else None
        self._varied.add(chosen)
        if row is None:
            return
        space = self.sims.outer.space
        found = self._expanded(np.array([row, *one_key_apart(space.shapes, row)]))
        key = key_changed(space, found, row, chosen)
        found, key = found.take(key >= 0), key[key >= 0]
        self._try(self._promising(found, len(found), len(SCHEDULES), MOST_KEYS, turns=key))

    def try_chunks(self, chosen: Candidate) -> None:
        """Simulate a candidate with other numbers of chunks, which bounds without a partition hardly tell apart."""
        row = self._row(chosen)
        if row is None:
            return
        found = self._expanded(np.array([row]))
        other = found.virtual_stages != chosen.virtual_stages
        other &= (found.schedule == SCHEDULES.index(chosen.schedule)) & beside(
            self.sims.outer.space, found, row, chosen
        )
        self._try(self._promising(found.take(other), len(found), 1))

    def try_others(self) -> bool:
        """`try_keys` of the best strategy of one more size of pp, tp and cp that is near the incumbent; False where all have
        been."""
        best_of: dict[tuple[int, int, int], Candidate] = {}
        for chosen in self._ranked():
            if self._is_far(chosen):
                break
            best_of.setdefault(chosen.size, chosen)
        new = next((chosen for chosen in best_of.values() if chosen not in self._varied), None)
        if new is not None:
            self.try_keys(new)
        return new is not None

    def _ranked(self) -> list[Candidate]:
        """What was simulated and fits, the best first."""
        problem, found = self.sims.outer.problem, self.sims.candidates
        return sorted(found, key=lambda one: objective_value(problem, found[one]))

    def _is_far(self, chosen: Candidate) -> bool:
        """Whether a candidate is not near the incumbent."""
        value = objective_value(self.sims.outer.problem, self.sims.candidates[chosen])
        return value[0] > self.sims.value[0] * NEAR

    def _expanded(self, rows: Ints) -> Variants:
        """All variants of the shapes that may fit."""
        outer = self.sims.outer
        rows = self._open(rows)
        known = outer.prices.knows(rows)
        asked = outer.best_first(rows[~known], MOST_ASKED)
        outer.ask(asked)
        rows = self._open(np.concatenate([rows[known], asked]))
        rows = outer.best_first(rows[np.isfinite(outer.bounds.time_s[rows])], len(rows))
        return variants(outer.space, rows[np.cumsum(outer.counts[rows]) <= MOST_VARIANTS])

    def _open(self, rows: Ints) -> Ints:
        """Of some shapes those that may fit and win, by what is known of their prices."""
        outer = self.sims.outer
        rows = rows[outer.bounds.memory_bytes[rows] <= outer.capacity_bytes]
        return np.asarray(rows[self.sims.rows_that_may_win(shape_values(outer, rows))])

    def _try_schedules(self, row: int) -> None:
        if row not in self._scheduled:
            self._scheduled.add(row)
            self._try(self._promising(self._expanded(np.array([row])), VARIANTS_EACH, len(SCHEDULES)))

    def _try(self, promising: list[tuple[Candidate, Value]]) -> None:
        began = self.sims.work
        for chosen, bound in promising:
            if self.sims.work - began > MOST_WORK:
                return  # the others are looked at with what is left of their neighbourhoods
            self._tried.add(chosen)
            if self.sims.may_win(bound) and not self._offloads_needlessly(chosen):
                self.sims.try_quickly(chosen, bound)

    def _row(self, chosen: Candidate) -> int | None:
        """A candidate's shape."""
        shapes = self.sims.outer.space.shapes
        return shape_row(
            shapes, chosen.mesh, chosen.micro, chosen.sequence_parallel, chosen.mode, chosen.offload
        )

    def _offloads_needlessly(self, chosen: Candidate) -> bool:
        """Whether the same with less on the host was simulated and fits, and recomputes no block for it: copies only take
        time."""
        less = (
            replace(chosen, offload=Offload(optimizer=o, activations=a))
            for o in (0.0, chosen.offload.optimizer)
            for a in (0.0, chosen.offload.activations)
        )
        known = (self.sims.candidates[one] for one in less if one != chosen and one in self.sims.candidates)
        return any(not any(found.strategy.recompute.per_stage) for found in known)

    def _next(self) -> int | None:
        """The shape to look at: of the `BEAM` best strategies, then of the best of each size of pp, tp and cp that is near them,
        then of the former the one that was looked at least often."""
        rows: dict[int, None] = {}
        best_of: dict[tuple[int, int, int], int] = {}
        for chosen in self._ranked():
            row = self._row(chosen)
            if row is None or row in rows:
                continue
            if len(rows) >= BEAM and self._is_far(chosen):
                break
            rows[row] = None
            best_of.setdefault(chosen.size, row)
        beam = list(rows)[:BEAM]
        new = (row for row in (*beam, *best_of.values()) if not self._looks[row])
        return next(new, min(beam, key=lambda row: self._looks[row], default=None))

    def _promising(
        self, found: Variants, each: int, schedules: int, most: int = MOST_TRIED, turns: Ints | None = None
    ) -> list[tuple[Candidate, Value]]:
        """Of these variants those that could win, the least bound first: of each shape the best few `schedules`, of each of
        these the best `each`; at most `most`. Those with the same number among `turns` take turns with others."""
        outer = self.sims.outer
        shapes = outer.space.shapes
        bounds = quickly_bounded(outer, found)
        self.sims.work += spending.PER_VARIANT * len(found)
        open_ = are_open(outer, found, bounds, self.only)
        open_ &= outer.space.actions(found) <= (self.most_actions or MOST_ACTIONS)
        values = values_of(outer.problem, bounds, shapes.devices[found.shape])
        kept = np.flatnonzero(open_ & self.sims.rows_that_may_win(values))
        kept = kept[np.argsort(values.first[kept], kind="stable")][:MOST_BOUNDED]
        if not len(kept):
            return []
        found, turns = found.take(kept), turns[kept] if turns is not None else None
        self.sims.work += spending.PER_PASS + spending.PER_RANK * float(shapes.pp[found.shape].sum())
        below_s = max(self.sims.below_s(int(d)) for d in np.unique(shapes.devices[found.shape]))
        by_memory = outer.problem.objective == Objective.MEMORY
        bounds = bound_variants(outer, found, below_s, memory=by_memory)
        values = values_of(outer.problem, bounds, shapes.devices[found.shape])
        order = values.order()
        order = order[np.isfinite(values.first[order]) & self.sims.rows_that_may_win(values.take(order))]
        order = first_of_each(found.shape[order] * len(SCHEDULES) + found.schedule[order], order, each)
        order = first_of_each(found.shape[order], order, each * schedules)
        if turns is not None:
            order = in_turns(turns[order], order)
        every = ((candidate(outer.space, found, int(i)), values.at(int(i))) for i in order)
        new = (one for one in every if one[0] not in self._tried and one[0] not in self.sims.candidates)
        return list(islice(new, most))
