"""What each choice of a table adds to a step, as numbers that a linear program can sum: each sum a true lower bound.

For one strategy with its tables still open, on one pipeline rank. All seconds are `price_block`'s of the very links
that the expander makes, whose sum the simulated passes never fall below; what is concave in its bytes (exchanges,
reductions) is bounded by its chord.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoparallel.costmodel.memory import activation_profile
from autoparallel.costmodel.price import price_block
from autoparallel.costmodel.program import BlockWork, Collective, Kernel, Program, StageWork, Step
from autoparallel.planner.embedding.options import TableClass
from autoparallel.planner.expand import state
from autoparallel.planner.expand.cold import cold_state, exchange_steps, host_bytes, rows_per_micro_batch
from autoparallel.planner.expand.expander import Expander, mesh_axes
from autoparallel.planner.expand.gathers import gathers_of, regather_of, updated_gather
from autoparallel.planner.expand.tables import TablePlace, hot_graph
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.space.syncs import BUCKETS_MIB, open_algorithms
from autoparallel.planner.strategy.types import Strategy

BELOW = 1 - 1e-6  # rounding of buckets to whole bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """At least `floor`, and at least `fixed + slope * x`, where x > 0; nothing where x is 0."""

    floor: float
    fixed: float
    slope: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What one table of a class adds with one choice."""

    backward_s: float  # of one micro-batch, more than without rows
    exposed_s: tuple[float, float]  # of its ZeRO-3 gathers, forward and backward: what no link hides
    gather_s: float  # the gather before its backward, whole
    reduce_s: float  # of its gradients
    hot: int  # numbers that every device has of it
    fetched: int  # numbers that a rank's exchange brings in for it, by micro-batch; its tier is the option's
    held_bytes: int  # on one device, all through the step
    temp_bytes: int  # while its backward runs
    host_bytes: int
    update_s: float  # of cold rows, by their tier's kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The rest of the step, and how what tables add to it is counted."""

    micro_batches: int
    forward_s: float  # of all links, for one micro-batch, the tables without rows
    backward_s: float
    after_s: float  # of `backward_s`, what runs before any table's gradients are there
    reduce_s: float
    reduced_bytes: int  # of gradients that go in buckets
    bucket_bytes: int  # 0: each link's go by themselves
    grad_bytes: int  # of a number
    optimizer: Line  # by hot numbers: all of them, as the rest of the model is never nothing
    gather_hot_s: float  # of updated parameters, for each hot number
    gather_s: float
    update: Mapping[str, Line]  # of cold rows, by tier, by their own seconds
    exchange: Mapping[str, tuple[Line, Line]]  # by tier: forward and backward, by numbers fetched
    held_bytes: int
    saved_bytes: int
    peak_bytes: int
    every_micro: bool  # gradients are reduced after every backward
    overlap: bool
    slow: float  # computation beside a collective takes so much longer
    slow_comm: float
    param_bytes: int  # of a number


@dataclass(frozen=True)
class Catalogue:
    """The model without its tables' rows, and the links of every class with every choice, expanded once."""

    problem: Problem
    expander: Expander  # of the model as it is
    classes: tuple[TableClass, ...]
    bare: Expander
    _variants: dict[tuple[int, int | None], Expander] = field(default_factory=dict)

    @staticmethod
    def of(problem: Problem, expander: Expander, classes: tuple[TableClass, ...]) -> Catalogue:
        """The catalogue of a model."""
        graph = hot_graph(expander.graph, _bare_places(classes))
        bare = Expander(
            graph, expander.cluster, _pricers=[expander.pricer], _schedules=expander._schedules,
            _prepared=expander._prepared,
        )  # fmt: skip
        return Catalogue(problem, expander, classes, bare)

    def variant(self, which: int, option: int | None) -> Expander:
        """The expander of the link of the first table of a class with a choice (None: no rows), and of the link
        before it; other tables of the link have no rows."""
        key = (which, option)
        if key not in self._variants:
            one, graph = self.classes[which], self.expander.graph
            table = one.tables[0]
            placed = [p for p in _bare_places(self.classes) if p.table.position == table.position]
            if option is not None:
                own = one.place(table, one.options[option])
                placed = [p for p in placed if p.table != table] + ([own] if own else [])
            small = hot_graph(graph, placed)
            chain = small.chain[max(table.position - 1, 0) : table.position + 1]
            kept = sorted({link.block for link in chain})
            number = {block: i for i, block in enumerate(kept)}
            self._variants[key] = Expander(
                replace(
                    small, blocks=tuple(small.blocks[b] for b in kept),
                    chain=tuple(replace(link, block=number[link.block]) for link in chain),
                ),
                self.expander.cluster, _pricers=[self.expander.pricer],
            )  # fmt: skip
        return self._variants[key]

    def link(self, strategy: Strategy, which: int, option: int | None) -> BlockWork:
        """The link of a table of a class, with a choice."""
        expander = self.variant(which, option)
        last = expander.graph.chain[-1]
        mode = strategy.recompute.mode if last.repeated else "none"
        return _accumulated(expander.work(strategy, last.block, mode), strategy)

    def alone(self, which: int) -> bool:
        """Whether tables of a class have a link each to themselves."""
        position = self.classes[which].tables[0].position
        return sum(t.position == position for one in self.classes for t in one.tables) == 1


