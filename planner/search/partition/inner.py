"""From a candidate to its stage problem: which quantities a chunk has, and the rows of memory and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor

from autoparallel.costmodel.memory import LiveState
from autoparallel.planner.expand import state
from autoparallel.planner.expand.expander import mesh_axes
from autoparallel.planner.expand.gathers import gathers_late
from autoparallel.planner.expand.schedules import SOME_WHOLE, SPLIT_BACKWARD, rank_of_stage
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.bounds.prices import BlockPrice, PriceBook, line_below
from autoparallel.planner.search.partition import messages
from autoparallel.planner.search.partition.forms import (
    PS,
    Chain,
    PricedChain,
    Value,
    Work,
    more_of,
)
from autoparallel.planner.search.partition.moments import host_rows, host_state_rate, memory_rows, state_rate
from autoparallel.planner.search.partition.once import Once, left_of, reduction_once_s, with_latency
from autoparallel.planner.search.partition.peaks import (
    Ends,
    backward_peak,
    forward_peak,
    in_halves,
    last_kinds,
    weight_peak,
)
from autoparallel.planner.search.partition.problem import Form, Quantity, Row, StageProblem
from autoparallel.planner.search.partition.quick import balanced_ranks, even_partition
from autoparallel.planner.search.partition.sizes import chunk_sizes
from autoparallel.planner.search.partition.ties import Held, Names
from autoparallel.planner.search.partition.unlike import over_devices
from autoparallel.planner.search.space.candidates import Candidate, strategy_of
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles.hardware import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A candidate's strategy (blocks divided evenly) and the prices of its blocks; `others`: likewise, where tied tensors count at
    other blocks. The larger sums hold."""

    chosen: Candidate
    strategy: Strategy
    prices: PricedChain
    others: tuple[PricedChain, ...] = ()


def price_candidate(problem: Problem, chain: Chain, book: PriceBook, chosen: Candidate) -> Priced:
    """The prices of every block of a candidate, kept as its mode says and recomputed in full."""
    strategy = strategy_of(problem, chosen, even_partition(len(chain.kinds), chosen.chunks))
    stages, copies = chosen.virtual_stages, strategy.execution.fsdp2
    first, *others = (
        _priced_chain(problem, chain, book, chosen, strategy, held)
        for held in chain.ties.held(chosen.mesh.pp, chosen.schedule, stages, own_copies=copies)
    )
    return Priced(chosen=chosen, strategy=strategy, prices=first, others=tuple(others))


def _priced_chain(
    problem: Problem, chain: Chain, book: PriceBook, chosen: Candidate, strategy: Strategy, held: Held
) -> PricedChain:
    """Likewise, where tied tensors count at the blocks of `held`."""
    shards, ties = (state.dense_shards(strategy), state.expert_shards(strategy)), chain.ties
    passing = [state.passing_per_parameter(strategy, one) for one in shards]

    def priced(block: int, mode: str, *, counts: bool) -> BlockPrice:
        """With the parameters that come and go with a pass among what it saves; of tied ones a root unit keeps hold."""
        price = book.block_price(strategy, block, mode, held=counts)
        if not any(passing) or (counts and ties.of[block]):
            return price
        return replace(price, saved=price.saved + price.dense * passing[0] + price.experts * passing[1])

    def links(blocks: tuple[int, ...], names: Names, first: str = "none") -> tuple[BlockPrice, ...]:
        return tuple(
            priced(b, "none" if i else first, counts=one)
            for i, (b, one) in enumerate(zip(blocks, ties.at(blocks, names), strict=True))
        )

    kept = tuple(links(blocks, held.groups, chosen.mode) for blocks in chain.groups)
    constants = book.device.constants
    return PricedChain(
        head=links(chain.head, held.head),
        tail=links(chain.tail, held.tail),
        kept=kept,
        recomputed=tuple(links(b, held.groups, "full") for b in chain.groups)
        if frees(problem, chosen)
        else kept,
        chunks=chosen.chunks,
        count=len(chain.kinds),
        compute_slowdown=constants.get("overlap.compute_slowdown", 0.0),
        comm_slowdown=constants.get("overlap.comm_slowdown", 0.0),
    )


def frees(problem: Problem, chosen: Candidate) -> bool:
    """Whether single blocks of this candidate may be recomputed in full."""
    return chosen.mode != "full" and bool(problem.graph.repeated_positions)


