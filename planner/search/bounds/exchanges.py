"""What gradients and parameters take to be exchanged where a mesh places its groups: rates that no strategy there goes below.

A price is made once for all variants whose groups cross the same levels of the network, and remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from autoparallel.costmodel.program import Axis
from autoparallel.planner.expand import state
from autoparallel.planner.expand.expander import mesh_axes
from autoparallel.planner.expand.gathers import gathers_late, gathers_of, regather_of
from autoparallel.planner.expand.one_by_one import fetched_share, fetches
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.bounds.placements import Groups, sizes_shared
from autoparallel.planner.search.bounds.prices import Line, PriceBook, line_below
from autoparallel.planner.search.bounds.settings import SettingPrices
from autoparallel.planner.search.bounds.tables import SINGLE
from autoparallel.planner.search.space.build import Space, Variants
from autoparallel.planner.search.space.candidates import sync_of
from autoparallel.planner.search.space.meshes import MESH_KEYS, Floats, Ints, alike, numbered
from autoparallel.planner.strategy.types import Batch, GradSync, Mesh, Offload, Shard, Strategy

Axes = tuple[Axis, ...]
Known = dict[int, tuple[float, ...]]
NUMBERED = ("all_experts", "group_parameters", "most_trainable")  # columns that a price depends on
GATHERED = ("gather_s", "gather_each_s", "regather_s", "regather_each_s")
EXCHANGED = ("reduce_s", "reduce_least_s", *GATHERED, "reduce_expert_s", "gather_expert_s")
# Of experts last.
STEPPED = (
    "step_s", "step_least_s", "updated_s", "summed_s", "summed_least_s", "step_expert_s", "updated_expert_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePrices:
    """Prices of what ranks of data parallelism exchange and update in one space, by parameter; experts under ep > 1 apart."""

    problem: Problem
    space: Space
    prices: SettingPrices
    book: PriceBook
    groups: Groups
    sized: Ints  # by shape: the number of its sizes of the axes that parameters are shared over
    offloaded: Ints  # likewise of the share of the optimizer's state on the host
    group: Ints  # of what its smallest layer group has, which ZeRO-3 gathers at once
    most: Ints  # into `most_at_once`, of what its largest layer group has, which ZeRO-3 reduces at once
    most_at_once: Floats  # the distinct ones
    experts: Ints  # of the parameters in experts that are apart
    syncs: tuple[GradSync, ...]  # by compression
    weights: Ints  # by compression: the number of how gathered parameters are encoded,
    gradients: Ints  # and of how gradients are
    _reduced: Known = field(default_factory=dict, repr=False)
    _gathered: Known = field(default_factory=dict, repr=False)
    _experts: Known = field(default_factory=dict, repr=False)
    _at_once: Known = field(default_factory=dict, repr=False)
    _experts_at_once: Known = field(default_factory=dict, repr=False)
    _stepped: Known = field(default_factory=dict, repr=False)
    _summed: Known = field(default_factory=dict, repr=False)
    _stepped_experts: Known = field(default_factory=dict, repr=False)

    @staticmethod
    def of(problem: Problem, space: Space, prices: SettingPrices, book: PriceBook) -> ExchangePrices:
        """The book of a space, empty."""
        columns = {name: prices.rows[:, SINGLE.index(name)] for name in NUMBERED}

        def by_shape(column: Floats) -> Ints:
            return np.asarray(np.unique(column, return_inverse=True)[1].reshape(-1)[prices.setting_of])

        at_once = np.maximum(columns["most_trainable"], 1) + columns["all_experts"]
        at_once = np.where(np.isfinite(at_once), at_once, 1.0)
        weights = [one.weights for one in space.compressions]
        gradients = [one.gradients for one in space.compressions]
        return ExchangePrices(
            problem=problem, space=space, prices=prices, book=book, groups=Groups.of(space, problem.cluster),
            sized=sizes_shared(space)[space.shapes.mesh],
            offloaded=np.unique(space.shapes.optimizer_offloaded, return_inverse=True)[1].reshape(-1),
            group=by_shape(columns["group_parameters"]), most=by_shape(at_once), most_at_once=np.unique(at_once),
            experts=by_shape(columns["all_experts"]),
            syncs=tuple(sync_of(problem, compression) for compression in space.compressions),
            weights=np.array([weights.index(word) for word in weights]),
            gradients=np.array([gradients.index(words) for words in gradients]),
        )  # fmt: skip

    @property
    def held(self) -> Ints:
        """By shape, a number that is the same where layer groups hold as much."""
        return numbered(self.group, self.most, self.experts)

    def rates(self, found: Variants) -> Floats:
        """Columns EXCHANGED of some variants."""
        most, experts = self.most[found.shape], self._column("all_experts", found)

        def reduced(row: int) -> tuple[float, ...]:
            # Shards of experts and of the rest are summed over replicas by one collective.
            line = self._reduced_line(self._example(found, row), int(self.most_at_once[most[row]]))
            return line.each_s, line.least_s

        def of_experts(row: int) -> tuple[float, ...]:
            strategy, count = self._example(found, row), int(experts[row])
            if fetches(strategy):
                return 0.0, 0.0
            axes = mesh_axes(strategy)
            gather_s = gather_at_once_s(self.book, strategy, axes, count, count) / count
            return self._reduced_line(strategy, count, experts=True).each_s, gather_s

        third = found.zero == 3  # alone asks how large a layer group is
        keys = self._keys(found, self.groups.shards, np.where(third, most, 0))
        own = self.experts[found.shape] * len(self.weights) + self.weights[found.compression]
        own = np.where(third, own, 0)  # as experts are gathered encoded, too
        alone = self._fetched(found, reduced=True)[:, None]
        return np.concatenate(
            [
                looked_up(self._reduced, keys, reduced, 2) * alone,
                self._gathers(found),
                self._of_experts(self._experts, found, of_experts, 2, own),
            ],
            axis=1,
        )

    def at_once(self, found: Variants) -> Floats:
        """To reduce the gradient of a parameter, and of an expert's, under ZeRO-3: nothing is faster than those of the whole model
        at once."""
        whole = max(self.problem.graph.parameter_count, 1)

        def price(row: int, experts: int) -> tuple[float, ...]:
            strategy = self._example(found, row)
            if fetches(strategy) if experts else not _reduces(strategy):
                return (0.0,)
            return (at_once_s(self.book, strategy, mesh_axes(strategy), whole, experts),)

        dense = looked_up(self._at_once, self._keys(found, self.groups.shards), lambda row: price(row, 0), 1)
        dense *= self._fetched(found, reduced=True)[:, None]
        experts = self._of_experts(self._experts_at_once, found, lambda row: price(row, whole), 1)
        return np.concatenate([dense, experts], axis=1)

    def steps(self, found: Variants) -> Floats:
        """Columns STEPPED of some variants."""
        # Parameters are gathered where they stand under ZeRO-1 and 2 alone: an update by itself asks for sizes only.
        gathered, sizes = (found.zero == 1) | (found.zero == 2), int(self.sized.max(initial=0)) + 1
        several = int(self.offloaded.max(initial=0)) + 1
        at = self.space.shapes.mesh[found.shape], found.order
        whole = max(self.problem.graph.parameter_count, 1)

        def keys(placed: Ints) -> Ints:
            alone = self.sized[found.shape] * 4 + found.zero
            where = np.where(gathered, sizes * 4 + placed[at], alone)
            return np.asarray(where * several + self.offloaded[found.shape])

        def price(row: int) -> tuple[float, ...]:
            strategy = self._example(found, row)
            axes = mesh_axes(strategy)
            line = update_line(self.book, strategy, axes, whole)
            return line.each_s, line.least_s, _gather_late_s(self.book, strategy, axes, whole)

        def of_experts(row: int) -> tuple[float, ...]:
            strategy = self._example(found, row)
            axes = mesh_axes(strategy)
            step_s = update_s(self.book, strategy, axes, whole, whole) / whole
            return step_s, _gather_late_s(self.book, strategy, axes, whole, whole)

        prices = np.zeros((len(found), len(STEPPED)))
        prices[:, :3] = looked_up(self._stepped, keys(self.groups.shards), price, 3)
        prices[:, 3:5] = self._summed_at_end(found, whole)
        rows = np.flatnonzero(self._column("all_experts", found) > 0)  # then their shards are elsewhere
        if len(rows):
            known, own = self._stepped_experts, keys(self.groups.expert_shards)[rows]
            prices[rows, 5:] = looked_up(known, own, lambda row: of_experts(int(rows[row])), 2)
        return prices

    def _summed_at_end(self, found: Variants, most: int) -> Floats:
        """What the sum of shards of gradients over the replicas, which is due once a step, takes by parameter and at least."""
        prices, rows = np.zeros((len(found), 2)), np.flatnonzero(self._at_end(found))

        def price(row: int) -> tuple[float, ...]:
            line = summed_line(self.book, self._example(found, int(rows[row])), most)
            return line.each_s, line.least_s

        if len(rows):
            prices[rows] = looked_up(self._summed, self._keys(found, self.groups.shards)[rows], price, 2)
        return prices

    def _column(self, name: str, found: Variants) -> Floats:
        return self.prices.column(name, found.shape)

    def _gathers(self, found: Variants) -> Floats:
        """Columns GATHERED, of ZeRO-3: what a layer group is gathered in, and a parameter where all are gathered at once, before
        forward and before backward."""
        prices, rows = np.zeros((len(found), len(GATHERED))), np.flatnonzero(found.zero == 3)
        if not len(rows):
            return prices
        group, few = self._column("group_parameters", found), found.take(rows)
        whole = max(self.problem.graph.parameter_count, 1)

        def price(row: int) -> tuple[float, ...]:
            strategy = self._example(few, row)
            axes, own = mesh_axes(strategy), int(group[rows[row]])
            each_s = gather_at_once_s(self.book, strategy, axes, whole, 0) / whole
            gather_s = gather_at_once_s(self.book, strategy, axes, own, 0)
            if not strategy.shard.secondary:
                return gather_s, each_s, gather_s, each_s
            again_s, again_each_s = (
                regather_at_once_s(self.book, strategy, axes, count) for count in (own, whole)
            )
            return gather_s, each_s, again_s, again_each_s / whole

        where = self.groups.shards[self.space.shapes.mesh[few.shape], few.order]
        keys = where * len(self.weights) + self.weights[few.compression]
        keys = keys * (int(self.space.shapes.dp_shard.max(initial=0)) + 1) + self.space.secondary(few)
        keys = keys * (int(self.group.max(initial=0)) + 1) + self.group[few.shape]
        prices[rows] = looked_up(self._gathered, keys, price, len(GATHERED)) * self._fetched(few)[:, None]
        return prices

    def _fetched(self, found: Variants, *, reduced: bool = False) -> Floats:
        """The share of the parameters that is gathered at all, or whose gradients are `reduced`: less where they are fetched one by
        one, each for itself, which takes no less than all at once."""
        if not self.problem.execution.parameter_gathers:
            return np.ones(len(found))
        shapes = self.space.shapes.take(found.shape)
        known = shapes.ep == 1  # where experts are apart, nothing is
        if reduced:
            known &= shapes.dp_replicate == 1
        share = fetched_share(self.problem.graph, int(self.space.shapes.tp.max(initial=1)))
        return np.where(found.zero < 3, 1.0, np.where(known, share, 0.0))

    def _of_experts(
        self, known: Known, found: Variants, price: Callable[[int], tuple[float, ...]], columns: int,
        own: Ints | int = 0,
    ) -> Floats:  # fmt: skip
        """The prices of what is exchanged of experts that are apart, 0 where none are."""
        prices = np.zeros((len(found), columns))
        rows = np.flatnonzero(self._column("all_experts", found) > 0)
        keys = self._keys(found, self.groups.expert_shards, own)[rows]
        prices[rows] = looked_up(known, keys, lambda row: price(int(rows[row])), columns)
        return prices

    def _reduced_line(self, strategy: Strategy, most: int, *, experts: bool = False) -> Line:
        """To reduce gradients, each of one parameter: in buckets up to the widest, or of `most` at once, ZeRO-3."""
        if not experts and not _reduces(strategy):
            return Line(least_s=0.0, each_s=0.0)
        axes = mesh_axes(strategy)
        if state.zero_level(strategy) == 3:
            each_s = at_once_s(self.book, strategy, axes, most, most if experts else 0)
            return Line(least_s=0.0, each_s=each_s)
        item = state.dtype_bytes(strategy.execution.grad_dtype)
        line = self.book.reduce_line(strategy, axes, experts=experts)
        return Line(least_s=line.least_s, each_s=line.each_s * item)

    def _keys(self, found: Variants, shards: Ints, own: Ints | int = 0) -> Ints:
        """Where parameters of a kind are sharded and their gradients reduced, at what level of ZeRO (1 and 2 exchange the same, if
        not as often) and how; `own` number beside."""
        at = self.space.shapes.mesh[found.shape], found.order
        keys = shards[at] * (int(self.groups.replicas.max(initial=0)) + 1) + self.groups.replicas[at]
        keys = keys * 4 + np.where(found.zero == 2, 1, found.zero)
        keys = keys * len(self.space.compressions) + self.gradients[found.compression]
        experts = (int(self.experts.max(initial=0)) + 1) * len(self.weights)
        most = max(int(self.most.max(initial=0)), experts)
        return np.asarray((keys * (most + 1) + own) * 2 + self._at_end(found))

    def _at_end(self, found: Variants) -> Ints:
        """Whether shards of gradients are summed over the replicas once a step (`state.replicas_at_end`), which is in no rate
        of a micro-batch."""
        shapes = self.space.shapes.take(found.shape)
        several = (shapes.micro_batches > 1) & (shapes.dp_replicate > 1) & (found.zero >= 2)
        return np.asarray(several & self.problem.execution.fsdp2).astype(np.int64)

    def _example(self, found: Variants, row: int) -> Strategy:
        """A strategy whose gradients and parameters are exchanged, and updated, as they are in a variant."""
        shapes, shape = self.space.shapes, int(found.shape[row])
        sizes = self.space.meshes.sizes[shapes.mesh[shape]].tolist()
        order = self.space.meshes.orders[int(found.order[row])]
        placed = Mesh(**dict(zip(MESH_KEYS, sizes, strict=True)), order=order)
        several = 1 + int(shapes.micro_batches[shape] > 1)
        return Strategy(
            batch=Batch(global_=several * placed.dp_replicate * placed.dp_shard, micro=1), mesh=placed,
            shard=Shard(zero=int(found.zero[row]), secondary=int(self.space.secondary(found.take(slice(row, row + 1)))[0])),
            offload=Offload(optimizer=float(shapes.optimizer_offloaded[shape])),
            execution=self.problem.execution, grad_sync=self.syncs[int(found.compression[row])],
        )  # fmt: skip


def _reduces(strategy: Strategy) -> bool:
    """Whether several ranks share the gradients of a parameter, and exchange them as a whole."""
    return strategy.mesh.data_parallel * strategy.mesh.cp > 1


def update_s(book: PriceBook, strategy: Strategy, axes: Axes, parameters: int, experts: int) -> float:
    """To update so many parameters at once and to gather them again: experts and others are updated by one kernel, so
    that the rate of either is that of all."""
    updated_s = _kernels_s(book, strategy, parameters, experts)
    return updated_s + _gather_updated_s(book, strategy, axes, parameters, experts)


def _kernels_s(book: PriceBook, strategy: Strategy, parameters: int, experts: int = 0) -> float:
    updates = state.optimizer_kernel(parameters, strategy, experts)
    return sum(book.pricer.kernel_s(kernel, book.device, strategy.execution.kernels) for kernel in updates)


def _gather_updated_s(
    book: PriceBook, strategy: Strategy, axes: Axes, parameters: int, experts: int = 0
) -> float:
    return 0.0 if gathers_late(strategy) else book.updated_gather_s(parameters, strategy, axes, experts)


def _gather_late_s(
    book: PriceBook, strategy: Strategy, axes: Axes, parameters: int, experts: int = 0
) -> float:
    """To gather one of so many updated parameters beside the next step's first forward, all of them at once."""
    gathered_s = book.updated_gather_s(parameters, strategy, axes, experts)
    return gathered_s / parameters if gathers_late(strategy) else 0.0


