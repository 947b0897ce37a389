"""What each block of the chain costs and keeps under a candidate: the numbers that bounds are made of.

All figures come from the pieces that `score` itself uses (the expander's local work, the pricer's seconds), so
that a bound can be compared with the simulated step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autoparallel.costmodel.buckets import fill_buckets
from autoparallel.costmodel.graph import ITEM_BYTES, TensorSpec
from autoparallel.costmodel.memory import LiveState
from autoparallel.costmodel.price import Pricer, contended_s, price_block
from autoparallel.costmodel.program import Axis, BlockWork, Collective, CollectiveOp, Kernel, Program, Step
from autoparallel.costmodel.topology import best_placed, crossings
from autoparallel.planner.expand import state
from autoparallel.planner.expand.axes import EXPERT_SHARD, inner_axes
from autoparallel.planner.expand.expander import MIB, Expander, mesh_axes
from autoparallel.planner.expand.gathers import gathers_of, regather_of, updated_gather
from autoparallel.planner.expand.local import TENSOR_DTYPE
from autoparallel.planner.expand.one_by_one import fetches
from autoparallel.planner.expand.places import least_unit
from autoparallel.planner.search.partition.problem import Row
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles.hardware import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrice:
    """One block and micro-batch on one device: seconds, bytes and numbers of parameters.

    `reduce_s` is a lower bound on its share of the gradient reduction: its own collectives with ZeRO-3, else
    its bytes at the rate of a full bucket (a collective is no faster per byte when it is smaller).
    """

    forward_s: float
    input_s: float  # recomputation and input gradients
    weight_s: float
    gather_s: float
    regather_s: float  # before a backward pass
    reduce_s: float
    gather_bytes: int
    reduce_bytes: int  # whole gradients alive on their way to a reduction of every micro-batch
    parameters: int
    trainable: int
    experts: int  # of `parameters`, and of `trainable`: synchronised over other ranks
    expert_trainable: int
    saved: int
    weight_saved: int
    recomputed: int
    forward_temp: int
    backward_temp: int
    half_peak: int  # of the first half of a split backward above what is saved, at least
    buffer_bytes: int
    host_bytes: int  # kept in the host's memory from its forward to its backward
    # What its forward, and its recomputation and input gradients, take longer where gathers and reductions run beside
    # them all the time, as they share links.
    forward_contended_s: float
    backward_contended_s: float

    @property
    def backward_s(self) -> float:
        return self.input_s + self.weight_s

    @property
    def dense(self) -> int:
        """Parameters that are not experts'."""
        return self.parameters - self.experts

    @property
    def dense_trainable(self) -> int:
        return self.trainable - self.expert_trainable


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Seconds that no exchange of a number goes below: so many for any at all, and for each."""

    least_s: float
    each_s: float


def line_below(seconds: Callable[[int], float], most: int) -> Line:
    """The line through what one and `most` of something take, lowered to what some numbers in between do: latencies count once,
    however many they are, and larger messages are no slower per byte. That of `most` alone where it would begin below zero."""
    whole_s = seconds(most)
    if most <= 1:
        return Line(least_s=0.0, each_s=whole_s)
    one_s = seconds(1)
    each_s = (whole_s - one_s) / (most - 1)
    between = {max(most // part, 1) for part in BETWEEN}
    least_s = min(one_s - each_s, *(seconds(count) - each_s * count for count in sorted(between)))
    if least_s <= 0.0 or each_s < 0.0:
        return Line(least_s=0.0, each_s=whole_s / most)
    return Line(least_s=least_s, each_s=each_s)


_UNPLACED = ""  # no device's name


BETWEEN = (2, 8, 64, 1024, 16384)  # parts of the largest message that a line is held against. Kind: choice


@dataclass(frozen=True)
class PriceBook:
    """Prices of one problem's blocks, remembered by all that they depend on."""

    expander: Expander
    pricer: Pricer
    device: Device  # what bounds are priced on: the fastest that a stage may stand on
    algorithms: tuple[str, ...] = ("auto",)  # of reductions, of which bounds take the fastest
    bucket_mib: float = 400.0  # the widest that is tried
    own_plans: PriceBook | None = None  # the same prices, of tensor plans for the cluster as it is
    _blocks: dict[object, tuple[float, float, float]] = field(default_factory=dict, repr=False)
    _weights: dict[object, tuple[Step, ...]] = field(default_factory=dict, repr=False)
    _lines: dict[object, Line] = field(default_factory=dict, repr=False)
    _reductions: dict[object, float] = field(default_factory=dict, repr=False)
    _crossed: dict[tuple[Axis, ...], object] = field(default_factory=dict, repr=False)
    _block_prices: dict[object, BlockPrice] = field(default_factory=dict, repr=False)
    _fetched: dict[object, BlockWork] = field(default_factory=dict, repr=False)
    _moments: dict[int, tuple[Row, ...]] = field(default_factory=dict, repr=False)
    _others: dict[str, PriceBook] = field(default_factory=dict, repr=False)

    def at_best(self) -> PriceBook:
        """The prices that no placement goes below: what bounds are made of."""
        loose = best_placed(self.pricer.cluster)
        if loose == self.pricer.cluster:
            return self
        if _UNPLACED not in self._others:
            found = self._priced_by(self.expander, Pricer(loose))
            if loose.levels != self.pricer.cluster.levels:  # which ask for tensor plans of their own
                found = replace(
                    self._priced_by(self.expander.elsewhere(loose), found.pricer), own_plans=found
                )
            self._others[_UNPLACED] = found
        return self._others[_UNPLACED]

    def _priced_by(self, expander: Expander, pricer: Pricer) -> PriceBook:
        return replace(
            self, expander=expander, pricer=pricer, _blocks={}, _weights={}, _lines={}, _reductions={},
            _block_prices={}, _crossed={}, _fetched={}, _others={},
        )  # fmt: skip

    def on(self, device: Device) -> PriceBook:
        """The prices on another device of the cluster."""
        if device.name == self.device.name:
            return self
        if device.name not in self._others:
            self._others[device.name] = replace(
                self, device=device, _blocks={}, _weights={}, _lines={}, _block_prices={}, _moments={}, _others={},
            )  # fmt: skip
        return self._others[device.name]

    def memory_rows(
        self,
        states: Sequence[Sequence[LiveState]],
        rows_of: Callable[[Sequence[Sequence[LiveState]]], tuple[Row, ...]],
    ) -> tuple[Row, ...]:
        """`rows_of(states)`: the expander keeps the states of every schedule alive."""
        if id(states) not in self._moments:
            self._moments[id(states)] = rows_of(states)
        return self._moments[id(states)]

    def block_price(
        self, strategy: Strategy, block: int, mode: str, *, held: bool = True, axes: tuple[Axis, ...] = (), added: bool = True
    ) -> BlockPrice:  # fmt: skip
        """The price of a block, on the strategy's axes or on others; `held` False leaves out tied parameters, which
        another block may hold for it, `added` False what adds up the gradients of micro-batches."""
        axes = axes or mesh_axes(strategy)
        key = (  # the order tells tensor plans for devices apart from those for neighbours, wherever they are priced
            block, mode, held, added, axes, strategy.mesh.order, strategy.batch, strategy.shard, strategy.grad_sync,
            strategy.execution, strategy.tensor, strategy.offload,
        )  # fmt: skip
        if key not in self._block_prices:
            self._block_prices[key] = self._price(strategy, block, mode, axes, held=held, added=added)
        return self._block_prices[key]

    def _price(
        self, strategy: Strategy, block: int, mode: str, axes: tuple[Axis, ...], *, held: bool, added: bool
    ) -> BlockPrice:
        work, one_by_one = self.expander.work(strategy, block, mode), fetches(strategy)
        parameters, trainable = work.parameters, work.trainable
        tied = [] if held else [p for p in self.expander.graph.blocks[block].parameters if p.tied]
        if tied:
            parameters = max(parameters - sum(p.numel for p in tied), 0)
            trainable = max(trainable - sum(p.numel for p in tied if p.trainable), 0)
        gathered = (
            parameters if strategy.execution.fsdp2 else work.parameters
        )  # FSDP2 gathers a tied tensor once
        both = gathers_of(gathered, work.expert_parameters, strategy)
        again = (regather_of(gathered, work.expert_parameters, strategy) or both[0], both[1])
        again = again if work.backward_input or work.backward_weight else (None, None)
        gathers, regathers = (
            [gather for gather in every if gather is not None and not one_by_one] for every in (both, again)
        )
        accumulate = state.accumulation_kernel(replace(work, trainable=trainable), strategy) if added else ()
        if one_by_one:
            work, accumulate = self._fetched_work(strategy, work, block, held=held), ()
        forward_s, input_s, weight_s = self.block_s(strategy, work, accumulate, axes)
        reduction = () if one_by_one else state.reduction_of(trainable, strategy, work.expert_trainable)
        # The memory of a unit takes no other time: what is remembered is of the work itself. Of a unit that only casts it is left
        # out: prices of settings are made without ZeRO, and serve all of its levels.
        if not one_by_one and state.zero_level(strategy):
            names = frozenset(p.name for p in tied)
            bare = replace(
                work, gather=both[0], expert_gather=both[1], parameters=parameters, trainable=trainable
            )
            unit = least_unit(self.expander.works, strategy, bare, block, reduction, names)
            work = replace(
                unit, gather=None, expert_gather=None, parameters=work.parameters, trainable=work.trainable
            )
        contended = self._contended_s(strategy, block, work, axes, (*gathers, *reduction))
        whole = [c.size_bytes for c in reduction if c.op is CollectiveOp.REDUCE_SCATTER]
        return BlockPrice(
            forward_s=forward_s,
            input_s=input_s,
            weight_s=weight_s,
            gather_s=sum(self.pricer.collective_s(gather, axes) for gather in gathers),
            regather_s=sum(self.pricer.collective_s(gather, axes) for gather in regathers),
            reduce_s=0.0 if one_by_one else self._reduce_s(trainable, work.expert_trainable, strategy, axes),
            gather_bytes=sum(gather.size_bytes for gather in gathers) - work.rooted_bytes,
            reduce_bytes=sum(whole) if state.gradient_level(strategy) >= 2 else 0,
            parameters=parameters,
            trainable=trainable,
            experts=work.expert_parameters,
            expert_trainable=work.expert_trainable,
            saved=work.saved_bytes,
            weight_saved=_weight_saved(work),
            recomputed=work.recomputed_bytes,
            forward_temp=work.forward_temp_bytes,
            backward_temp=work.backward_temp_bytes,
            half_peak=self._half_peak(strategy, work, block),
            buffer_bytes=work.buffer_bytes,
            host_bytes=work.host_bytes,
            forward_contended_s=contended[0],
            backward_contended_s=contended[1],
        )

    def _half_peak(self, strategy: Strategy, work: BlockWork, block: int) -> int:
        """What a first half needs of a block wherever it stands: nothing where autograd keeps a stage's graph, as it does not run at all then
        in a first stage. Under other software than FSDP2 as much as a whole pass."""
        if not strategy.execution.fsdp2:
            return work.recomputed_bytes + work.backward_temp_bytes
        if not self.expander.works.puts_off(strategy):
            return 0
        return work.recomputed_bytes + self.expander.works.backward(strategy, block).halves[0].peak

    def _fetched_work(self, strategy: Strategy, work: BlockWork, block: int, *, held: bool) -> BlockWork:
        """The price of a block that fetches its parameters one by one; not `held`: but for tied ones."""
        tied = () if held else (p.name for p in self.expander.graph.blocks[block].parameters if p.tied)
        key = (id(work), block, held, state.shard_axes(strategy), state.shard_ranks(strategy))
        if key not in self._fetched:
            self._fetched[key] = self.expander.fetched(strategy, work, block, frozenset(tied))
        return self._fetched[key]

    def _contended_s(
        self, strategy: Strategy, block: int, work: BlockWork, axes: tuple[Axis, ...], beside: Sequence[Collective]
    ) -> tuple[float, float]:  # fmt: skip
        """As `costmodel.price.contended_s`; nothing where parameters are tied, which another block may gather and reduce."""
        if not beside or any(p.tied for p in self.expander.graph.blocks[block].parameters):
            return 0.0, 0.0
        gather, expert_gather = gathers_of(work.parameters, work.expert_parameters, strategy)
        regather = regather_of(work.parameters, work.expert_parameters, strategy)
        reduction = state.reduction_of(work.trainable, strategy, work.expert_trainable)
        reduction = (*self.expander.partial_gradients(strategy, block), *reduction)
        whole = replace(work, gather=gather, regather=regather, expert_gather=expert_gather, reduce=reduction)
        return contended_s(whole, _bare_program(strategy, axes), self.pricer)

    def message_bytes(self, specs: Sequence[TensorSpec], dtype: str, micro: int, parts: int) -> int:
        """A message between neighbouring stages on one of the `parts` devices that share a micro-batch, when training in
        `dtype`."""
        own, dtype = self.expander.graph.dtype, TENSOR_DTYPE[dtype]
        items = (ITEM_BYTES[dtype if spec.dtype == own else spec.dtype] for spec in specs)
        return sum(spec.numel(micro) * item // parts for spec, item in zip(specs, items, strict=True))

    def send_s(self, axes: tuple[Axis, ...], size_bytes: int, *, wraps: bool = False) -> float:
        """Seconds of a message to the next stage, or back to the first rank."""
        message = Collective(
            op=CollectiveOp.SEND, axes=("pp",), size_bytes=size_bytes, label="pp", wraps=wraps
        )
        return self.pricer.collective_s(message, axes)

    def join_s(self, axes: tuple[Axis, ...], size_bytes: int) -> float:
        """Seconds to join a message of which each tensor-parallel rank has got a share."""
        gather = Collective(op=CollectiveOp.ALL_GATHER, axes=("tp",), size_bytes=size_bytes, label="pp")
        return self.pricer.collective_s(gather, axes)

    def block_s(
        self, strategy: Strategy, work: BlockWork, more: tuple[Kernel, ...], axes: tuple[Axis, ...]
    ) -> tuple[float, float, float]:
        """Seconds of forward, of recomputation and input gradients, and of weight gradients and `more`.

        A pass is priced whole: where the host is slower than the device, its parts do not add up.
        """
        inner = axes if fetches(strategy) else inner_axes(axes)
        key = (id(work), more, inner, strategy.execution.kernels)  # the expander keeps every work alive
        if key not in self._blocks:
            weights = self._weights.setdefault(
                (id(work.backward_weight), more), (*work.backward_weight, *more)
            )  # one object for all ways of recomputing
            cost = price_block(
                replace(work, backward_weight=weights),
                _bare_program(strategy, axes),
                self.device,
                self.pricer,
            )
            self._blocks[key] = (
                sum(cost.forward.values()),
                sum(cost.recompute.values()) + sum(cost.backward_input.values()),
                sum(cost.backward_weight.values()),
            )
        return self._blocks[key]

    def _reduce_s(self, trainable: int, experts: int, strategy: Strategy, axes: tuple[Axis, ...]) -> float:
        if state.zero_level(strategy) == 3 or not strategy.grad_sync.bucket_mib:
            return self.reduction_s(trainable, strategy, axes, experts, together=True)
        item, found = state.dtype_bytes(strategy.execution.grad_dtype), 0.0
        if trainable > experts:
            found += (trainable - experts) * item * self.reduce_line(strategy, axes).each_s
        if experts:
            found += experts * item * self.reduce_line(strategy, axes, experts=True).each_s
        return found

    def reduce_line(self, strategy: Strategy, axes: tuple[Axis, ...], *, experts: bool = False) -> Line:
        """Seconds that a bucket of gradients (of experts or of the rest) takes at least, by its bytes, up to the widest there is."""
        names = ("dp_replicate", EXPERT_SHARD) if experts else ("dp_replicate", "dp_shard", "cp")
        spanned = tuple(a for a in axes if a.name in names and a.size > 1)
        at_end = state.replicas_at_end(strategy)
        key = (
            spanned, experts, strategy.shard.zero, strategy.grad_sync, strategy.execution.grad_dtype, at_end,
        )  # fmt: skip
        if key not in self._lines:
            item = state.dtype_bytes(strategy.execution.grad_dtype)

            def seconds(count: int) -> float:
                return self.reduction_s(count, strategy, axes, count if experts else 0)

            most = max(round(self.bucket_mib * MIB) // item, 1)
            # What experts exchange may be one message with the rest's; to encode a few numbers takes no longer than to wait.
            apart = not experts and not any(one not in ("", "none") for one in strategy.grad_sync.compression)
            line = line_below(seconds, most) if apart else Line(least_s=0.0, each_s=seconds(most) / most)
            self._lines[key] = Line(least_s=line.least_s, each_s=line.each_s / item)
        return self._lines[key]

    def reduction_s(
        self, count: int, strategy: Strategy, axes: tuple[Axis, ...], experts: int = 0, *, together: bool = False
    ) -> float:  # fmt: skip
        """Seconds to reduce the gradients of `count` parameters at once, by the fastest of the algorithms; `together`: those
        of experts and of the rest by one collective where they go the same way."""
        reduction = state.reduction_of(count, strategy, experts)
        if together:
            reduction = tuple(c for b in fill_buckets([reduction], 0) for c in b.collectives)
        key = reduction, tuple(self._where(one.axes, axes) for one in reduction)
        if key not in self._reductions:
            self._reductions[key] = min(
                sum(self.pricer.collective_s(replace(c, algorithm=algorithm), axes) for c in reduction)
                for algorithm in self.algorithms
            )
        return self._reductions[key]

    def updated_gather_s(
        self, count: int, strategy: Strategy, axes: tuple[Axis, ...], experts: int = 0
    ) -> float:
        """Seconds to gather `count` parameters, once updated, `experts` of them experts'."""
        gathers = updated_gather(count, strategy, experts)
        return sum(self.pricer.collective_s(gather, axes) for gather in gathers)

    def _where(self, names: tuple[str, ...], axes: tuple[Axis, ...]) -> object:
        """What is the same where groups along the named axes cross the same levels, as their collectives then cost the same; on
        an irregular network the axes themselves."""
        spanned = tuple(axis for axis in axes if axis.size > 1 and axis.name in names)
        if self.pricer.cluster.network is not None:
            return spanned
        if spanned not in self._crossed:
            found = crossings(names, spanned, self.pricer.cluster)
            self._crossed[spanned] = tuple((one.index, one.inside, one.fan) for one in found)
        return self._crossed[spanned]


def _bare_program(strategy: Strategy, axes: tuple[Axis, ...]) -> Program:
    """A program without actions: what pricing a block's steps needs to know."""
    return Program(
        ranks=(), stages=(), axes=axes, micro_batches=strategy.micro_batches, dtype=strategy.execution.dtype,
        overlap=strategy.grad_sync.overlap, kernels=strategy.execution.kernels,
        blocking_launches=strategy.execution.blocking_launches,
    )  # fmt: skip


def _weight_saved(work: BlockWork) -> int:
    """What a split backward keeps of a block at least: in a first stage no gradients of products' outputs."""
    kept = work.weight_saved_bytes
    return work.saved_bytes if kept is None else min(work.saved_bytes, kept)