def stage_problem(
    problem: Problem,
    chain: Chain,
    book: PriceBook,
    priced: Priced,
    states: Sequence[Sequence[LiveState]],
    capacity_bytes: float,
    paths: Sequence[Row] = (),
) -> StageProblem:
    """The stage problem with the paths that are known of its schedule; more are added as they are found."""
    chosen, strategy = priced.chosen, priced.strategy
    blocks = problem.fixed.stage_blocks
    recomputed = _fixed_recomputed(problem, chosen.chunks)
    least, most = (blocks, blocks) if blocks is not None else chunk_sizes(problem.graph, chosen.chunks)
    if blocks is None and recomputed is not None:
        least = tuple(map(max, least, recomputed))

    ends = last_kinds(chain.kinds, least, most)

    def quantities_on(device: Device) -> tuple[Quantity, ...]:
        own = book.on(device)
        return _quantities(problem, chain, own, price_candidate(problem, chain, own, chosen), ends)

    stages = StageProblem(
        kinds=chain.kinds,
        chunks=chosen.chunks,
        quantities=_quantities(problem, chain, book, priced, ends),
        paths=tuple(paths),
        memory=(*book.memory_rows(states, memory_rows), *host_rows(problem, strategy, states)),
        capacity_bytes=int(capacity_bytes),
        recompute=frees(problem, chosen),
        least=least,
        most=most,
        blocks=blocks,
        recomputed=recomputed,
    )
    placed = over_devices(problem, strategy, stages, quantities_on)
    if len(set(placed.device_of)) <= 1:
        return placed
    home = rank_of_stage(chosen.schedule, chosen.mesh.pp, chosen.virtual_stages)
    return replace(placed, likely=balanced_ranks(placed, home))


def _quantities(
    problem: Problem, chain: Chain, book: PriceBook, priced: Priced, ends: Ends
) -> tuple[Quantity, ...]:
    """All quantities of a candidate's chunks: what they are by any of its prices."""
    found = [
        (*_seconds(problem, chain, book, one), *_bytes(problem, chain, book, one, ends))
        for one in (priced, *(replace(priced, prices=prices, others=()) for prices in priced.others))
    ]
    if len(found) == 1:
        return found[0]
    return tuple(
        Quantity(forms=tuple(dict.fromkeys(form for quantity in every for form in quantity.forms)))
        for every in zip(*found, strict=True)
    )


def _fixed_recomputed(problem: Problem, chunks: int) -> tuple[int, ...] | None:
    """Blocks recomputed in full that the user fixes per chunk; an empty list says none at all."""
    fixed = problem.fixed.recomputed
    return (0,) * chunks if fixed == () else fixed


def _seconds(problem: Problem, chain: Chain, book: PriceBook, priced: Priced) -> tuple[Quantity, ...]:
    """Quantities FORWARD to TIED, in picoseconds."""
    strategy, prices = priced.strategy, priced.prices
    every = state.zero_level(strategy) >= 2

    def communicates(price: BlockPrice) -> float:
        return price.regather_s + price.reduce_s

    update, (gather, gather_once_s) = _update_rate(book, priced), _gather_rate(book, priced)
    late = gathers_late(strategy)  # then first forwards wait for it
    step = prices.sums(lambda price: update(price) + (0.0 if late else gather(price)))
    backward = prices.streamed(_backward, backward=True)
    weight = prices.sums(lambda price: price.weight_s)
    end: tuple[Form, ...]
    end_weight: tuple[Form, ...]
    hidden: Form | None = None  # of `end`, where all computation that can be is hidden
    hidden_weight: Form | None = None
    left, left_weight = (_head_left(prices, work) for work in (_backward, _weight))
    if strategy.grad_sync.overlap:
        # ZeRO-3 waits for the first gather, and reduces what the last link has when all is computed.
        last, whole = None, None
        if state.zero_level(strategy) == 3:
            last = prices.ending(lambda price: price.reduce_s, backward=True)
            first = prices.ending(lambda price: price.regather_s, backward=False)
            whole = [a + b for a, b in zip(last, first, strict=True)]
        *_, hidden = end = (backward, *prices.beside(_backward, communicates, whole))
        *_, hidden_weight = end_weight = (weight, *prices.beside(_weight, lambda price: price.reduce_s, last))
        if not every:
            end = (*end, more_of(prices.sums(lambda price: price.backward_s), left))
            end_weight = (*end_weight, more_of(weight, left_weight))
    else:
        end = (backward, prices.sums(lambda price: price.backward_s + price.reduce_s))
        end_weight = (weight, prices.sums(lambda price: price.weight_s + price.reduce_s))
    once = Once.of(prices, chunk_sizes(problem.graph, prices.chunks)[0])
    latency_s = reduction_once_s(book, strategy)
    end, end_weight = (
        with_latency(once, forms, work, latency_s, beside)
        for forms, work, beside in ((end, _backward, hidden), (end_weight, _weight, hidden_weight))
    )
    backwards = Quantity(forms=end if every else (backward,))
    weights = Quantity(forms=end_weight if every else (weight,))
    return (
        Quantity(forms=(prices.streamed(_forward, backward=False),)),
        backwards,
        Quantity(forms=(prices.streamed(_input, backward=True),)),
        weights,
        backwards,
        weights,
        Quantity(forms=end),
        Quantity(forms=end_weight),
        Quantity(forms=(once.more(step, 0.0 if late else gather_once_s),)),
        Quantity(forms=(messages.sends(problem, chain, book, strategy, prices),)),
        Quantity(forms=messages.tied(book, chain, priced.chosen, strategy, prices)),
        *(
            left_of(once, work, head, latency_s, none=every, beside=strategy.grad_sync.overlap)
            for work, head in ((_backward, left), (_weight, left_weight))
        ),
        Quantity(forms=(prices.waits(_forward, gather) if late else prices.constant(0),)),
    )


