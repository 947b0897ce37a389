"""Best bound first over meshes and tables together: where the rows of embedding tables stand, on each mesh.

A strategy with its tables open has a bound (`choose.least_s`); the one with the least has its tables chosen by CP-SAT,
whose bound takes the place of the first one; when that leads, the choice is simulated and excluded, and the strategy
goes back with the bound of the next choice. The search ends when no bound is below the incumbent.

The space: one pipeline rank, no tensor, context or expert parallelism, blocks recomputed all or none. Bounds hold for any
algorithm and bucket size of reductions; a choice of tables is simulated with the default ones, and one that is the best so
far with others. What is left out is in the space of the search that has all tables on the devices.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from autoparallel.costmodel.host_memory import host_capacity_bytes
from autoparallel.costmodel.prediction import Prediction
from autoparallel.costmodel.simulate import simulate
from autoparallel.planner.embedding.choose import TableAnswer, TableProblem, choose, least_s
from autoparallel.planner.embedding.options import Counts, TableClass, assigned, rules_of
from autoparallel.planner.embedding.terms import Catalogue, bare_of, pricing, terms_of, whole_of
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.problem import NOTHING, Objective, Problem, Value, objective_value
from autoparallel.planner.search.partition.problem import Partition
from autoparallel.planner.search.partition.quick import even_partition
from autoparallel.planner.search.space.build import build_space, variants
from autoparallel.planner.search.space.candidates import candidate, strategy_of
from autoparallel.planner.search.space.syncs import other_syncs
from autoparallel.planner.strategy.types import Strategy

ONE_RANK = ("mesh.pp", "mesh.tp", "mesh.cp", "mesh.ep")
OFFLOADS = (
    "offload.optimizer",
    "offload.activations",
)  # where the user does not ask for them: the host is the tables'
# Below this a bound and a value are the same: rounding of bounds to whole picoseconds, and of shares to whole numbers.
SAME = 1e-6
# Work in milliseconds, as measured once on one core, after which a search stops, proved or not: the same on every
# machine. Kind: measured.
MOST_WORK = 8000.0
PER_STRATEGY, PER_CHOICE, PER_SIMULATION, PER_CLASS = 10.0, 8.0, 16.0, 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A simulated strategy, with its tables placed."""

    strategy: Strategy
    prediction: Prediction
    value: Value
    bound: Value  # that its choice of tables had


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """A strategy with its tables open, what of them was simulated, and the choice to simulate next."""

    strategy: Strategy
    tables: TableProblem | None = None  # None: not priced yet
    excluded: tuple[Counts, ...] = ()
    next: Counts | None = None


