"""What variants communicate, in columns: gradients, ZeRO's parameters, messages between stages.

A price depends on where a mesh places its groups, of which there are few: each distinct placement is priced once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import numpy as np

from autoparallel.costmodel.program import Axis
from autoparallel.costmodel.topology import crossings
from autoparallel.planner.expand import state
from autoparallel.planner.expand.axes import INNER, axes_of, inner_axes, nearest_axes
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.bounds.exchanges import EXCHANGED, STEPPED, ExchangePrices, Known, looked_up
from autoparallel.planner.search.bounds.placements import message_sizes, places
from autoparallel.planner.search.bounds.prices import PriceBook
from autoparallel.planner.search.bounds.settings import SettingPrices
from autoparallel.planner.search.partition.forms import Chain
from autoparallel.planner.search.space.build import Space, Variants
from autoparallel.planner.search.space.meshes import MESH_KEYS, Floats, Ints, alike
from autoparallel.planner.strategy.types import Mesh

Axes = tuple[Axis, ...]
REDUCED = [EXCHANGED.index(name) for name in ("reduce_s", "reduce_expert_s")]
UPDATED = [STEPPED.index(name) for name in ("step_s", "step_expert_s")]
LEAST = ("reduce_s", "reduce_expert_s", "step_s", "step_expert_s")
RATES = (*EXCHANGED, *STEPPED, "tied_s")  # columns of `Communication` that are numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Seconds by variant; per parameter nothing is faster than more of them at once."""

    reduce_s: Floats  # to reduce the gradient of one trainable parameter,
    reduce_least_s: Floats  # and of any at all, not ZeRO-3
    gather_s: Floats  # to gather the parameters of the smallest layer group, ZeRO-3
    gather_each_s: Floats  # to gather one parameter, when all are gathered at once
    regather_s: Floats  # likewise, before a backward pass
    regather_each_s: Floats
    step_s: Floats  # to update one parameter and gather it again,
    step_least_s: Floats  # and any at all
    updated_s: Floats  # to gather one beside the next step's first forward
    summed_s: Floats  # to sum the gradient of one over the replicas, where that is due once a step,
    summed_least_s: Floats  # and of any at all
    reduce_expert_s: Floats  # and likewise for one parameter of an expert under ep > 1
    gather_expert_s: Floats
    step_expert_s: Floats
    updated_expert_s: Floats
    sends_s: Floats  # the messages between neighbouring stages, [variant, one of `Chain.messages`]
    tied_s: Floats  # the exchange of tied gradients between the first and the last stage

    def take(self, rows: Ints) -> Communication:
        return Communication(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Least:
    """Of `Communication`, by mesh and order, the least of all levels of ZeRO and compressions."""

    reduce_s: Floats
    reduce_expert_s: Floats
    step_s: Floats
    step_expert_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationPrices:
    """Prices of the communication in one space, remembered by all that they depend on."""

    problem: Problem
    space: Space
    prices: SettingPrices
    book: PriceBook
    exchanges: ExchangePrices
    pipelines: tuple[list[tuple[int, int]], Ints]  # `placements.places` of the pipeline axis
    tensors: tuple[list[tuple[int, int]], Ints]  # and of the tensor-parallel one
    messages: tuple[list[tuple[int, ...]], Ints]  # `placements.message_sizes`
    tied: tuple[int, ...]  # numbers in each tensor that both ends of the model hold
    _ties: Known = field(default_factory=dict, repr=False)
    _sends: Known = field(default_factory=dict, repr=False)
    _joins: Known = field(default_factory=dict, repr=False)
    _inner: dict[int, tuple[int, ...]] = field(default_factory=dict, repr=False)  # by mesh, of each order
    _crossings: dict[Axes, object] = field(default_factory=dict, repr=False)
    _numbers: dict[object, int] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(
        problem: Problem, space: Space, prices: SettingPrices, book: PriceBook, chain: Chain
    ) -> CommunicationPrices:
        """The book of a space, empty."""
        return CommunicationPrices(
            problem=problem,
            space=space,
            prices=prices,
            book=book,
            exchanges=ExchangePrices.of(problem, space, prices, book),
            pipelines=places(space, "pp"),
            tensors=places(space, "tp"),
            messages=message_sizes(problem, book, space.shapes, chain),
            tied=tuple(chain.ties.numbers[name] for name in sorted(chain.ties.ends)),
        )

    def price(self, found: Variants) -> Communication:
        """The communication of some variants."""
        few, which = _without_schedules(found)
        columns = dict(zip(RATES, self.rates(few).T, strict=True))
        columns["sends_s"] = self._sends_s(few)
        return Communication(**columns).take(which)

    def rates(self, found: Variants) -> Floats:
        """Columns RATES of some variants."""
        tied = self._tied_s(found)[:, None]
        return np.concatenate([self.exchanges.rates(found), self.exchanges.steps(found), tied], axis=1)

    def least_s(self) -> Least:
        """What no variant of a mesh and order goes below."""
        shapes, orders = self.space.shapes, len(self.space.meshes.orders)
        rows = np.flatnonzero(
            np.isfinite(self.prices.column("all_trainable"))
        )  # shapes that are strategies at all
        several = (
            shapes.micro_batches[rows] > 1
        ) & self.problem.execution.fsdp2  # see `state.replicas_at_end`
        # What is updated on the host takes other time.
        first, _ = alike(shapes.mesh[rows], self.exchanges.offloaded[rows], several.astype(np.int64))
        least = np.full((len(self.space.meshes.sizes), orders, len(LEAST)), np.inf)
        owner, every = np.nonzero(self.space.meshes.placed[shapes.mesh[rows[first]]])
        owners = rows[first][owner]
        for zero in self.space.zeros:
            legal = self.space.zero_fits(shapes.take(owners), zero)
            for compression in range(self.space.methods(zero)):
                if self.space.copies(compression):  # reduced and updated as without
                    continue
                found = Variants(
                    shape=owners, order=every, zero=np.full_like(owners, zero),
                    schedule=np.zeros_like(owners), virtual_stages=np.ones_like(owners),
                    compression=np.full_like(owners, compression),
                ).take(legal)  # fmt: skip
                at = shapes.mesh[found.shape], found.order
                exchanges = self.exchanges
                each = exchanges.at_once(found) if zero == 3 else exchanges.rates(found)[:, REDUCED]
                np.minimum.at(least, at, np.concatenate([each, exchanges.steps(found)[:, UPDATED]], axis=1))
        least[~np.isfinite(least)] = 0.0  # where no level is legal
        return Least(**{name: least[:, :, i] for i, name in enumerate(LEAST)})

    def shortest_s(self, rows: Ints, order: int, chain: Chain) -> Floats:
        """The shortest message between neighbouring stages of some shapes under this order of the mesh's axes."""
        (_, pipeline), (messages, message) = self.pipelines, self.messages
        own = pipeline[self.space.shapes.mesh[rows], order] * len(messages) + message[rows]
        first, which = alike(own)
        shortest = []
        for key in own[first].tolist():
            if key not in self._sends:
                self._sends[key] = self._sent_s(key)
            shortest.append(min((self._sends[key][cut] for cut in chain.sent), default=0.0))
        return np.array(shortest, dtype=np.float64)[which]

    def inner_placements(self, found: Variants) -> Ints:
        """For each variant, a number that is the same where its blocks communicate over the same levels: 0 where
        that is as near as can be."""
        numbers, which = self._inner_table(self.space.shapes.mesh[found.shape])
        return np.asarray(numbers[which, found.order])

    def inner_of(self, meshes: Ints) -> Ints:
        """That number by mesh and order; -1 where an order is no other placement."""
        numbers, which = self._inner_table(meshes)
        return np.asarray(numbers[which])

    def _inner_table(self, meshes: Ints) -> tuple[Ints, Ints]:
        """The numbers of the distinct meshes, by order, and which of these each mesh is."""
        first, which = alike(meshes)
        distinct = meshes[first].tolist()
        for mesh in distinct:
            if mesh not in self._inner:
                self._inner[mesh] = self._inner_numbers(mesh)
        numbers = np.array([self._inner[mesh] for mesh in distinct], dtype=np.int64)
        return numbers.reshape(len(distinct), len(self.space.meshes.orders)), which

    def _inner_numbers(self, mesh: int) -> tuple[int, ...]:
        sizes = dict(zip(MESH_KEYS, self.space.meshes.sizes[mesh].tolist(), strict=True))
        placed = self.space.meshes.placed[mesh].tolist()
        orders = self.space.meshes.orders
        if sizes["tp"] * sizes["cp"] * sizes["ep"] == 1:
            return tuple(0 if there else -1 for there in placed)
        one = Mesh(**sizes)
        nearest = self._crossed(nearest_axes(one, ordered=self.problem.fixed.order is not None))
        return tuple(
            self._inner_number(replace(one, order=order), nearest) if there else -1
            for order, there in zip(orders, placed, strict=True)
        )

    def _inner_number(self, placed: Mesh, nearest: object) -> int:
        where = self._crossed(inner_axes(axes_of(placed)))
        return 0 if where == nearest else self._numbers.setdefault(where, len(self._numbers) + 1)

    def _crossed(self, axes: Axes) -> object:
        """The levels that these axes cross."""
        if axes not in self._crossings:
            crossed = tuple(crossings((name,), axes, self.problem.cluster) for name in INNER)
            self._crossings[axes] = crossed
        return self._crossings[axes]

    def _sends_s(self, found: Variants) -> Floats:
        """The messages between neighbouring stages, joined where tensor-parallel ranks each send a share."""
        shapes = self.space.shapes
        (tensors, tensor), (messages, message) = self.tensors, self.messages
        own, mesh = message[found.shape], shapes.mesh[found.shape]
        found_s = self.messages_s(found.shape, found.order)
        if self.problem.execution.kernels != "fused":
            return found_s
        rows = np.flatnonzero((shapes.tp > 1)[found.shape] & (shapes.sequence_parallel == 0)[found.shape])
        rows = rows[shapes.pp[found.shape[rows]] > 1]
        joins = tensor[mesh[rows], found.order[rows]] * len(messages) + own[rows]

        def joined(row: int) -> tuple[float, ...]:
            (tp, stride), sizes = tensors[joins[row] // len(messages)], messages[joins[row] % len(messages)]
            axis = Axis(name="tp", size=tp, stride=stride)
            return tuple(self.book.join_s((axis,), size * tp) for size in sizes)

        found_s[rows] += looked_up(self._joins, joins, joined, len(messages[0]))
        return found_s

    def messages_s(self, shapes: Ints, orders: Ints) -> Floats:
        """The messages between neighbouring stages, each rank's share alone, of some shapes with these orders."""
        (_, pipeline), (messages, message) = self.pipelines, self.messages
        keys = pipeline[self.space.shapes.mesh[shapes], orders] * len(messages) + message[shapes]
        return looked_up(self._sends, keys, lambda row: self._sent_s(int(keys[row])), len(messages[0]))

    def _sent_s(self, key: int) -> tuple[float, ...]:
        """Each message, by the number of its pipeline and that of its size."""
        pipeline, message = divmod(key, len(self.messages[0]))
        pp, stride = self.pipelines[0][pipeline]
        axis = Axis(name="pp", size=pp, stride=stride)
        return tuple(self.book.send_s((axis,), size) if pp > 1 else 0.0 for size in self.messages[0][message])

    def _tied_s(self, found: Variants) -> Floats:
        """Shards of gradients of tensors that both ends of the model hold, from rank to rank; as if tp sharded all of
        them."""
        shapes = self.space.shapes.take(found.shape)
        if not self.tied:
            return np.zeros(len(found))
        columns, pipeline = self.pipelines
        parts = shapes.tp * np.where(found.zero > 0, shapes.dp_shard * shapes.cp, 1)
        axes = pipeline[shapes.mesh, found.order]
        item = state.tied_gradient_bytes(self.problem.execution)

        def price(row: int) -> tuple[float, ...]:
            pp, stride = columns[int(axes[row])]
            axis = (Axis(name="pp", size=pp, stride=stride),)
            sizes = (state.share(numel * item, int(parts[row])) for numel in self.tied)
            return (sum(self.book.send_s(axis, size) for size in sizes) if pp > 1 else 0.0,)

        keys = axes * (int(self.space.shapes.devices.max()) + 1) + parts
        return np.asarray(looked_up(self._ties, keys, price, 1)[:, 0])


def _without_schedules(found: Variants) -> tuple[Variants, Ints]:
    """Of variants that differ in their schedules alone the first one each, and which of these each variant is like."""
    first, which = alike(found.shape, found.zero, found.order, found.compression)
    return found.take(first), which
