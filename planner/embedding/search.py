"""Best bound first over meshes and tables together: where the rows of embedding tables stand, on each mesh.

A strategy with its tables open has a bound (`choose.least_s`); the one with the least has its tables chosen by CP-SAT,
whose bound takes the place of the first one; when that leads, the choice is simulated and excluded, and the strategy
goes back with the bound of the next choice. The search ends when no bound is below the incumbent; so that there is a good one
before, a strategy has its tables chosen as soon as it is open, and every `AHEAD_EVERY` of them the choice with the least bound is
simulated ahead of its turn. Strategies that differ in how they shard and reduce alone are first one node (`choose.of_any`), those that
differ in what is lossy alone one for longer, whose bound takes reductions and gathers for free.

The space: one pipeline rank, no tensor, context or expert parallelism, blocks recomputed all or none. Bounds hold for any
algorithm and bucket size of reductions; a choice of tables is simulated with the default ones, and one that is the best so
far with others. What is left out is in the space of the search that has all tables on the devices.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from autoparallel.costmodel.host_memory import host_capacity_bytes
from autoparallel.costmodel.prediction import Prediction
from autoparallel.costmodel.simulate import simulate
from autoparallel.planner.embedding.choose import (
    TableAnswer,
    TableProblem,
    choose,
    least_s,
    of_any,
    without_reductions,
)
from autoparallel.planner.embedding.options import Counts, TableClass, assigned, rules_of
from autoparallel.planner.embedding.terms import (
    Catalogue,
    bare_of,
    bucket_reduce_s,
    pricing,
    reduced_each_s,
    reduced_s,
    terms_of,
    whole_of,
)
from autoparallel.planner.expand import state
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.problem import NOTHING, Objective, Problem, Value, objective_value
from autoparallel.planner.search.driver import WorkDone
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
AHEAD_EVERY = 8  # strategies that are opened. Kind: choice
PER_STRATEGY, PER_CHOICE, PER_SIMULATION, PER_CLASS, PER_WEIGHING = 10.0, 8.0, 16.0, 4.0, 0.2


# A strategy, and others that differ from it in what is lossy alone.
Family = tuple[Strategy, tuple[Strategy, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A simulated strategy, with its tables placed."""

    strategy: Strategy
    prediction: Prediction
    value: Value
    bound: Value  # that its choice of tables had


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """A strategy with its tables open, what of them was simulated, and the choice to simulate next. With `tables`, `lossy` are
    strategies of which the tables' bounds hold; without, those of which nothing is known before this one is priced. `together`
    are families of strategies that shard and reduce in other ways."""

    strategy: Strategy
    tables: TableProblem | None = None  # None: not priced yet
    excluded: tuple[Counts, ...] = ()
    next: Counts | None = None
    lossy: tuple[Strategy, ...] = ()
    weighed: bool = False  # whether its bound knows of reductions
    together: tuple[Family, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """The model without tables: seconds of a micro-batch forward and backward, and what it trains."""

    seconds: tuple[float, float]
    trainable: int


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
    _ready: list[tuple[Value, int, _Node]] = field(default_factory=list)  # those of the heap with a choice
    _taken: set[int] = field(default_factory=set)  # of either
    _current: Value = NOTHING
    _given_up: Value = NOTHING
    _pushed: int = 0
    _passes: dict[tuple[int, bool, str], _Passes] = field(default_factory=dict)
    _lossy: dict[Strategy, tuple[Strategy, ...]] = field(default_factory=dict)

    def run(self) -> None:
        """Search to the end. Raises `WorkDone` where that would take too long."""
        for together in alike(families(strategies(self.problem))):
            self._lossy.update(together)
            self.candidates += sum(1 + len(lossy) for _, lossy in together)
            first = together[0][0]
            self._push(self._first_bound(first), _Node(strategy=first, together=together))
        while self._heap:
            self.check(self)
            bound, number, node = heapq.heappop(self._heap)
            if number in self._taken:
                continue
            if not self.may_win(bound):
                return
            self._taken.add(number)
            self._current = bound
            if self.work >= MOST_WORK:
                raise WorkDone
            self._expand(node, bound)
            self._current = NOTHING

    def _expand(self, node: _Node, bound: Value) -> None:
        """Take a node one step further."""
        if node.together:
            self._sort_out(node, bound)
        elif node.tables is None and not node.weighed:
            self.work += PER_WEIGHING * (1 + len(node.lossy))
            self._push(max(bound, self._second_bound(node)), replace(node, weighed=True))
        elif node.tables is None:
            self._open(node)
        elif node.lossy:
            self._part(node, bound)
        elif node.next is not None:
            self._next(node, bound)

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

    def _open(self, node: _Node) -> None:
        """Bound a strategy with its tables open, and with it those that differ in what is lossy."""
        self.opened += 1
        self.work += PER_STRATEGY + PER_CLASS * len(self.classes)
        strategy, tables = node.strategy, self._tables(node.strategy)
        bound = (0.0, 0.0) if self._by_memory else (least_s(tables) * self._rate(strategy), 0.0)
        bound = max(bound, self._current)
        if node.lossy:
            free = without_reductions(tables)
            self._push(bound, _Node(strategy=strategy, tables=free, lossy=node.lossy))
        self._solve(_Node(strategy=strategy, tables=tables), bound)
        if self.best is None or self.opened % AHEAD_EVERY == 0:
            self._look_ahead()

    def _look_ahead(self) -> None:
        """Simulate the choice with the least bound of all that are ready, whatever else is open below it."""
        while self._ready:
            bound, number, node = heapq.heappop(self._ready)
            if number not in self._taken:
                self._taken.add(number)
                self._next(node, bound)
                return

    def _next(self, node: _Node, bound: Value) -> None:
        """Simulate a choice that is ready, and find the one after it."""
        assert node.next is not None
        self._simulate(node, node.next)
        self._solve(replace(node, excluded=(*node.excluded, node.next), next=None), bound)

    def _tables(self, strategy: Strategy) -> TableProblem:
        """The tables of a strategy, open."""
        priced = pricing(self.catalogue, strategy)
        bare = bare_of(priced)
        every = tuple(
            tuple(terms_of(priced, bare, which, option) for option in range(len(one.options)))
            for which, one in enumerate(self.classes)
        )
        device = self.problem.cluster.device
        return TableProblem(
            classes=self.classes, terms=every, whole=whole_of(priced, bare, every),
            capacity_bytes=device.memory_bytes - device.reserve_bytes,
            host_capacity_bytes=host_capacity_bytes(self.problem.cluster),
        )  # fmt: skip

    def _sort_out(self, node: _Node, bound: Value) -> None:
        """Each family of strategies that shard and reduce in other ways goes by itself, if any of them may win."""
        self.work += PER_STRATEGY + PER_CLASS * len(self.classes)
        self.work += PER_WEIGHING * sum(1 + len(lossy) for _, lossy in node.together)
        answer = self._choice(replace(node, tables=self.together(node.together)))
        if answer is None:
            return
        value = max(bound, self._value(answer, self._rate(node.strategy)))
        for strategy, lossy in node.together:
            self._push(value, _Node(strategy=strategy, lossy=lossy))

    def together(self, every: Sequence[Family]) -> TableProblem:
        """What none of the strategies goes below that shard and reduce in other ways, whatever tables they choose."""
        found = [one for first, lossy in every for one in (first, *lossy)]
        trainable = self._passes_of(found[0]).trainable
        most = trainable + sum(table.numel for one in self.classes for table in one.tables)
        each_s = min(reduced_each_s(pricing(self.catalogue, one), most) for one in found)
        sharded = max(found, key=lambda one: (one.mesh.dp_shard, one.shard.zero, -one.shard.secondary))
        return of_any(self._tables(sharded), each_s, trainable)

    def _part(self, node: _Node, bound: Value) -> None:
        """Each of the strategies that had a bound together goes by itself, if what any choice of tables gives them may win."""
        answer = self._choice(node)
        if answer is None:
            return
        value = max(bound, self._value(answer, self._rate(node.strategy)))
        for strategy in node.lossy:
            self._push(value, _Node(strategy=strategy, weighed=True))

    def _first_bound(self, strategy: Strategy) -> Value:
        """The passes of the model without tables, which do not depend on the mesh."""
        if self._by_memory:
            return (0.0, 0.0)
        passes_s = sum(self._passes_of(strategy).seconds)
        return (strategy.micro_batches * passes_s * self._rate(strategy), 0.0)

    def _second_bound(self, node: _Node) -> Value:
        """Forward passes and the backwards before the last, then what is reduced of the model without tables, by the fastest of
        the strategies."""
        if self._by_memory:
            return (0.0, 0.0)
        strategy, count = node.strategy, node.strategy.micro_batches
        passes = self._passes_of(strategy)
        forward_s, backward_s = passes.seconds
        priced = [pricing(self.catalogue, one) for one in (strategy, *node.lossy)]
        reductions_s = min(reduced_s(one, bucket_reduce_s(one), passes.trainable) for one in priced)
        times = count if state.zero_level(strategy) >= 2 else 1
        before_s = count * forward_s + (count - times) * backward_s
        return ((before_s + times * reductions_s) * self._rate(strategy), 0.0)

    def _passes_of(self, strategy: Strategy) -> _Passes:
        key = (strategy.batch.micro, strategy.micro_batches > 1, strategy.recompute.mode)
        if key not in self._passes:
            bare = bare_of(pricing(self.catalogue, strategy))
            forward_s, backward_s = (sum(each) for each in zip(*bare.seconds, strict=True))
            trainable = sum(block.trainable * count for block, count in bare.stage.blocks)
            self._passes[key] = _Passes(seconds=(forward_s, backward_s), trainable=trainable)
        return self._passes[key]

    def _push(self, bound: Value, node: _Node) -> bool:
        """Whether the node is worth keeping."""
        if not self.may_win(bound):
            return False
        self._pushed += 1
        heapq.heappush(self._heap, (bound, self._pushed, node))
        return True

    def _choice(self, node: _Node) -> TableAnswer | None:
        """The tables with the least bound; None where no choice that is left fits and may win."""
        assert node.tables is not None
        self.solved += 1
        self.work += PER_CHOICE + PER_CLASS * len(self.classes)
        below_s = inf if self._by_memory else self.value[0] / self._rate(node.strategy)
        return choose(node.tables, below_s=below_s, excluded=node.excluded, by_memory=self._by_memory)

    def _solve(self, node: _Node, bound: Value) -> None:
        """Choose the tables of a strategy; it goes back with the bound that it then has."""
        answer = self._choice(node)
        if answer is None:
            return
        value = max(bound, self._value(answer, self._rate(node.strategy)))
        if answer.counts is None:
            self._given_up = min(self._given_up, value)
        elif self._push(value, ready := replace(node, next=answer.counts)):
            heapq.heappush(self._ready, (value, self._pushed, ready))

    def _value(self, answer: TableAnswer, rate: float) -> Value:
        return (answer.held_bytes, 0.0) if self._by_memory else (answer.bound_s * rate, 0.0)

    def _simulate(self, node: _Node, counts: Counts) -> None:
        """Price a strategy with its tables placed; where it is the best, with other ways to reduce gradients, too."""
        rules = rules_of(self.problem.graph, assigned(self.classes, counts))
        strategy = replace(node.strategy, embedding=rules)
        better = self._is_best(strategy)
        while better:
            assert self.best is not None
            others = [*self._lossy_ways(node.strategy), *other_syncs(self.problem, self.best.strategy)]
            better = any(self._is_best(s) for s in others if not self.problem.is_refused(s))

    def _lossy_ways(self, strategy: Strategy) -> Iterator[Strategy]:
        """The best with other lossy messages, where it is `strategy` but for its tables and how gradients are reduced."""
        assert self.best is not None
        best = self.best.strategy
        for other in self._lossy.get(strategy, ()):
            sync = replace(
                best.grad_sync, compression=other.grad_sync.compression, weights=other.grad_sync.weights
            )
            if sync != best.grad_sync:
                yield replace(best, grad_sync=sync)

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


def families(found: Iterable[Strategy]) -> Iterator[Family]:
    """The strategies that differ in what is lossy alone: the first of them, and the others."""
    kinds: dict[Strategy, list[Strategy]] = {}
    for strategy in found:
        exact = replace(strategy.grad_sync, compression=(), weights="none")
        kinds.setdefault(replace(strategy, grad_sync=exact), []).append(strategy)
    for first, *others in kinds.values():
        yield first, tuple(others)


def alike(found: Iterable[Family]) -> Iterator[tuple[Family, ...]]:
    """The families on as many devices, with the same micro-batches, recomputation and offloading."""
    kinds: dict[object, list[Family]] = {}
    for first, lossy in found:
        key = (first.mesh.devices, first.batch.micro, first.recompute, first.offload)
        kinds.setdefault(key, []).append((first, lossy))
    yield from map(tuple, kinds.values())


def _partition(problem: Problem) -> Partition:
    partition = even_partition(len(problem.graph.repeated_positions), 1)
    full = problem.fixed.recomputed
    return replace(partition, recomputed=full) if full else partition