def _bare_places(classes: Sequence[TableClass]) -> list[TablePlace]:
    return [TablePlace(table=t, tier="sharded", hot=0, law=one.law) for one in classes for t in one.tables]


def _accumulated(work: BlockWork, strategy: Strategy) -> BlockWork:
    return replace(work, backward_weight=(*work.backward_weight, *state.accumulation_kernel(work, strategy)))


@dataclass(frozen=True)
class Pricing:
    """Seconds of links and steps of one strategy."""

    catalogue: Catalogue
    strategy: Strategy
    program: Program

    def link_s(self, work: BlockWork) -> tuple[float, float]:
        """Forward and backward."""
        cluster, pricer = self.catalogue.expander.cluster, self.catalogue.expander.pricer
        cost = price_block(work, self.program, cluster.device, pricer)
        back = (cost.recompute, cost.backward_input, cost.backward_weight)
        return sum(cost.forward.values()), sum(sum(parts.values()) for parts in back)

    def device_s(self, steps: Sequence[Step]) -> float:
        """Of the device, the host far ahead: what every pass takes at least."""
        return sum(self._times(step)[0] for step in steps)

    def host_s(self, steps: Sequence[Step]) -> float:
        """Of the host that launches them: what every pass takes at least, too."""
        call_s = self.catalogue.expander.cluster.device.constants.get("collective.host_s", 0.0)
        found = 0.0
        for step in steps:
            device_s, host_s = self._times(step)
            found += (call_s if device_s else 0.0) if isinstance(step, Collective) else host_s
        return found

    def _times(self, step: Step) -> tuple[float, float]:
        cluster, pricer = self.catalogue.expander.cluster, self.catalogue.expander.pricer
        if isinstance(step, Kernel):
            return pricer.kernel_times(step, cluster.device, self.program.kernels)
        return pricer.collective_s(step, self.program.axes), 0.0


def pricing(catalogue: Catalogue, strategy: Strategy) -> Pricing:
    """What prices links of a strategy."""
    program = Program(
        ranks=(), stages=(), axes=mesh_axes(strategy), micro_batches=strategy.micro_batches,
        dtype=strategy.execution.dtype, overlap=strategy.grad_sync.overlap, kernels=strategy.execution.kernels,
    )  # fmt: skip
    return Pricing(catalogue, strategy, program)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """The links of a strategy with no rows in its tables: seconds forward and backward, in the chain's order."""

    stage: StageWork
    seconds: tuple[tuple[float, float], ...]
    slow: float
    slow_comm: float
    reduce_each_s: float | None  # `bucket_reduce_s`


def bare_of(priced: Pricing) -> Bare:
    """The step without tables."""
    (stage,) = priced.catalogue.bare.stages(priced.strategy)
    seconds = [s for block, count in stage.blocks for s in [priced.link_s(block)] * count]
    constants = priced.catalogue.expander.cluster.device.constants
    return Bare(
        stage=stage, seconds=tuple(seconds), slow=1.0 + constants.get("overlap.compute_slowdown", 0.0),
        slow_comm=1.0 + constants.get("overlap.comm_slowdown", 0.0), reduce_each_s=bucket_reduce_s(priced),
    )  # fmt: skip