def update_line(book: PriceBook, strategy: Strategy, axes: Axes, most: int) -> Line:
    """To update parameters that are no experts' and gather them again, up to so many: each stage does so once."""
    gather = line_below(lambda count: _gather_updated_s(book, strategy, axes, count), most)
    # A kernel is launched while others run: its bytes alone count.
    return Line(least_s=gather.least_s, each_s=gather.each_s + _kernels_s(book, strategy, most) / most)


def summed_line(book: PriceBook, strategy: Strategy, most: int, *, experts: bool = False) -> Line:
    """To sum shards of gradients of up to so many parameters over the replicas at the end of a step (`state.replica_reduction`)."""
    axes = mesh_axes(strategy)

    def seconds(count: int) -> float:
        due = state.replica_reduction(count, strategy, count if experts else 0)
        return sum(book.pricer.collective_s(one, axes) for one in due)

    return line_below(seconds, most)


def at_once_s(book: PriceBook, strategy: Strategy, axes: Axes, parameters: int, experts: int = 0) -> float:
    """To reduce the gradient of one of so many parameters, all of them at once."""
    return book.reduction_s(parameters, strategy, axes, experts) / parameters


def gather_at_once_s(book: PriceBook, strategy: Strategy, axes: Axes, parameters: int, experts: int) -> float:
    """To gather so many parameters at once, all or none of them experts', ZeRO-3."""
    gathers = gathers_of(parameters, experts, strategy)
    return sum(book.pricer.collective_s(c, axes) for c in gathers if c is not None)


def regather_at_once_s(book: PriceBook, strategy: Strategy, axes: Axes, parameters: int) -> float:
    """To gather so many parameters that have a second copy, and are no experts', before a backward pass."""
    gather = regather_of(parameters, 0, strategy)
    return 0.0 if gather is None else book.pricer.collective_s(gather, axes)


def looked_up(known: Known, keys: Ints, price: Callable[[int], tuple[float, ...]], columns: int) -> Floats:
    """The prices by key, so many columns; of a key that is not known yet, that of its first row."""
    first, which = alike(keys)
    distinct = keys[first].tolist()
    for key, row in zip(distinct, first.tolist(), strict=True):
        if key not in known:
            known[key] = price(row)
    prices = np.array([known[key] for key in distinct], dtype=np.float64).reshape(len(distinct), columns)
    return np.asarray(prices[which])
