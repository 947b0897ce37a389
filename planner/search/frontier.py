"""Best bound first: the open parts of the space, ordered by what they could still be worth."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, inf

import numpy as np

from autoparallel.errors import UserError
from autoparallel.planner.expand.axes import tensor_stride
from autoparallel.planner.problem import NOTHING, Objective, Value, objective_value
from autoparallel.planner.search import spending
from autoparallel.planner.search.bounds.outer import Outer, bound_variants, expand_quickly, refined_bounds
from autoparallel.planner.search.bounds.variants import Bounds
from autoparallel.planner.search.dives import promising
from autoparallel.planner.search.evaluate import TOLERANCE, Evaluation, evaluate
from autoparallel.planner.search.nearby import improve, leave_room
from autoparallel.planner.search.open import Known, Node, Run, Upcoming, Values, priced_alike, values_of
from autoparallel.planner.search.space.build import Shapes, Variants
from autoparallel.planner.search.space.candidates import Candidate, candidate, strategy_of
from autoparallel.planner.search.space.meshes import Bools, Ints
from autoparallel.planner.search.stages.deals import quick_deal
from autoparallel.planner.search.stages.forms import PS
from autoparallel.planner.search.stages.inner import price_candidate, stage_problem, with_paths
from autoparallel.planner.search.stages.problem import Deal, Row, StageProblem, has_choice
from autoparallel.planner.search.stages.rows import path_row
from autoparallel.planner.search.stages.solve import EFFORT, solve_for_memory, solve_stages
from autoparallel.planner.search.twins import Twins

SHAPES_AT_ONCE = 192  # shapes expanded together: some ten thousand variants, a few tens of milliseconds
VARIANTS_AT_ONCE = 1024  # variants bounded together rank by rank, those with the least bounds first
MUCH = 0.005  # share by which a stage problem promises more than the incumbent, to be simulated at once
NEAR = 0.15  # share by which a simulated strategy may be slower than the incumbent to have its deal improved
DIVES = 12  # strategies simulated before the search proper
SHORT = 0.1  # of the effort, for a first look at a stage problem


class Stopped(Exception):
    """A limit ended the search."""


@dataclass(slots=True, kw_only=True)
class Frontier:
    """The state of a search. `check` is called before every step and raises `Stopped` at a limit."""

    outer: Outer
    check: Callable[[Frontier], None]
    effort: float = EFFORT  # of each stage problem
    dives: int = DIVES  # strategies simulated before the search proper, to have something to measure by
    only: Callable[[Variants, Shapes], Bools] | None = None  # variants to look at; all if None
    most_actions: int | None = None  # variants with larger schedules are left open
    at_once: int = SHAPES_AT_ONCE
    most_groups: int | None = None  # sizes of pp, tp and cp that are looked at before the search proper
    incumbent: Evaluation | None = None
    value: Value = NOTHING
    work: float = 0.0  # done so far, about milliseconds; the same on every machine
    seen: list[Evaluation] = field(default_factory=list)
    errors: list[UserError] = field(default_factory=list)  # why candidates are no strategies at all
    taken: list[Frontier] = field(
        default_factory=list
    )  # searches of more of the space that belong to this one
    _heap: list[tuple[Value, int, Node | Run]] = field(default_factory=list)
    _undecided: list[tuple[Value, int, Node | Run]] = field(
        default_factory=list
    )  # solved again when no other is open
    _pushed: int = 0
    _upcoming: Upcoming = field(init=False)
    _current: Value = NOTHING
    _given_up: Value = NOTHING  # stage problems that the solver did not decide in its time
    _paths: dict[object, list[Row]] = field(default_factory=dict)
    _twins: Twins = field(init=False)
    _solved: set[Candidate] = field(default_factory=set)
    _simulated: dict[tuple[Candidate, Deal], Evaluation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._twins = Twins(self.outer)
        self._upcoming = Upcoming(outer=self.outer)

    def open(self, rows: Ints | None = None) -> None:
        """From now on the shapes `rows` (all of them if None) count in the bound."""
        self._upcoming.begin(rows)

    def run(self, rows: Ints | None = None) -> None:
        """Search the shapes `rows` (all of them if None) to the end."""
        self.open(rows)
        if self.dives:
            self._dive()
        while True:
            self._current = NOTHING
            self.check(self)
            if len(self._upcoming.rows) and (not self._heap or self._upcoming.value < self._heap[0][0]):
                self._expand()
                continue
            heap = self._heap if self._heap and self.may_win(self._heap[0][0]) else self._undecided
            if not heap or not self.may_win(heap[0][0]):
                break
            self._current, _, item = heapq.heappop(heap)
            if isinstance(item, Run):
                self._open(item)
            else:
                self._simulate(item)

    def ended(self, rows: Ints | None = None) -> bool:
        """Search as `run` does; whether to the end."""
        with suppress(Stopped):
            self.run(rows)
            return True
        return False

    def bound(self) -> Value:
        """What nothing that is still open, or was given up, goes below."""
        head = min((heap[0][0] for heap in (self._heap, self._undecided) if heap), default=NOTHING)
        taken = min((other.bound() for other in self.taken), default=NOTHING)
        return min(head, self._upcoming.value, self._current, self._given_up, taken)

    @property
    def solved(self) -> int:
        """Candidates that were looked at one by one; bounds ruled out the others."""
        return len(self._solved) + sum(other.solved for other in self.taken)

    @property
    def candidates(self) -> int:
        """Variants of the space."""
        return int(self.outer.counts.sum()) + sum(other.candidates for other in self.taken)

    def may_win(self, bound: Value) -> bool:
        """Whether something with this bound could be better than the incumbent."""
        if self.outer.problem.objective == Objective.MEMORY:
            return bound < (self.value[0], self.value[1] * (1 - TOLERANCE))
        return bound[0] < self.value[0] * (1 - TOLERANCE)

    def _push(
        self, bound: Value, item: Node | Run, heap: list[tuple[Value, int, Node | Run]] | None = None
    ) -> None:
        self._pushed += 1
        heapq.heappush(self._heap if heap is None else heap, (bound, self._pushed, item))

    def _below_s(self, devices: int) -> float:
        """Seconds that a strategy must stay below to be better than the incumbent."""
        match self.outer.problem.objective:
            case Objective.MEMORY:
                return inf
            case Objective.COST:
                return self.value[0] * (1 - TOLERANCE) / self.outer.problem.rate_per_s(devices)
            case _:
                return self.value[0] * (1 - TOLERANCE)

    def _expand(self) -> None:
        """Bound the variants of the next shapes; keep those that could win."""
        if not self.may_win(self._upcoming.value):
            self._upcoming.clear()
            return
        self._current = self._upcoming.value
        if self._upcoming.settle(self._upcoming.rows[: self.at_once]):
            return
        rows = self._upcoming.take(self.at_once)
        found, bounds = expand_quickly(self.outer, rows)
        self.work += spending.PER_VARIANT * len(found)
        open_ = np.isfinite(bounds.time_s)
        if self.only is not None:
            open_ &= self.only(found, self.outer.space.shapes.take(found.shape))
        self._queue(found.take(open_), bounds.take(open_), Known.WHOLE)

    def _queue(self, found: Variants, bounds: Bounds, known: Known) -> None:
        """Put variants among the open ones, best first; those that cannot win are dropped."""
        space = self.outer.space
        values = values_of(self.outer.problem, bounds, space.shapes.devices[found.shape])
        rows = values.order()
        rows = rows[self._open_rows(values.take(rows))]
        placed = (
            np.zeros(len(rows), dtype=np.int64)
            if known == Known.WHOLE
            else self.outer.wires.inner_placements(found.take(rows))
        )
        run = Run(variants=found.take(rows), values=values.take(rows), placed=placed, known=known)
        apart = placed > 0
        for part in (run.take(~apart), run.take(apart)) if known == Known.RANKS else (run,):
            self._push_run(part)

    def _push_run(self, run: Run) -> None:
        if len(run):
            self._push(run.bound, run)

    def _open_rows(self, values: Values) -> Bools:
        """Which rows could win."""
        if self.outer.problem.objective == Objective.MEMORY:
            best, then = self.value[0], self.value[1] * (1 - TOLERANCE)
            return np.asarray((values.first < best) | ((values.first == best) & (values.second < then)))
        return np.asarray(values.first < self.value[0] * (1 - TOLERANCE))

    def _bound_ranks(self, run: Run) -> None:
        """Bound the first variants of a run rank by rank; the rest of it goes back."""
        self._push_run(run.take(slice(VARIANTS_AT_ONCE, None)))
        found = run.variants.take(slice(VARIANTS_AT_ONCE))
        self.work += spending.PER_RANK * float(self.outer.space.shapes.pp[found.shape].sum())
        bounds = bound_variants(self.outer, found, self._below_all_s(found), memory=self._by_memory)
        open_ = np.isfinite(bounds.time_s)
        self._queue(found.take(open_), bounds.take(open_), Known.RANKS)

    def _refine(self, run: Run) -> None:
        """Price blocks where the run's first variant has them communicate, and bound all variants like it again."""
        same = priced_alike(self.outer.problem, self.outer.space.shapes, run)
        self._push_run(run.take(~same))
        found = run.variants.take(same)
        mesh = candidate(self.outer.space, found, 0).mesh
        apart = tensor_stride(mesh, self.outer.problem.cluster) > 1
        self.work += spending.PER_TENSOR_PLACEMENT if apart else spending.PER_PLACEMENT
        self.work += spending.PER_RANK * float(self.outer.space.shapes.pp[found.shape].sum())
        try:
            bounds = refined_bounds(self.outer, found, mesh, self._below_all_s(found), memory=self._by_memory)
        except UserError as error:
            self.errors.append(error)
            return
        open_ = np.isfinite(bounds.time_s)
        self._queue(found.take(open_), bounds.take(open_), Known.PLACED)

    @property
    def _by_memory(self) -> bool:
        return self.outer.problem.objective == Objective.MEMORY

    def _below_all_s(self, found: Variants) -> float:
        """Seconds that one of these variants must stay below to be better than the incumbent."""
        devices = self.outer.space.shapes.devices[found.shape]
        return max(self._below_s(int(d)) for d in np.unique(devices))

    def _open(self, run: Run) -> None:
        """Give the first variant of a run its stage problem; the rest of the run goes back."""
        if run.known == Known.WHOLE:
            self._bound_ranks(run)
            return
        if run.known == Known.RANKS and run.placed[0] > 0:
            self._refine(run)
            return
        self._push_run(run.take(slice(1, None)))
        bound, chosen = run.bound, candidate(self.outer.space, run.variants, 0)
        if self.most_actions is not None and chosen.actions > self.most_actions:
            self._given_up = min(self._given_up, bound)
            return
        if not self._by_memory and self._twins.make_needless(chosen):
            self.work += spending.PER_STAGE_PROBLEM
            return
        problem = self._problem(chosen)
        if problem is not None:
            problem = self._tried(chosen, bound, problem)
            self._resolve(Node(chosen=chosen, bound=bound, problem=problem), SHORT)

    def _problem(self, chosen: Candidate) -> StageProblem | None:
        """The stage problem of a candidate with all paths known; None where it is no strategy at all."""
        outer = self.outer
        self._solved.add(chosen)
        try:
            priced = price_candidate(outer.problem, outer.chain, outer.book, chosen)
        except UserError as error:
            self.errors.append(error)
            return None
        self.work += spending.PER_STAGE_PROBLEM
        key = chosen.schedule_key
        if key not in self._paths:
            self.work += spending.PER_ACTION_LAID_OUT * chosen.actions
            self._paths[key] = []
        states = outer.book.expander.prepared(priced.strategy).states
        problem = stage_problem(outer.problem, outer.chain, outer.book, priced, states, outer.capacity_bytes)
        return with_paths(problem, self._paths[key])

    def _dive(self) -> None:
        """Simulate easily found deals of promising variants, so that the rest has something to be measured by."""
        promises, looked_at = promising(self._upcoming, self.only, self.most_actions, self.most_groups)
        self.work += spending.PER_VARIANT * looked_at
        left = self.dives
        for chosen, bound_s in promises:
            self.check(self)
            if not left or not bound_s < self._below_s(chosen.mesh.devices):
                continue
            problem = self._problem(chosen)
            deal = quick_deal(problem) if problem is not None else None
            if problem is None or deal is None:
                continue
            left -= 1
            self._look_around(chosen, problem, deal, self._evaluate(chosen, deal))

    def _tried(self, chosen: Candidate, bound: Value, problem: StageProblem) -> StageProblem:
        """Where solving takes longer than simulating and much could be won, an easily found deal is simulated first:
        it may be good, and its critical path is the solver's to know."""
        unlike = len(set(problem.kinds)) > 1 and has_choice(problem)
        if not unlike or bound[0] >= self.value[0] * (1 - MUCH):
            return problem
        deal = quick_deal(problem)
        if deal is None:
            return problem
        found = self._evaluate(chosen, deal)
        self._look_around(chosen, problem, deal, found)
        return with_paths(problem, self._learn(chosen, found))

    def _learn(self, chosen: Candidate, found: Evaluation) -> list[Row]:
        """The critical paths known of a candidate's schedule, that of a simulation among them."""
        rows = self._paths[chosen.schedule_key]
        row = path_row(found.path())
        if row not in rows:
            rows.append(row)
        return rows

    def _look_around(self, chosen: Candidate, problem: StageProblem, deal: Deal, found: Evaluation) -> None:
        """Simulate deals near one that was simulated: those that fit where it does not, and better ones."""
        simulate = partial(self._evaluate, chosen)
        found, deal = leave_room(self.outer, problem, chosen, deal, found, simulate)
        if not self._by_memory and self.outer.fits(found):
            limit_s = self._below_s(chosen.mesh.devices) * (1 + NEAR)
            improve(self.outer, problem, deal, found, limit_s, simulate)

    def _resolve(self, node: Node, share: float = 1.0) -> None:
        """Solve a node's stage problem with a share of the effort; it goes back with the bound that it has now."""
        chosen, bound, problem, excluded = node.chosen, node.bound, node.problem, node.excluded
        effort = self.effort * share
        if has_choice(problem):
            each = spending.PER_CHUNK if len(set(problem.kinds)) == 1 else spending.PER_UNLIKE_CHUNK
            self.work += spending.PER_SOLVE + each * chosen.chunks
        if self.outer.problem.objective == Objective.MEMORY:
            least = int(min(self.value[0], float(problem.capacity_bytes))) + 1
            answer = solve_for_memory(problem, excluded, least, effort, self._spend)
            value = (max(bound[0], float(answer.bound)), bound[1]) if answer else NOTHING
        else:
            below_s = self._below_s(chosen.mesh.devices)
            below = ceil(below_s * PS) if below_s < inf else None
            answer = solve_stages(
                node.to_solve, excluded=excluded, below=below, effort=effort, spend=self._spend
            )
            value = NOTHING
            if answer is not None:
                value = max(bound, self.outer.problem.value_of(answer.bound / PS, 0.0, chosen.mesh.devices))
        if answer is None or not self.may_win(value):
            return
        node = replace(node, bound=value, deal=answer.deal)
        if answer.deal is None and share < 1.0:
            self._push(value, node, self._undecided)
        elif answer.deal is None:
            self._given_up = min(self._given_up, value)
        elif not excluded and value[0] < self.value[0] * (1 - MUCH):  # something to measure the rest by
            self._simulate(node)
        else:
            self._push(value, node)

    def _spend(self, work: float) -> None:
        self.work += work

    def _simulate(self, node: Node) -> None:
        """Simulate a node's deal, learn from it, and solve again for what is left."""
        if node.deal is None:
            self._resolve(node)
            return
        found = self._evaluate(node.chosen, node.deal)
        if not has_choice(node.problem):
            return
        if not node.excluded:
            self._look_around(node.chosen, node.problem, node.deal, found)
        rows = self._learn(node.chosen, found)
        excluded = (*node.excluded, node.deal)
        problem, fits = with_paths(node.problem, rows), node.fits and self.outer.fits(found)
        self._resolve(replace(node, problem=problem, excluded=excluded, fits=fits), SHORT)

    def _evaluate(self, chosen: Candidate, deal: Deal) -> Evaluation:
        """Simulate a deal; it is the incumbent if it fits and is better."""
        if (chosen, deal) in self._simulated:
            return self._simulated[chosen, deal]
        self.work += spending.PER_SIMULATION + spending.PER_ACTION_WALKED * chosen.actions
        self.work += spending.PER_BLOCK_SIMULATED * len(self.outer.chain.kinds)
        found = evaluate(self.outer.book.expander, strategy_of(self.outer.problem, chosen, deal))
        self._simulated[chosen, deal] = found
        self.seen.append(found)
        self.consider(found)
        return found

    def consider(self, *simulated: Evaluation) -> None:
        """Take a simulated strategy as the incumbent if it fits and is better."""
        for found in simulated:
            value = objective_value(self.outer.problem, found)
            if self.outer.fits(found) and value < self.value:
                self.incumbent, self.value = found, value


def after(most_work: float) -> Callable[[Frontier], None]:
    """A check that stops a search after so much work."""

    def check(frontier: Frontier) -> None:
        if frontier.work >= most_work:
            raise Stopped

    return check