def _forward(price: BlockPrice) -> tuple[float, float]:
    return price.forward_s, price.forward_contended_s


def _backward(price: BlockPrice) -> tuple[float, float]:
    return price.backward_s, price.backward_contended_s


def _weight(price: BlockPrice) -> tuple[float, float]:
    return price.weight_s, 0.0


def _head_left(prices: PricedChain, work: Work) -> tuple[int, ...]:
    """By chunk, what such a pass leaves at least of the reduction of the head's gradients, which are the last to be made."""
    left_s = sum(prices.left_s(price, work, price.reduce_s) for price in prices.head)
    return (floor(max(left_s, 0.0) * PS), *(0,) * (prices.chunks - 1))


def _input(price: BlockPrice) -> tuple[float, float]:
    return price.input_s, price.backward_contended_s


def _update_rate(book: PriceBook, priced: Priced) -> Value:
    """Seconds of the optimizer that a block answers for: its share at the rate of the whole model, as no kernel is faster per
    byte when it is smaller."""
    strategy, prices = priced.strategy, priced.prices
    every = [*prices.head, *prices.tail, *(price for group in prices.kept for price in group)]
    copies, mode = max(prices.count, 1), strategy.execution.kernels  # more than any stage has
    trainable, experts = (sum(values) * copies for values in (
        [price.trainable for price in every], [price.expert_trainable for price in every],
    ))  # fmt: skip
    kernels = state.optimizer_kernel(trainable, strategy, experts)
    dense, expert = state.updates_per_parameter(strategy)
    updated = (trainable - experts) * dense + experts * expert
    update = sum(book.pricer.kernel_s(k, book.device, mode) for k in kernels) / max(updated, 1)
    return lambda price: (price.dense_trainable * dense + price.expert_trainable * expert) * update


def _gather_rate(book: PriceBook, priced: Priced) -> tuple[Value, float]:
    """Seconds of the gather of updated parameters that a block answers for, and that a chunk's takes besides."""
    strategy, prices = priced.strategy, priced.prices
    every = [*prices.head, *prices.tail, *(price for group in prices.kept for price in group)]
    copies, axes = max(prices.count, 1), mesh_axes(strategy)

    dense, experts = (
        max(sum(numbers) * copies, 1)
        for numbers in ([price.dense for price in every], [price.experts for price in every])
    )
    line = line_below(lambda count: book.updated_gather_s(count, strategy, axes), dense)
    each_s, experts_s = line.each_s, book.updated_gather_s(experts, strategy, axes, experts) / experts
    return lambda price: price.dense * each_s + price.experts * experts_s, line.least_s


def _bytes(
    problem: Problem, chain: Chain, book: PriceBook, priced: Priced, ends: Ends
) -> tuple[Quantity, ...]:
    """Quantities STATE to HOST_SAVED."""
    prices = priced.prices
    sent = _kept_outputs(problem, chain, book, priced)
    split = priced.chosen.schedule in SPLIT_BACKWARD
    back = prices
    if split and priced.strategy.execution.fsdp2:
        back = in_halves(prices, some_whole=priced.chosen.schedule in SOME_WHOLE)
    return (
        Quantity(forms=(prices.sums(state_rate(priced.strategy), 1.0),)),
        Quantity(forms=(more_of(prices.sums(lambda price: price.saved, 1.0), sent),)),
        Quantity(forms=(prices.sums(lambda price: price.weight_saved, 1.0),)),
        forward_peak(prices, ends),
        Quantity(forms=tuple(more_of(form, sent) for form in backward_peak(back, ends).forms)),
        weight_peak(prices) if split else Quantity(forms=(prices.constant(0),)),
        Quantity(forms=(prices.sums(host_state_rate(priced.strategy), 1.0),)),
        Quantity(forms=(prices.sums(lambda price: price.host_bytes, 1.0),)),
    )


def _kept_outputs(problem: Problem, chain: Chain, book: PriceBook, priced: Priced) -> tuple[int, ...]:
    """What each chunk keeps of a micro-batch that it has sent on (`execution.kept_outputs`): the smallest message there is."""
    strategy, chunks = priced.strategy, priced.prices.chunks
    home = rank_of_stage(strategy.pipeline.schedule, strategy.mesh.pp, strategy.pipeline.virtual_stages)
    if not strategy.execution.kept_outputs:
        return (0,) * chunks
    parts = strategy.mesh.cp * (strategy.mesh.tp if strategy.shard.sequence_parallel else 1)
    sizes = [
        book.message_bytes(chain.messages[cut], problem.execution.dtype, strategy.batch.micro, parts)
        for cut in sorted(set(chain.cuts))
    ]
    least = min(sizes, default=0)
    return tuple(least if c + 1 < chunks and home[c] != home[c + 1] else 0 for c in range(chunks))
