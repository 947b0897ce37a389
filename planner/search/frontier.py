"""Best bound first: the open parts of the space, ordered by what they could still be worth."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil, inf

import numpy as np

from autoparallel.errors import UserError
from autoparallel.planner.problem import Objective
from autoparallel.planner.search.bounds import Bounds
from autoparallel.planner.search.candidates import Candidate, candidate, strategy_of
from autoparallel.planner.search.deals import quick_deal
from autoparallel.planner.search.evaluate import Evaluation, evaluate
from autoparallel.planner.search.forms import PS
from autoparallel.planner.search.inner import path_row, price_candidate, stage_problem, with_paths
from autoparallel.planner.search.meshes import Bools, Ints
from autoparallel.planner.search.outer import Outer, expand_shapes, refined_bounds
from autoparallel.planner.search.space import Shapes, Variants
from autoparallel.planner.search.stage_problem import Deal, Row, StageAnswer, StageProblem
from autoparallel.planner.search.stages import EFFORT, solve_stages
from autoparallel.planner.search.wires import tensor_strides

# Two plans closer than this are the same plan: below what rounding to picoseconds adds up to. Kind: formula.
TOLERANCE = 1e-6
SHAPES_AT_ONCE = 96  # shapes expanded together: some ten thousand variants, a few tens of milliseconds
SHAPES_DIVED = 6  # shapes of each size of pp and tp looked at before the search proper
MOST_ACTIONS = 8192  # stages times micro-batches of these: larger schedules take a second to lay out
# Work in milliseconds, as measured once on one core (two for CP-SAT's larger models): only its order matters, for
# a limit that is the same on every machine. Kind: measured.
PER_STAGE_PROBLEM, PER_SIMULATION, PER_CHUNK, PER_ACTION = 3.0, 5.0, 1.5, 0.02
Value = tuple[float, float]
NOTHING: Value = (inf, inf)


class Stopped(Exception):
    """A limit ended the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A variant with its stage problem, the deals already simulated, and the one to simulate next."""

    chosen: Candidate
    bound: Value
    problem: StageProblem
    excluded: tuple[Deal, ...]
    deal: Deal


@dataclass(slots=True)
class Run:
    """Variants of some shapes in the order of their bounds; `at` is the next one.

    `strides`: how far apart tensor parallelism is placed. Bounds assume neighbours, until the run is `refined`.
    """

    variants: Variants
    bounds: list[Value]
    rows: Ints
    strides: Ints
    refined: bool
    at: int = 0


@dataclass(slots=True, kw_only=True)
class Frontier:
    """The state of a search. `check` is called before every step and raises `Stopped` at a limit."""

    outer: Outer
    check: Callable[[Frontier], None]
    effort: float = EFFORT  # of each stage problem
    dives: bool = True  # look for something to measure by before the search proper
    only: Callable[[Variants, Shapes], Bools] | None = None  # variants to look at; all if None
    incumbent: Evaluation | None = None
    value: Value = NOTHING
    solved: int = 0
    work: float = 0.0  # done so far, about milliseconds; the same on every machine
    seen: list[Evaluation] = field(default_factory=list)
    _heap: list[tuple[Value, int, Node | Run]] = field(default_factory=list)
    _pushed: int = 0
    _order: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    _values: list[Value] = field(default_factory=list)
    _next: int = 0
    _current: Value = NOTHING
    _given_up: Value = NOTHING  # stage problems that the solver did not decide in its time
    _paths: dict[object, list[Row]] = field(default_factory=dict)
    _errors: list[UserError] = field(default_factory=list)

    def run(self, rows: Ints | None = None) -> None:
        """Search the shapes `rows` (all of them if None) to the end."""
        self._begin(rows)
        if self.dives:
            self._dive()
        while True:
            self._current = NOTHING
            self.check(self)
            if not self._heap or self._upcoming() < self._heap[0][0]:
                if self._next >= len(self._order):
                    break
                self._expand()
                continue
            bound, _, item = heapq.heappop(self._heap)
            if not self.may_win(bound):
                break
            self._current = bound
            if isinstance(item, Run):
                self._open(item)
            else:
                self._simulate(item)

    def bound(self) -> Value:
        """What nothing that is still open, or was given up, goes below."""
        head = self._heap[0][0] if self._heap else NOTHING
        return min(head, self._upcoming(), self._current, self._given_up)

    @property
    def errors(self) -> tuple[UserError, ...]:
        """Why candidates turned out not to be strategies at all."""
        return tuple(self._errors)

    def may_win(self, bound: Value) -> bool:
        """Whether something with this bound could be better than the incumbent."""
        if self.outer.problem.objective == Objective.MEMORY:
            return bound < (self.value[0], self.value[1] * (1 - TOLERANCE))
        return bound[0] < self.value[0] * (1 - TOLERANCE)

    def value_of(self, time_s: float, memory_bytes: float, devices: int) -> Value:
        """The objective, from seconds and bytes (or from bounds on them)."""
        match self.outer.problem.objective:
            case Objective.COST:
                return (time_s * self.outer.problem.rate_per_s(devices), 0.0)
            case Objective.MEMORY:
                return (memory_bytes, time_s)
            case _:
                return (time_s, 0.0)

    def _begin(self, rows: Ints | None) -> None:
        outer = self.outer
        bounds, devices = outer.bounds, outer.space.shapes.devices
        fits = bounds.memory_bytes <= outer.capacity_bytes
        kept = np.flatnonzero(fits) if rows is None else rows[fits[rows]]
        values = [
            self.value_of(float(bounds.time_s[i]), float(bounds.memory_bytes[i]), int(devices[i]))
            for i in kept
        ]
        order = sorted(range(len(kept)), key=lambda i: (values[i], i))
        self._order = kept[order]
        self._values = [values[i] for i in order]

    def _upcoming(self) -> Value:
        return self._values[self._next] if self._next < len(self._order) else NOTHING

    def _push(self, bound: Value, item: Node | Run) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (bound, self._pushed, item))

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
        stop = min(self._next + SHAPES_AT_ONCE, len(self._order))
        if not self.may_win(self._upcoming()):
            self._next = len(self._order)
            return
        rows = self._order[self._next : stop]
        self._current = self._upcoming()
        self._next = stop
        devices = self.outer.space.shapes.devices
        below_s = max(self._below_s(int(d)) for d in np.unique(devices[rows]))
        memory = self.outer.problem.objective == Objective.MEMORY
        found, bounds = expand_shapes(self.outer, rows, below_s, memory=memory)
        open_ = np.isfinite(bounds.time_s)
        if self.only is not None:
            open_ &= self.only(found, self.outer.space.shapes.take(found.shape))
        self._queue(found, bounds, np.flatnonzero(open_))

    def _queue(self, found: Variants, bounds: Bounds, kept: Ints, *, refined: bool = False) -> None:
        """Put the variants `kept` among the open ones: those whose bounds are as good as they get, and others."""
        devices = self.outer.space.shapes.devices
        values = [
            self.value_of(
                float(bounds.time_s[i]), float(bounds.memory_bytes[i]), int(devices[found.shape[i]])
            )
            for i in kept
        ]
        order = sorted((i for i in range(len(kept)) if self.may_win(values[i])), key=lambda i: (values[i], i))
        rows = kept[order]
        strides = tensor_strides(self.outer.problem, self.outer.space, found.take(rows))
        for far in (False, True):
            here = [n for n in range(len(order)) if (strides[n] > 1 and not refined) == far]
            if here:
                ordered = [values[order[n]] for n in here]
                run = Run(
                    variants=found, bounds=ordered, rows=rows[here], strides=strides[here], refined=not far
                )
                self._push(ordered[0], run)

    def _refine(self, run: Run) -> None:
        """Price tensor parallelism where the run's next variant has it, and bound all variants like it again."""
        shapes = self.outer.space.shapes
        rows, strides = run.rows[run.at :], run.strides[run.at :]
        owners = run.variants.shape[rows]
        same = strides == strides[0]
        for column in (
            shapes.tp,
            shapes.sequence_parallel,
            shapes.recompute,
            shapes.cp,
            shapes.ep,
            shapes.micro,
        ):
            same &= column[owners] == column[owners[0]]
        same &= (shapes.micro_batches[owners] > 1) == (shapes.micro_batches[owners[0]] > 1)
        others = np.flatnonzero(~same)
        if len(others):
            bounds = [run.bounds[run.at + int(n)] for n in others]
            rest = Run(
                variants=run.variants,
                bounds=bounds,
                rows=rows[others],
                strides=strides[others],
                refined=False,
            )
            self._push(bounds[0], rest)
        found = run.variants.take(rows[same])
        memory = self.outer.problem.objective == Objective.MEMORY
        below_s = max(self._below_s(int(d)) for d in np.unique(shapes.devices[found.shape]))
        try:
            bounds_ = refined_bounds(self.outer, found, int(strides[0]), below_s, memory=memory)
        except UserError as error:
            self._errors.append(error)
            return
        self._queue(found, bounds_, np.flatnonzero(np.isfinite(bounds_.time_s)), refined=True)

    def _open(self, run: Run) -> None:
        """Give the first variant of a run its stage problem; the rest of the run goes back."""
        if not run.refined:
            self._refine(run)
            return
        row, bound = int(run.rows[run.at]), run.bounds[run.at]
        run.at += 1
        if run.at < len(run.rows):
            self._push(run.bounds[run.at], run)
        chosen = candidate(self.outer.space, run.variants, row)
        problem = self._problem(chosen)
        if problem is not None:
            self._resolve(chosen, bound, problem, ())

    def _problem(self, chosen: Candidate) -> StageProblem | None:
        """The stage problem of a candidate with all paths known; None where it is no strategy at all."""
        outer = self.outer
        try:
            priced = price_candidate(outer.problem, outer.chain, outer.book, chosen)
        except UserError as error:
            self._errors.append(error)
            return None
        self.work += PER_STAGE_PROBLEM + PER_CHUNK * chosen.chunks + PER_ACTION * _actions(chosen)
        states = outer.book.expander.prepared(priced.strategy).states
        problem = stage_problem(outer.problem, outer.chain, outer.book, priced, states, outer.capacity_bytes)
        return with_paths(problem, self._paths.get(_schedule_key(chosen), ()))

    def _dive(self) -> None:
        """Simulate easily found deals of promising variants, so that the rest has something to be measured by: for
        each size of pp and tp, of the variants of its most promising shapes the one with the least bound."""
        space = self.outer.space
        sizes = space.shapes.pp * (space.shapes.tp.max(initial=0) + 1) + space.shapes.tp
        rows = [
            self._order[sizes[self._order] == size][:SHAPES_DIVED] for size in np.unique(sizes[self._order])
        ]
        found, bounds = expand_shapes(self.outer, np.concatenate([self._order[:0], *rows]), inf)
        actions = (
            space.shapes.pp[found.shape] * found.virtual_stages * space.shapes.micro_batches[found.shape]
        )
        open_ = np.isfinite(bounds.time_s) & (actions <= MOST_ACTIONS)
        if self.only is not None:
            open_ &= self.only(found, space.shapes.take(found.shape))
        kept = np.flatnonzero(open_)
        kept = kept[tensor_strides(self.outer.problem, self.outer.space, found.take(kept)) == 1]
        kept = kept[np.argsort(bounds.time_s[kept], kind="stable")]
        _, first = np.unique(sizes[found.shape[kept]], return_index=True)
        devices = space.shapes.devices
        for row in kept[np.sort(first)]:
            self.check(self)
            if not bounds.time_s[row] < self._below_s(int(devices[found.shape[row]])):
                continue
            chosen = candidate(space, found, int(row))
            problem = self._problem(chosen)
            deal = quick_deal(problem) if problem is not None else None
            if problem is None or deal is None:
                continue
            simulated = self._evaluate(chosen, deal)
            excess = self.outer.excess_bytes(simulated)
            if excess > 0:  # the rows bound memory from below: leave that much room, once
                deal = quick_deal(replace(problem, capacity_bytes=problem.capacity_bytes - excess))
                if deal is not None:
                    self._evaluate(chosen, deal)

    def _resolve(
        self, chosen: Candidate, bound: Value, problem: StageProblem, excluded: tuple[Deal, ...]
    ) -> None:
        """Solve a stage problem; the node goes back with the bound that it has now."""
        self.solved += 1
        self.work += PER_CHUNK * chosen.chunks * (1 + len(excluded)) if _has_choice(problem) else 0.0
        if self.outer.problem.objective == Objective.MEMORY:
            answer = self._least_memory(problem, excluded)
            value = (max(bound[0], float(answer.bound)), bound[1]) if answer else NOTHING
        else:
            below_s = self._below_s(chosen.mesh.devices)
            below = ceil(below_s * PS) if below_s < inf else None
            answer = solve_stages(problem, excluded=excluded, below=below, effort=self.effort)
            value = NOTHING
            if answer is not None:
                value = max(bound, self.value_of(answer.bound / PS, 0.0, chosen.mesh.devices))
        if answer is None or not self.may_win(value):
            return
        if answer.deal is None:
            self._given_up = min(self._given_up, value)
            return
        node = Node(chosen=chosen, bound=value, problem=problem, excluded=excluded, deal=answer.deal)
        if self.incumbent is None and not excluded:  # something to measure the rest by
            self._simulate(node)
        else:
            self._push(value, node)

    def _least_memory(self, problem: StageProblem, excluded: tuple[Deal, ...]) -> StageAnswer | None:
        """The deal with the least peak, the fastest of these."""
        below = int(min(self.value[0], float(problem.capacity_bytes))) + 1
        by_bytes = replace(problem, paths=problem.memory, memory=())
        least = solve_stages(by_bytes, excluded=excluded, below=below, effort=self.effort)
        if least is None or least.deal is None:
            return least
        tight = replace(problem, capacity_bytes=least.value)
        fastest = solve_stages(tight, excluded=excluded, effort=self.effort)
        deal = fastest.deal if fastest is not None else None
        return least if deal is None else replace(least, deal=deal)

    def _simulate(self, node: Node) -> None:
        """Simulate a node's deal, learn from it, and solve again for what is left."""
        found = self._evaluate(node.chosen, node.deal)
        if not _has_choice(node.problem):
            return
        rows = self._paths.setdefault(_schedule_key(node.chosen), [])
        row = path_row(found.path())
        if row not in rows:
            rows.append(row)
        self._resolve(node.chosen, node.bound, with_paths(node.problem, rows), (*node.excluded, node.deal))

    def _evaluate(self, chosen: Candidate, deal: Deal) -> Evaluation:
        """Simulate a deal; it is the incumbent if it fits and is better."""
        self.work += PER_SIMULATION + PER_ACTION * _actions(chosen)
        found = evaluate(self.outer.book.expander, strategy_of(self.outer.problem, chosen, deal))
        self.seen.append(found)
        self.consider(found)
        return found

    def consider(self, found: Evaluation) -> None:
        """Take a simulated strategy as the incumbent if it fits and is better."""
        value = self.value_of(found.step_time_s, found.peak_bytes, found.strategy.mesh.devices)
        if self.outer.excess_bytes(found) <= 0 and value < self.value:
            self.incumbent, self.value = found, value


def _actions(chosen: Candidate) -> int:
    """Forwards and backwards of the schedule."""
    return 2 * chosen.chunks * chosen.micro_batches


def _schedule_key(chosen: Candidate) -> object:
    return (chosen.schedule, chosen.mesh.pp, chosen.virtual_stages, chosen.micro_batches)


def _has_choice(problem: StageProblem) -> bool:
    """Whether a stage problem has more than one deal."""
    spare = len(problem.kinds) > sum(problem.least) and problem.chunks > 1 and problem.blocks is None
    return spare or (problem.recompute and problem.recomputed is None)
