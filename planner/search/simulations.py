"""What one search has simulated: the best of it, and what all of its parts learn from it.

Both halves of the search simulate through here, so that each has the other's incumbent and critical paths. Every
simulation is held against the bounds that are known of it: one that is below them is a bug of ours, and the answer is
then not called proved.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from autoparallel.errors import UserError
from autoparallel.planner.expand.schedules import rank_of_stage
from autoparallel.planner.problem import NOTHING, Objective, Value, objective_value
from autoparallel.planner.search import spending
from autoparallel.planner.search.bounds.outer import Outer
from autoparallel.planner.search.bounds.paths import PathWeights, weigh
from autoparallel.planner.search.evaluate import TOLERANCE, Evaluation, evaluate, held_by
from autoparallel.planner.search.open import Values
from autoparallel.planner.search.partition.forms import PS
from autoparallel.planner.search.partition.inner import price_candidate, stage_problem
from autoparallel.planner.search.partition.paths import SchedulePaths
from autoparallel.planner.search.partition.problem import (
    Partition,
    StageProblem,
    partition_value,
    with_less_room,
)
from autoparallel.planner.search.partition.quick import proportional, quick_partition
from autoparallel.planner.search.partition.relaxation import relaxed_bound_s
from autoparallel.planner.search.partition.smallest import smallest_partition
from autoparallel.planner.search.partition.unlike import on_devices
from autoparallel.planner.search.space.candidates import Candidate, strategy_of
from autoparallel.planner.search.space.meshes import Bools
from autoparallel.planner.strategy.types import Strategy

FURTHER = 1.3  # times the incumbent up to which weights are sought, as other variants are to be bounded by them, too
WORTH = (
    1.5  # times the incumbent up to which what layers as even as can be take is worth dividing them better
)
MOST_WALKED = 4_000  # actions of a schedule whose paths are weighed for one strategy: some ten milliseconds. Kind: measured
SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)  # on the host that are tried. Kind: choice
ROOMS_TRIED = 5  # partitions tried where memory binds, each with as much more room as the one before lacked


@dataclass(slots=True, kw_only=True)
class Simulations:
    """The incumbent of a search, its value, and the work done so far (`spending`)."""

    outer: Outer
    incumbent: Evaluation | None = None
    leader: Candidate | None = None  # the best of those below, better than what is known elsewhere or not
    value: Value = NOTHING
    work: float = 0.0
    seen: list[Evaluation] = field(default_factory=list)
    candidates: dict[Candidate, Evaluation] = field(
        default_factory=dict
    )  # the best of each that was tried and fits
    errors: list[UserError] = field(default_factory=list)  # why candidates are no strategies at all
    weights: dict[object, list[PathWeights]] = field(default_factory=dict)  # of each schedule's paths
    broken: list[str] = field(default_factory=list)  # simulations below their bounds
    _is_short: bool = False  # of memory: easily found partitions do not fit where others do
    _priced: int = 0  # settings whose prices are counted in the work
    _paths: dict[object, SchedulePaths] = field(default_factory=dict)
    _simulated: dict[tuple[Candidate, Partition], Evaluation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._priced = self.outer.prices.priced

    def count_prices(self) -> None:
        """Count the prices of settings that were made since the last time."""
        priced = self.outer.prices.priced
        self.work += spending.PER_SETTING * len(self.outer.problem.graph.blocks) * (priced - self._priced)
        self._priced = priced

    def spend(self, work: float) -> None:
        """Count work that was done elsewhere."""
        self.work += work

    @property
    def nothing_fits(self) -> bool:
        """Whether nothing is known that fits."""
        return self.incumbent is None and self.value == NOTHING

    def may_win(self, bound: Value) -> bool:
        """Whether something with this bound could be better than the incumbent."""
        if self.outer.problem.objective == Objective.MEMORY:
            return bound < (self.value[0], self.value[1] * (1 - TOLERANCE))
        return bound[0] < self.value[0] * (1 - TOLERANCE)

    def rows_that_may_win(self, bounds: Values) -> Bools:
        """`may_win` of many bounds at once."""
        best, then = self.value
        if self.outer.problem.objective == Objective.MEMORY:
            sooner = bounds.second < then * (1 - TOLERANCE)
            return np.asarray((bounds.first < best) | ((bounds.first == best) & sooner))
        return np.asarray(bounds.first < best * (1 - TOLERANCE))

    def below_s(self, devices: int) -> float:
        """Seconds that a strategy on so many devices must stay below to be better than the incumbent."""
        match self.outer.problem.objective:
            case Objective.MEMORY:
                return inf
            case Objective.COST:
                return self.value[0] * (1 - TOLERANCE) / self.outer.problem.rate_per_s(devices)
            case _:
                return self.value[0] * (1 - TOLERANCE)

    def problem(self, chosen: Candidate) -> StageProblem | None:
        """The stage problem of a candidate with all paths known; None where it is no strategy at all."""
        outer = self.outer
        try:
            priced = price_candidate(outer.problem, outer.chain, outer.book, chosen)
        except UserError as error:
            self.errors.append(error)
            return None
        if outer.problem.is_refused(priced.strategy):
            return None
        self.work += spending.PER_STAGE_PROBLEM + spending.PER_CHUNK * chosen.chunks
        if chosen.schedule_key not in self._paths:
            # Another part of the cluster may have laid it out.
            if not outer.book.expander.knows(priced.strategy):
                self.work += spending.PER_ACTION_LAID_OUT * chosen.actions
            prepared = outer.book.expander.prepared(priced.strategy)
            self._paths[chosen.schedule_key] = SchedulePaths(prepared.timetable, outer.chain.ties)
        states = outer.book.expander.prepared(priced.strategy).states
        paths = self._paths[chosen.schedule_key]
        return stage_problem(
            outer.problem, outer.chain, outer.book, priced, states, outer.capacity_bytes, paths.rows
        )

    def paths(self, chosen: Candidate) -> SchedulePaths:
        """The paths of a candidate's schedule, once it has had a stage problem."""
        return self._paths[chosen.schedule_key]

    def with_paths(self, chosen: Candidate, problem: StageProblem) -> StageProblem:
        """The stage problem with the paths that have been learnt since."""
        placed = on_devices(problem, self._paths[chosen.schedule_key].rows)
        return problem.with_paths(placed)

    def relaxed(self, chosen: Candidate, problem: StageProblem) -> Value:
        """What the linear relaxation of a candidate's stage problem says that no partition goes below."""
        self.work += spending.PER_RELAXATION + spending.PER_TERM_RELAXED * problem.terms
        least_s = relaxed_bound_s(problem, problem.paths)
        return NOTHING if least_s is None else self.outer.problem.value_of(least_s, 0.0, chosen.mesh.devices)

    def simulate(
        self, chosen: Candidate, problem: StageProblem, partition: Partition, bound: Value = (0.0, 0.0)
    ) -> Evaluation:
        """Simulate one partition of a candidate of which a bound is known; it is the incumbent if it fits and is better."""
        if (chosen, partition) in self._simulated:
            return self._simulated[chosen, partition]
        self._count_simulation(chosen)
        strategy = strategy_of(self.outer.problem, chosen, partition)
        found = evaluate(self.outer.book.expander, strategy, self._paths[chosen.schedule_key])
        self._simulated[chosen, partition] = found
        self._hold_against(found, problem, partition, bound)
        self.seen.append(found)
        self.consider(found, chosen=chosen)
        if self.outer.fits(found) and self.may_win(bound):
            self._keep_more_here(chosen, found)
        return found

    def _keep_more_here(self, chosen: Candidate, found: Evaluation) -> None:
        """Simulate a candidate with as little on the host as fits: of shares the space has few."""
        strategy, fixed = found.strategy, self.outer.problem.fixed.offload
        try:
            for name in ("activations", "optimizer"):
                if getattr(fixed, name) is None:
                    strategy = self._with_less(name, strategy)
            if strategy == found.strategy:
                return
            self._count_simulation(chosen)
            kept = evaluate(self.outer.book.expander, strategy)
        except UserError:  # tensor entries that mean nothing there
            return
        self.seen.append(kept)
        self.consider(kept, chosen=chosen)

    def _with_less(self, name: str, strategy: Strategy) -> Strategy:
        """A strategy that fits, with the least share on the host with which it still does; none at all is another candidate."""
        shares = [share for share in SHARES if 0.0 < share < getattr(strategy.offload, name)]

        def with_share(share: float) -> Strategy:
            return replace(strategy, offload=replace(strategy.offload, **{name: share}))

        def fits(share: float) -> bool:
            fewer = with_share(share)
            self.work += spending.PER_STAGE_SIMULATED * strategy.mesh.pp * strategy.pipeline.virtual_stages
            held = held_by(self.outer.book.expander, fewer)
            return not self.outer.problem.is_refused(fewer) and self.outer.fits(held)

        least = bisect_left(shares, True, key=fits)
        return with_share(shares[least]) if least < len(shares) else strategy

    def _count_simulation(self, chosen: Candidate) -> None:
        self.work += spending.PER_SIMULATION + spending.PER_ACTION_WALKED * chosen.actions
        self.work += spending.PER_BLOCK_SIMULATED * len(self.outer.chain.kinds)
        self.work += spending.PER_STAGE_SIMULATED * chosen.chunks

    def _hold_against(
        self, found: Evaluation, problem: StageProblem, partition: Partition, bound: Value
    ) -> None:
        """`simulated >= bound`, for the bound of all partitions and that of this one."""
        least_s = partition_value(problem, partition) / PS
        if found.step_time_s < least_s * (1 - TOLERANCE):
            self.broken.append(f"{found.step_time_s} s is below the paths' {least_s} s: {found.strategy}")
        if self.outer.fits(found):
            value = objective_value(self.outer.problem, found)
            if value[0] < bound[0] * (1 - TOLERANCE):
                self.broken.append(f"{value[0]} is below the bound {bound[0]}: {found.strategy}")

    def try_quickly(self, chosen: Candidate, bound: Value = (0.0, 0.0)) -> Evaluation | None:
        """Simulate easily found partitions of a candidate: layers as even as can be, or as its schedule likes them best; the
        better one. None where none is found that fits."""
        problem = self.problem(chosen)
        if problem is None:
            return None
        found = self._with_room(chosen, problem, bound)
        if problem.likely is not None or problem.blocks is not None or chosen.chunks == 1:
            return found
        near = found is not None and found.step_time_s < self.below_s(chosen.mesh.devices) * WORTH
        if near and chosen.schedule_key not in self.weights and chosen.actions <= MOST_WALKED:
            self.weigh(chosen, problem)
        known = self.weights.get(chosen.schedule_key)
        if not known:
            return found
        layers = known[0].layers
        whole = len(problem.kinds) / sum(layers)
        likely = proportional([n * whole for n in layers], problem.least, problem.most)
        other = self._with_room(chosen, replace(problem, likely=likely), bound)
        if found is None or (other is not None and other.step_time_s < found.step_time_s):
            return other
        return found

    def try_elsewhere(self, chosen: Candidate, strategy: Strategy) -> None:
        """Simulate what was the best strategy of a candidate in another search, of the same devices otherwise placed."""
        self._count_simulation(chosen)
        try:
            found = evaluate(self.outer.book.expander, strategy)
        except UserError as error:
            self.errors.append(error)
            return
        self.seen.append(found)
        self.consider(found, chosen=chosen)

    def weigh(self, chosen: Candidate, problem: StageProblem) -> None:
        """Weigh the paths of a candidate's schedule as bounds it best, for all of its schedule to be bounded by; how its
        layers are divided then is a good start for all of them, too."""
        below_s = self.below_s(chosen.mesh.devices)
        weights, planes = weigh(problem, self.paths(chosen), below_s * FURTHER)
        walked = spending.PER_ACTION_PLANNED * chosen.actions + spending.PER_CHUNK_PLANNED * chosen.chunks
        self.work += planes * (spending.PER_PLANE + walked)
        known = self.weights.setdefault(chosen.schedule_key, [])
        if weights is not None:
            known.append(weights)

    def _with_room(self, chosen: Candidate, problem: StageProblem, bound: Value) -> Evaluation | None:
        """Simulate a quick partition; where it does not fit, as rows bound memory from below, one that leaves as much more
        room."""
        home = rank_of_stage(chosen.schedule, chosen.mesh.pp, chosen.virtual_stages)
        whole = problem
        for _ in range(ROOMS_TRIED):
            self.work += spending.PER_TERM_FILLED * problem.terms
            partition = quick_partition(problem)
            if partition is None and (self.nothing_fits or self._is_short):
                partition = smallest_partition(problem, self.spend)
                self._is_short |= partition is not None
            if partition is None:
                return None
            found = self.simulate(chosen, whole, partition, bound)
            if self.outer.fits(found):
                return found
            if self.outer.excess_bytes(found) <= 0:
                return None
            problem = with_less_room(problem, home, self.outer.lacking_bytes(found))
        return None

    def consider(self, *simulated: Evaluation, chosen: Candidate | None = None) -> None:
        """Take a simulated strategy as the incumbent if it fits and is better."""
        for found in simulated:
            if not self.outer.fits(found):
                continue
            value = objective_value(self.outer.problem, found)
            if chosen is not None:
                best = self.candidates.get(chosen)
                if best is None or value < objective_value(self.outer.problem, best):
                    self.candidates[chosen] = found
                    self._lead(chosen, value)
            if value < self.value:
                self.incumbent, self.value = found, value

    def _lead(self, chosen: Candidate, value: Value) -> None:
        if self.leader is None or value < objective_value(self.outer.problem, self.candidates[self.leader]):
            self.leader = chosen

    @property
    def leading(self) -> Evaluation | None:
        """The strategy of the leader."""
        return None if self.leader is None else self.candidates[self.leader]