def terms_of(priced: Pricing, bare: Bare, which: int, option: int) -> Terms:
    """What one table of a class adds with one of its choices."""
    catalogue, strategy = priced.catalogue, priced.strategy
    one, cluster = catalogue.classes[which], catalogue.expander.cluster
    table, chosen = one.tables[0], one.options[option]
    place = one.place(table, chosen)
    placed = (place,) if place else ()
    work = catalogue.link(strategy, which, option)
    more_s = gather_s = 0.0
    exposed_s = (0.0, 0.0)
    if catalogue.alone(which):
        with_s, without_s = (priced.link_s(link)[1] for link in (work, catalogue.link(strategy, which, None)))
        more_s = max(with_s - without_s, 0.0)
        gather, _ = gathers_of(work.parameters, work.expert_parameters, strategy)
        if gather is not None:
            again = regather_of(work.parameters, work.expert_parameters, strategy) or gather
            gather_s = priced.device_s([again])
            exposed_s = _exposed_s(bare, one, priced.device_s([gather]), gather_s)
    cold = cold_state(placed, strategy, cluster)
    hot = (place.hot if place else table.rows) * table.dim
    return Terms(
        backward_s=more_s,
        exposed_s=exposed_s,
        gather_s=gather_s,
        reduce_s=reduced_s(priced, bare.reduce_each_s, hot),
        hot=hot,
        fetched=rows_per_micro_batch(place, strategy) * table.dim if place else 0,
        held_bytes=sum(state.state_bytes(hot, hot, strategy))
        + state.stage_buffers(hot, hot, 0, strategy)
        + cold.parameter_bytes + cold.gradient_bytes + cold.optimizer_bytes,
        temp_bytes=work.backward_temp_bytes,
        host_bytes=host_bytes(placed, strategy, cluster),
        update_s=max(priced.device_s(cold.updates) - priced.device_s(_empty(cold.updates)), 0.0),
    )  # fmt: skip


def _empty(updates: Sequence[Kernel]) -> list[Kernel]:
    return [replace(kernel, flops=0, bytes_moved=0) for kernel in updates]


def _exposed_s(bare: Bare, one: TableClass, gather_s: float, regather_s: float) -> tuple[float, float]:
    """What of the gathers of a table's hot rows, forward and backward, the link before cannot hide, as it is issued
    when that starts."""
    hides, last = bare.slow / bare.slow_comm, len(bare.seconds) - 1
    before = max(bare.seconds[max(t.position - 1, 0)][0] for t in one.tables)
    behind = max(bare.seconds[min(t.position + 1, last)][1] for t in one.tables)
    return max(gather_s - before * hides, 0.0), max(regather_s - behind * hides, 0.0)


def reduced_s(priced: Pricing, each_s: float | None, numbers: int) -> float:
    """Reducing so many numbers, of a model that has more: at the rate of a full bucket, which none is larger than; by itself where
    ZeRO-3 reduces link by link."""
    if not numbers:
        return 0.0
    return _reduced_at_once_s(priced, numbers) if each_s is None else each_s * numbers * BELOW


