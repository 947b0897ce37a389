"""What variants communicate, in columns: gradients, ZeRO's parameters, messages between stages.

A price depends on where a mesh places its groups, of which there are few: each distinct placement is priced once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from autoparallel.costmodel.program import Axis
from autoparallel.costmodel.topology import crossings
from autoparallel.planner.expand import state
from autoparallel.planner.expand.axes import INNER, axes_of, inner_axes, nearest_axes
from autoparallel.planner.expand.expander import MIB, mesh_axes
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.bounds.prices import PriceBook
from autoparallel.planner.search.bounds.tables import Units
from autoparallel.planner.search.partition.forms import Chain, tied_ends
from autoparallel.planner.search.space.build import Shapes, Space, Variants
from autoparallel.planner.search.space.candidates import sync_of
from autoparallel.planner.search.space.meshes import MESH_KEYS, Floats, Ints
from autoparallel.planner.search.space.syncs import widest_bucket_mib
from autoparallel.planner.strategy.types import AXES, Batch, GradSync, Mesh, Offload, Shard, Strategy

Axes = tuple[Axis, ...]
DATA_AXES = ("dp_replicate", "dp_shard", "cp")
EXCHANGED = ("reduce_s", "gather_s", "gather_each_s", "reduce_expert_s", "gather_expert_s")
STEPPED = ("step_s", "step_expert_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """Seconds by variant; per parameter nothing is faster than more of them at once."""

    reduce_s: Floats  # to reduce the gradient of one trainable parameter
    gather_s: Floats  # to gather the parameters of the smallest unit, ZeRO-3
    gather_each_s: Floats  # to gather one parameter, when all are gathered at once
    step_s: Floats  # to update one parameter and gather it again
    reduce_expert_s: Floats  # and likewise for one parameter of an expert under ep > 1
    gather_expert_s: Floats
    step_expert_s: Floats
    send_s: Floats  # the shortest message between neighbouring stages
    tied_s: Floats  # the exchange of tied gradients between the first and the last stage


@dataclass(frozen=True, slots=True, kw_only=True)
class WireBook:
    """Prices of the communication in one space, remembered by all that they depend on."""

    problem: Problem
    space: Space
    units: Units
    book: PriceBook
    placed: Ints  # by mesh and order: the number of the placement of data parallelism
    held: Ints  # by shape: the number of what its units hold
    away: Ints  # by shape: the number of the share of the optimizer's state on the host
    syncs: tuple[GradSync, ...]  # by compression
    pipelines: tuple[list[tuple[int, int]], Ints]  # `_pipelines`
    messages: tuple[list[int], Ints]  # `_messages`
    tied: tuple[int, ...]  # numbers in each tensor that both ends of the model hold
    _exchanged: dict[int, tuple[float, ...]] = field(default_factory=dict, repr=False)
    _stepped: dict[int, tuple[float, ...]] = field(default_factory=dict, repr=False)
    _ties: dict[int, tuple[float, ...]] = field(default_factory=dict, repr=False)
    _sends: dict[int, float] = field(default_factory=dict, repr=False)
    _inner: dict[int, int] = field(default_factory=dict, repr=False)  # by mesh and order
    _numbers: dict[object, int] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(problem: Problem, space: Space, units: Units, book: PriceBook, chain: Chain) -> WireBook:
        """The book of a space, empty."""
        _, held = np.unique(
            np.stack([units.unit_parameters, units.most_trainable]), axis=1, return_inverse=True
        )
        return WireBook(
            problem=problem,
            space=space,
            units=units,
            book=book,
            placed=_placements(space),
            held=held.reshape(-1),
            away=np.unique(space.shapes.optimizer_away, return_inverse=True)[1].reshape(-1),
            syncs=tuple(sync_of(problem, compression) for compression in space.compressions),
            pipelines=_pipelines(space),
            messages=_messages(problem, book, space.shapes),
            tied=tuple(tied_ends(problem.graph, chain).values()),
        )

    def price(self, found: Variants) -> Wires:
        """The communication of some variants."""
        few, which = _without_schedules(self.space, found)
        columns = dict(zip(EXCHANGED, self._exchange_prices(few).T, strict=True))
        columns |= zip(STEPPED, self._step_prices(few).T, strict=True)
        columns["send_s"] = self._sends_s(few)
        columns["tied_s"] = self._tied_s(few)
        return Wires(**{name: column[which] for name, column in columns.items()})

    def _example(self, mesh: int, order: int, zero: int, compression: int = 0, away: float = 0.0) -> Strategy:
        """A strategy whose gradients and parameters are exchanged, and updated, as they are in such variants."""
        sizes = dict(zip(MESH_KEYS, self.space.meshes.sizes[mesh].tolist(), strict=True))
        placed = Mesh(**sizes, order=self.space.meshes.orders[order])
        return Strategy(
            batch=Batch(global_=placed.dp_replicate * placed.dp_shard, micro=1), mesh=placed,
            shard=Shard(zero=zero), offload=Offload(optimizer=away), execution=self.problem.execution,
            grad_sync=self.syncs[compression],
        )  # fmt: skip

    def inner_placements(self, found: Variants) -> Ints:
        """For each variant, a number that is the same where its blocks communicate over the same levels: 0 where
        that is as near as can be."""
        keys = self.space.shapes.mesh[found.shape] * len(self.space.meshes.orders) + found.order
        distinct, which = np.unique(keys, return_inverse=True)
        for key in distinct.tolist():
            if key not in self._inner:
                self._inner[key] = self._inner_placement(*divmod(key, len(self.space.meshes.orders)))
        numbers = [self._inner[key] for key in distinct.tolist()]
        return np.asarray(np.array(numbers, dtype=np.int64)[which.reshape(-1)])

    def _inner_placement(self, mesh: int, order: int) -> int:
        sizes = dict(zip(MESH_KEYS, self.space.meshes.sizes[mesh].tolist(), strict=True))
        placed = Mesh(**sizes, order=self.space.meshes.orders[order])
        nearest = nearest_axes(placed, ordered="mesh.order" in self.problem.constraints)

        def crossed(axes: tuple[Axis, ...]) -> object:
            return tuple(crossings((name,), axes, self.problem.cluster) for name in INNER)

        where = crossed(inner_axes(axes_of(placed)))
        if where == crossed(nearest):
            return 0
        return self._numbers.setdefault(where, len(self._numbers) + 1)

    def _sends_s(self, found: Variants) -> Floats:
        """The shortest message between neighbouring stages."""
        columns, pipeline = self.pipelines
        messages, message = self.messages
        keys = (
            pipeline[self.space.shapes.mesh[found.shape], found.order] * len(messages) + message[found.shape]
        )
        distinct, which = _dense(keys, len(columns) * len(messages))
        for key in distinct.tolist():
            if key not in self._sends:
                (pp, stride), size_bytes = columns[key // len(messages)], messages[key % len(messages)]
                axis = Axis(name="pp", size=pp, stride=stride)
                self._sends[key] = self.book.send_s((axis,), size_bytes) if pp > 1 else 0.0
        return np.array([self._sends[key] for key in distinct.tolist()], dtype=np.float64)[which]

    def _tied_s(self, found: Variants) -> Floats:
        """Shards of gradients of tensors that both ends of the model hold, from rank to rank; as if tp sharded all of them."""
        shapes = self.space.shapes.take(found.shape)
        if not self.tied:
            return np.zeros(len(found))
        columns, pipeline = self.pipelines
        parts = shapes.tp * np.where(found.zero > 0, shapes.dp_shard * shapes.cp, 1)
        axes = pipeline[shapes.mesh, found.order]
        item = state.dtype_bytes(self.problem.execution.grad_dtype)

        def price(row: int) -> tuple[float, ...]:
            pp, stride = columns[int(axes[row])]
            axis = (Axis(name="pp", size=pp, stride=stride),)
            sizes = (state.share(numel * item, int(parts[row])) for numel in self.tied)
            return (sum(self.book.send_s(axis, size) for size in sizes) if pp > 1 else 0.0,)

        keys = axes * (int(self.space.shapes.devices.max()) + 1) + parts
        return np.asarray(_looked_up(self._ties, keys, price, 1)[:, 0])

    def _exchange_prices(self, found: Variants) -> Floats:
        """Columns EXCHANGED."""
        own = np.where(found.zero == 3, self.held[found.shape], 0)  # only ZeRO-3 asks how large a unit is
        keys = self._placed_keys(found) * len(self.space.compressions) + found.compression
        keys = keys * (int(self.held.max(initial=0)) + 1) + own

        def price(row: int) -> tuple[float, ...]:
            strategy = self._example_of(found, row)
            return _exchange_s(self.problem, self.book, self.units, strategy, int(found.shape[row]))

        return _looked_up(self._exchanged, keys, price, len(EXCHANGED))

    def _step_prices(self, found: Variants) -> Floats:
        """Columns STEPPED."""
        keys = self._placed_keys(found) * (int(self.away.max(initial=0)) + 1) + self.away[found.shape]
        whole = max(self.problem.graph.parameter_count, 1)

        def price(row: int) -> tuple[float, ...]:
            strategy = self._example_of(found, row)
            axes, experts = mesh_axes(strategy), self.units.all_experts[found.shape[row]] > 0
            step_s = _step_s(self.book, strategy, axes, whole, 0)
            expert_s = _step_s(self.book, strategy, axes, whole, whole) if experts else 0.0
            return step_s / whole, expert_s / whole

        return _looked_up(self._stepped, keys, price, len(STEPPED))

    def _placed_keys(self, found: Variants) -> Ints:
        """Where data parallelism is placed, and the level of ZeRO: 1 and 2 exchange the same, if not as often."""
        placed = self.placed[self.space.shapes.mesh[found.shape], found.order]
        return np.asarray(placed * 4 + np.where(found.zero == 2, 1, found.zero))

    def _example_of(self, found: Variants, row: int) -> Strategy:
        shapes, shape = self.space.shapes, int(found.shape[row])
        return self._example(
            int(shapes.mesh[shape]), int(found.order[row]), int(found.zero[row]), int(found.compression[row]),
            float(shapes.optimizer_away[shape]),
        )  # fmt: skip


def _looked_up(
    known: dict[int, tuple[float, ...]], keys: Ints, price: Callable[[int], tuple[float, ...]], columns: int
) -> Floats:
    """The prices by key, so many columns; of a key that is not known yet, that of its first row."""
    distinct, first, which = np.unique(keys, return_index=True, return_inverse=True)
    for key, row in zip(distinct.tolist(), first.tolist(), strict=True):
        if key not in known:
            known[key] = price(row)
    prices = np.array([known[key] for key in distinct.tolist()], dtype=np.float64).reshape(-1, columns)
    return np.asarray(prices[which.reshape(-1)])


def _without_schedules(space: Space, found: Variants) -> tuple[Variants, Ints]:
    """Of variants that differ in their schedules alone the first one each, and which of these each variant is like."""
    shapes, place = _dense(found.shape, len(space.shapes))
    sizes = (len(shapes), 4, len(space.meshes.orders), len(space.compressions))
    cells = np.ravel_multi_index((place, found.zero, found.order, found.compression), sizes)
    distinct, which = _dense(cells, int(np.prod(sizes)))
    first = np.empty(len(distinct), dtype=np.int64)
    first[which[::-1]] = np.arange(len(found))[::-1]
    return found.take(first), which


def _dense(numbers: Ints, size: int) -> tuple[Ints, Ints]:
    """The distinct ones of numbers below `size`, ascending, and which of them each is: `np.unique` without sorting."""
    there = np.zeros(size, dtype=np.bool_)
    there[numbers] = True
    return np.flatnonzero(there), (np.cumsum(there) - 1)[numbers]


def _messages(problem: Problem, book: PriceBook, shapes: Shapes) -> tuple[list[int], Ints]:
    """The distinct sizes of the shortest message between neighbouring stages, in bytes, and which of them each shape has."""
    # Never fewer parts than `planner.expand.scatters_messages` has it.
    shared = (shapes.sequence_parallel > 0) | (problem.execution.kernels == "fused")
    parts = shapes.cp * np.where(shared, shapes.tp, 1)
    most = int(parts.max(initial=1)) + 1
    sizes, which = np.unique(shapes.micro * most + parts, return_inverse=True)
    dtype = problem.execution.dtype
    messages = [book.least_message_bytes(dtype, *divmod(key, most)) for key in sizes.tolist()]
    return messages, which.reshape(-1)


def _pipelines(space: Space) -> tuple[list[tuple[int, int]], Ints]:
    """The distinct (size, stride) of the pipeline axis, and which of them it has by mesh and order."""
    sizes, columns = space.meshes.sizes, []
    for order in space.meshes.orders:
        inside = [MESH_KEYS.index(name) for name in order[order.index("pp") + 1 :]]
        columns.append(np.stack([sizes[:, MESH_KEYS.index("pp")], sizes[:, inside].prod(axis=1)], axis=1))
    every = np.stack(columns, axis=1).reshape(-1, 2)
    distinct, which = np.unique(every, axis=0, return_inverse=True)
    return [(pp, stride) for pp, stride in distinct.tolist()], which.reshape(len(sizes), -1)


def _placements(space: Space) -> Ints:
    """For each mesh and order, a number that is the same where the groups of data parallelism are placed alike."""
    axes = [AXES.index(name) for name in DATA_AXES]
    orders, meshes = space.meshes.near.shape[:2]
    near = space.meshes.near[:, :, axes].reshape(orders * meshes, -1)
    sizes = space.meshes.sizes[:, [MESH_KEYS.index(name) for name in MESH_KEYS if name != "pp"]]
    # tp and ep say how experts are shared among the ranks of data parallelism; without experts apart tp does not.
    sizes = np.where(np.array([n == "tp" for n in MESH_KEYS if n != "pp"]) & (sizes[:, -1:] == 1), 1, sizes)
    rows = np.concatenate([near, np.tile(sizes, (orders, 1))], axis=1)
    _, number = np.unique(rows, axis=0, return_inverse=True)
    return np.asarray(number.reshape(orders, meshes).T)


def _exchange_s(
    problem: Problem, book: PriceBook, units: Units, strategy: Strategy, shape: int
) -> tuple[float, ...]:
    """EXCHANGED of one placement."""
    axes, experts = mesh_axes(strategy), int(units.all_experts[shape])
    dense = _dense_s(problem, book, units, strategy, axes, shape) if _reduces(strategy) else (0.0,) * 3
    if not experts:
        return (*dense, 0.0, 0.0)
    gather_s = _gather_s(book, strategy, axes, experts, experts) / experts
    return (*dense, _reduce_expert_s(problem, book, strategy, axes, experts), gather_s)


def _reduces(strategy: Strategy) -> bool:
    return strategy.mesh.data_parallel * strategy.mesh.cp > 1


def _step_s(book: PriceBook, strategy: Strategy, axes: Axes, parameters: int, experts: int) -> float:
    """To update so many parameters at once and to gather them again: experts and others are updated by one kernel, so
    that the rate of either is that of all."""
    mode = strategy.execution.kernels
    updates = state.optimizer_kernel(parameters, strategy, experts)
    gathers = () if strategy.execution.late_gathers else state.updated_gather(parameters, strategy, experts)
    step_s = sum(book.pricer.kernel_s(kernel, book.device, mode) for kernel in updates)
    return step_s + sum(book.pricer.collective_s(c, axes) for c in gathers)


def _dense_s(
    problem: Problem, book: PriceBook, units: Units, strategy: Strategy, axes: Axes, shape: int
) -> tuple[float, float, float]:
    """reduce_s, gather_s and gather_each_s."""
    if state.zero_level(strategy) < 3:
        return _bucket_s(problem, book, strategy, axes), 0.0, 0.0
    # Shards of experts and of the rest are summed over replicas by one collective.
    most = max(int(units.most_trainable[shape]), 1) + int(units.all_experts[shape])
    reduce_s = _at_once_s(book, strategy, axes, most)
    whole = max(problem.graph.parameter_count, 1)
    unit = int(units.unit_parameters[shape])
    return (
        reduce_s,
        _gather_s(book, strategy, axes, unit, 0),
        _gather_s(book, strategy, axes, whole, 0) / whole,
    )


def _at_once_s(book: PriceBook, strategy: Strategy, axes: Axes, parameters: int, experts: int = 0) -> float:
    """To reduce the gradient of one of so many parameters, all of them at once."""
    return book.reduction_s(parameters, strategy, axes, experts) / parameters


def _bucket_s(
    problem: Problem, book: PriceBook, strategy: Strategy, axes: Axes, *, experts: bool = False
) -> float:
    """To reduce the gradient of one parameter in the widest bucket."""
    item = state.dtype_bytes(strategy.execution.grad_dtype)
    bucket = round(widest_bucket_mib(problem) * MIB)
    return book.reduce_rate(strategy, axes, bucket, experts=experts) * item


def _gather_s(book: PriceBook, strategy: Strategy, axes: Axes, parameters: int, experts: int) -> float:
    """To gather so many parameters at once, all or none of them experts', ZeRO-3."""
    gathers = state.gathers_of(parameters, experts, strategy)
    return sum(book.pricer.collective_s(c, axes) for c in gathers if c is not None)


def _reduce_expert_s(
    problem: Problem, book: PriceBook, strategy: Strategy, axes: Axes, experts: int
) -> float:
    """To reduce the gradient of one of so many parameters."""
    if state.zero_level(strategy) < 3:
        return _bucket_s(problem, book, strategy, axes, experts=True)
    return _at_once_s(book, strategy, axes, experts, experts)