@dataclass(slots=True, kw_only=True)
class PlacementSearch:
    """The state of a search. `check` is called before every step, and raises to end it."""

    problem: Problem
    expander: Expander
    classes: tuple[TableClass, ...]
    catalogue: Catalogue
    check: Callable[[PlacementSearch], None]
    value: Value = NOTHING  # of the best known
    best: Placed | None = None
    seen: list[Placed] = field(default_factory=list)
    candidates: int = 0
    opened: int = 0
    solved: int = 0
    work: float = 0.0
    _heap: list[tuple[Value, int, _Node]] = field(default_factory=list)
    _current: Value = NOTHING
    _given_up: Value = NOTHING
    _pushed: int = 0
    _passes_s: dict[tuple[int, bool, str], float] = field(default_factory=dict)

    def run(self) -> None:
        """Search to the end, or to a limit."""
        for strategy in strategies(self.problem):
            self.candidates += 1
            self._push(self._first_bound(strategy), _Node(strategy=strategy))
        while self._heap:
            self.check(self)
            bound, _, node = heapq.heappop(self._heap)
            if not self.may_win(bound):
                return
            self._current = bound
            if self.work >= MOST_WORK:
                return
            if node.tables is None:
                self._open(node.strategy)
                continue
            if node.next is not None:
                self._simulate(node, node.next)
                node = replace(node, excluded=(*node.excluded, node.next), next=None)
            self._solve(node, bound)
            self._current = NOTHING

    def bound(self) -> Value:
        """What nothing that is still open, or was given up, goes below."""
        head = self._heap[0][0] if self._heap else NOTHING
        return min(head, self._current, self._given_up)

    def may_win(self, bound: Value) -> bool:
        """Whether something with this bound could be better than the best known."""
        if self._by_memory:
            return bound[0] < self.value[0]
        return bound[0] < self.value[0] * (1 - SAME)

    @property
    def _by_memory(self) -> bool:
        return self.problem.objective == Objective.MEMORY

    def _rate(self, strategy: Strategy) -> float:
        if self.problem.objective == Objective.COST:
            return self.problem.rate_per_s(strategy.mesh.devices)
        return 1.0

    def _open(self, strategy: Strategy) -> None:
        """Bound a strategy with its tables open."""
        self.opened += 1
        self.work += PER_STRATEGY + PER_CLASS * len(self.classes)
        priced = pricing(self.catalogue, strategy)
        bare = bare_of(priced)
        every = tuple(
            tuple(terms_of(priced, bare, which, option) for option in range(len(one.options)))
            for which, one in enumerate(self.classes)
        )
        device = self.problem.cluster.device
        tables = TableProblem(
            classes=self.classes, terms=every, whole=whole_of(priced, bare, every),
            capacity_bytes=device.memory_bytes - device.reserve_bytes,
            host_capacity_bytes=host_capacity_bytes(self.problem.cluster),
        )  # fmt: skip
        bound = (0.0, 0.0) if self._by_memory else (least_s(tables) * self._rate(strategy), 0.0)
        self._push(max(bound, self._current), _Node(strategy=strategy, tables=tables))

    def _first_bound(self, strategy: Strategy) -> Value:
        """The passes of the model without tables, which do not depend on the mesh."""
        if self._by_memory:
            return (0.0, 0.0)
        key = (strategy.batch.micro, strategy.micro_batches > 1, strategy.recompute.mode)
        if key not in self._passes_s:
            self._passes_s[key] = sum(f + b for f, b in bare_of(pricing(self.catalogue, strategy)).seconds)
        return (strategy.micro_batches * self._passes_s[key] * self._rate(strategy), 0.0)

    def _push(self, bound: Value, node: _Node) -> None:
        if self.may_win(bound):
            self._pushed += 1
            heapq.heappush(self._heap, (bound, self._pushed, node))

    def _solve(self, node: _Node, bound: Value) -> None:
        """Choose the tables of a strategy; it goes back with the bound that it then has."""
        assert node.tables is not None
        self.solved += 1
        self.work += PER_CHOICE + PER_CLASS * len(self.classes)
        rate = self._rate(node.strategy)
        below_s = inf if self._by_memory else self.value[0] / rate
        answer = choose(node.tables, below_s=below_s, excluded=node.excluded, by_memory=self._by_memory)
        if answer is None:
            return
        value = max(bound, self._value(answer, rate))
        if answer.counts is None:
            self._given_up = min(self._given_up, value)
        else:
            self._push(value, replace(node, next=answer.counts))

    def _value(self, answer: TableAnswer, rate: float) -> Value:
        return (answer.held_bytes, 0.0) if self._by_memory else (answer.bound_s * rate, 0.0)

    def _simulate(self, node: _Node, counts: Counts) -> None:
        """Price a strategy with its tables placed; where it is the best, with other ways to reduce gradients, too."""
        rules = rules_of(self.problem.graph, assigned(self.classes, counts))
        strategy = replace(node.strategy, embedding=rules)
        better = self._is_best(strategy)
        while better:
            assert self.best is not None
            others = other_syncs(self.problem, self.best.strategy)
            better = any(self._is_best(s) for s in others if not self.problem.is_refused(s))

    def _is_best(self, strategy: Strategy) -> bool:
        """Simulate a strategy: whether it fits and is better than the best so far, which it then is."""
        prediction = simulate(
            self.expander.program(strategy), self.problem.cluster, pricer=self.expander.pricer,
            prepared=self.expander.prepared(strategy),
        )  # fmt: skip
        found = Placed(
            strategy=strategy, prediction=prediction, value=objective_value(self.problem, prediction),
            bound=self._current,
        )  # fmt: skip
        self.seen.append(found)
        self.work += PER_SIMULATION
        if not (prediction.feasible and found.value < self.value):
            return False
        self.best, self.value = found, found.value
        return True


def strategies(problem: Problem) -> Iterator[Strategy]:
    """Every strategy of the space, with its tables open; none where the user asks for other meshes."""
    if any(problem.constraints.get(key, 1) != 1 for key in ONE_RANK) or len(problem.cluster.groups) > 1:
        return
    kept = {key: value for key, value in problem.constraints.items() if key != "embedding"}
    kept = {**dict.fromkeys(OFFLOADS, 0.0), **kept}
    alone = replace(problem, constraints={**kept, **dict.fromkeys(ONE_RANK, 1)})
    space = build_space(alone)
    if not len(space.shapes):
        return
    found = variants(space, np.arange(len(space.shapes)))
    partition = _partition(alone)
    for row in range(len(found)):
        yield strategy_of(alone, candidate(space, found, row), partition, bucketed=False)


def _partition(problem: Problem) -> Partition:
    partition = even_partition(len(problem.graph.repeated_positions), 1)
    full = problem.fixed.recomputed
    return replace(partition, recomputed=full) if full else partition