def bucket_reduce_s(priced: Pricing) -> float | None:
    """For each number of a full bucket; None where links are reduced one by one."""
    strategy = priced.strategy
    bucket = round(_bucket_mib(priced, max) * state.MIB)
    if state.zero_level(strategy) == 3 or not bucket:
        return None
    count = max(bucket // state.dtype_bytes(strategy.execution.grad_dtype), 1)
    return _reduced_at_once_s(priced, count) / count


def reduced_each_s(priced: Pricing, most: int) -> float:
    """For each number of the gradients at least, where no more than `most` are reduced at once."""
    return reduced_s(priced, bucket_reduce_s(priced), most) / most


def _reduced_at_once_s(priced: Pricing, count: int) -> float:
    """By the fastest algorithm."""
    strategy = priced.strategy
    return min(
        priced.device_s(
            state.reduction_of(count, replace(strategy, grad_sync=replace(strategy.grad_sync, algorithm=one)))
        )
        for one in open_algorithms(priced.catalogue.problem)
    )


def _bucket_mib(priced: Pricing, end: Callable[[Sequence[float]], float]) -> float:
    """The least (`min`) or largest bucket that a strategy may have."""
    fixed = priced.catalogue.problem.fixed.grad_sync.bucket_mib is not None
    return end((priced.strategy.grad_sync.bucket_mib, *(() if fixed else BUCKETS_MIB)))


def chord(price: Callable[[int], float], low: int, high: int, floor: float = 0.0) -> Line:
    """Below a concave price from `low` to `high`."""
    if low >= high:
        return Line(floor=floor, fixed=0.0, slope=price(high) / high if high else 0.0)
    first, last = price(low), price(high)
    slope = (last - first) / (high - low)
    return Line(floor=floor, fixed=max(first - slope * low, 0.0), slope=slope)


def whole_of(priced: Pricing, bare: Bare, every: Sequence[Sequence[Terms]]) -> Whole:
    """The rest of the step; `every` are the terms by class and option."""
    strategy, stage = priced.strategy, bare.stage
    classes = priced.catalogue.classes
    dense = sum(block.trainable * count for block, count in stage.blocks)
    hot = sum(max(t.hot for t in row) * len(one.tables) for row, one in zip(every, classes, strict=True))
    update = state.optimizer_kernel(dense, strategy)
    tensors = stage.optimizer[len(update) :]
    optimizer = chord(
        lambda n: priced.device_s((*state.optimizer_kernel(dense + n, strategy), *tensors)), 0, hot,
        sum(max(priced.device_s([k]), priced.host_s([k])) for k in stage.optimizer),
    )  # fmt: skip
    gather = chord(lambda n: priced.device_s(updated_gather(dense + n, strategy)), 0, hot)
    last = max(table.position for one in classes for table in one.tables)
    profile = activation_profile(stage, reduce_every_micro=False)
    zero = state.zero_level(strategy)
    reduced = [
        reduced_s(priced, bare.reduce_each_s, block.trainable) * count
        for block, count in stage.blocks
        if block.trainable
    ]
    return Whole(
        micro_batches=strategy.micro_batches,
        forward_s=sum(forward_s for forward_s, _ in bare.seconds),
        backward_s=sum(backward_s for _, backward_s in bare.seconds),
        after_s=sum(backward_s for _, backward_s in bare.seconds[last + 1 :]),
        reduce_s=sum(reduced),
        reduced_bytes=dense * state.dtype_bytes(strategy.execution.grad_dtype),
        bucket_bytes=0 if zero == 3 else round(_bucket_mib(priced, min) * state.MIB),
        grad_bytes=state.dtype_bytes(strategy.execution.grad_dtype),
        optimizer=optimizer,
        gather_s=gather.fixed,
        gather_hot_s=gather.slope,
        update=_updates(priced),
        exchange=_exchanges(priced, every),
        held_bytes=stage.parameter_bytes + stage.gradient_bytes + stage.optimizer_bytes + stage.buffer_bytes,
        saved_bytes=profile.saved,
        peak_bytes=max(profile.forward.activations, profile.backward.activations),
        every_micro=zero >= 2,
        overlap=strategy.grad_sync.overlap,
        slow=bare.slow,
        slow_comm=bare.slow_comm,
        param_bytes=state.dtype_bytes(strategy.execution.param_dtype),
    )


def _updates(priced: Pricing) -> Mapping[str, Line]:
    """Of each tier, what its kernels take for nothing and at least; what tables add is their own."""
    found = {}
    for tier in ("sharded", "parameter-server"):
        places = (
            one.place(one.tables[0], o)
            for one in priced.catalogue.classes
            for o in one.options
            if o.tier == tier
        )
        place = next((p for p in places if p), None)
        if place:
            kernels = cold_state([place], priced.strategy, priced.catalogue.expander.cluster).updates
            empty = priced.device_s(_empty(kernels))
            found[tier] = Line(floor=priced.host_s(kernels), fixed=empty, slope=1.0)
    return found


def _exchanges(priced: Pricing, every: Sequence[Sequence[Terms]]) -> Mapping[str, tuple[Line, Line]]:
    """Chords of each tier's exchange: from the least that a table fetches to what all of them do, the numbers of the rows
    along, which are no fewer than if all of them were as long as the longest."""
    found = {}
    longest = max(table.dim for one in priced.catalogue.classes for table in one.tables)
    for tier in ("sharded", "parameter-server"):
        fetched = [
            (len(one.tables), [t.fetched for t, o in zip(row, one.options, strict=True) if o.tier == tier])
            for row, one in zip(every, priced.catalogue.classes, strict=True)
        ]
        some = [f for _, row in fetched for f in row if f]
        if some:
            high = sum(n * max(row, default=0) for n, row in fetched)
            there, back = (_exchange_line(priced, tier, way, (min(some), high), longest) for way in (0, 1))
            found[tier] = (there, back)
    return found


def _exchange_line(priced: Pricing, tier: str, way: int, between: tuple[int, int], longest: int) -> Line:
    """An exchange there (0) or back (1), by numbers fetched: `between` so many, in rows of `longest` numbers."""
    strategy, cluster = priced.strategy, priced.catalogue.expander.cluster

    def steps(numbers: int) -> Sequence[Step]:
        return exchange_steps(tier, numbers // longest, numbers, strategy, cluster)[way]

    low, high = between
    return chord(lambda numbers: priced.device_s(steps(numbers)), low, high, priced.host_s(steps(high)))
