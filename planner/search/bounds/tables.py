"""Price tables of the outer level: what one layer group of the chain costs in a setting, as columns."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from autoparallel.costmodel.program import Axis
from autoparallel.planner.expand.axes import EXPERTS
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.bounds.prices import BlockPrice, PriceBook
from autoparallel.planner.search.partition.forms import Chain
from autoparallel.planner.search.partition.ties import Names
from autoparallel.planner.search.space.meshes import Floats, Ints
from autoparallel.planner.strategy.types import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

NUMBERS = ("dense", "dense_trainable", "experts", "expert_trainable")  # of parameters: fields of BlockPrice
# Share of the layer groups from which on the other kinds are left out of bounds by rank. Kind: formula.
NEARLY_ALL = 0.9
# What of each kind of layer group stands in `PriceTable.by_kind`: seconds of a micro-batch, of the cheaper of kept and
# recomputed; numbers of parameters; bytes kept of a micro-batch, at least if it is recomputed in full, and the seconds
# that this then costs; bytes kept for the weight gradients alone, and likewise at least; bytes kept on the host, likewise.
BY_KIND = (
    "forward_s", "backward_s", "input_s", "weight_s", *NUMBERS, "saved", "least_saved", "recompute_s",
    "weight_saved", "least_weight_saved", "host_saved", "least_host_saved",
)  # fmt: skip
KIND_TIMES = 4  # of these the first are seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTable:
    """Columns by shape; seconds, bytes, numbers. `group_*` is the least of the kinds of layer group that count
    (`kinds_that_count`), `all_*` the sum over the model; `saved` is what a layer group keeps, `least_saved` if it is
    recomputed in full where that may be chosen, which then costs `recompute_s` per micro-batch."""

    group_forward_s: Floats
    group_backward_s: Floats
    all_forward_s: Floats
    all_backward_s: Floats
    all_input_s: Floats  # of `all_backward_s`, recomputation and input gradients
    group_input_s: Floats  # recomputation and input gradients of a layer group
    group_weight_s: Floats  # its weight gradients
    head_s: Floats
    head_forward_s: Floats  # of `head_s`
    head_input_s: Floats
    tail_s: Floats
    tail_forward_s: Floats  # of `tail_s`
    tail_input_s: Floats
    recompute_s: Floats
    saved: Floats
    least_saved: Floats
    any_least_saved: Floats  # likewise the least of all kinds
    head_saved: Floats
    tail_saved: Floats
    peak: Floats  # of one action above what is saved
    backward_peak: Floats  # of a backward likewise
    counted_peak: Floats  # and of both likewise, of the kinds that count
    counted_backward_peak: Floats
    tail_peak: Floats  # likewise where the tail runs, what the tail saves included
    split_peak: Floats  # these five where backwards are split: of first halves
    split_backward_peak: Floats
    split_counted_peak: Floats
    split_counted_backward_peak: Floats
    split_tail_peak: Floats
    group_parameters: Floats  # here and below experts under ep > 1 left out
    group_trainable: Floats
    group_experts: Floats
    group_expert_trainable: Floats
    most_trainable: Floats  # of any one block
    head_parameters: Floats
    tail_parameters: Floats
    head_trainable: Floats
    tail_trainable: Floats
    all_parameters: Floats
    all_trainable: Floats
    all_experts: Floats
    all_expert_trainable: Floats
    buffer_bytes: Floats  # of the whole model
    tail_tied: Floats  # trainable numbers of the tail that the head holds, too: a stage of its own has a copy
    by_kind: Floats  # [shape, kind of layer group, what of `BY_KIND`]

    def of_kinds(self, name: str) -> Floats:
        """One of `BY_KIND`, [shape, kind]."""
        return np.asarray(self.by_kind[:, :, BY_KIND.index(name)])


SINGLE = tuple(f.name for f in fields(PriceTable) if f.name != "by_kind")


def kinds_that_count(chain: Chain) -> tuple[int, ...]:
    """The kinds of layer group that bounds look at: the one that nearly all layer groups are of, or else all kinds alike."""
    if chain.kinds:
        most = max(range(len(chain.groups)), key=chain.kinds.count)
        if chain.kinds.count(most) >= NEARLY_ALL * len(chain.kinds):
            return (most,)
    return tuple(range(len(chain.groups)))


def row_length(chain: Chain) -> int:
    """Numbers in a row of the table: those of the model, then those of each kind of layer group."""
    return len(SINGLE) + len(chain.groups) * len(BY_KIND)


def setting_row(
    problem: Problem,
    chain: Chain,
    book: PriceBook,
    strategy: Strategy,
    axes: tuple[Axis, ...],
    *,
    added: bool,
) -> tuple[float, ...]:
    """The row of a strategy's setting whose blocks communicate along these axes; `added`: gradients are added up. Tensor plans are
    made for a single sample with its share of the step, so that one that was made for the loosest prices is not the best there in
    everything, and those of the cluster as it is may be better."""
    row = _row(chain, strategy, _block_prices(problem, chain, book, strategy, axes, added=added))
    if book.own_plans is None or strategy.mesh.tp == 1:
        return row
    return tuple(map(min, row, setting_row(problem, chain, book.own_plans, strategy, axes, added=added)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prices:
    """Head, tail, what of the tail the head holds, too, and each kind of layer group, kept and recomputed in full."""

    head: list[BlockPrice]
    tail: list[BlockPrice]
    tail_tied: int  # trainable numbers
    groups: list[list[BlockPrice]]
    full: list[list[BlockPrice]]


def _block_prices(
    problem: Problem,
    chain: Chain,
    book: PriceBook,
    strategy: Strategy,
    axes: tuple[Axis, ...],
    *,
    added: bool,
) -> _Prices:
    """Prices of every block in a strategy's setting."""
    mode = strategy.recompute.mode
    ties = chain.ties
    plans = book.expander.works.tensor_plan(strategy).blocks
    plain, plain_axes = _without_experts(strategy), tuple(axis for axis in axes if axis.name != EXPERTS)

    def block_price(block: int, how: str, *, held: bool) -> BlockPrice:
        apart = plans[block].has_experts
        return book.block_price(
            strategy if apart else plain, block, how, held=held,
            axes=axes if apart else plain_axes, added=added,
        )  # fmt: skip

    def side(blocks: tuple[int, ...], names: Names, first: str = "none") -> list[BlockPrice]:
        counts = ties.at(blocks, names)
        return [
            block_price(b, "none" if i else first, held=one)
            for i, (b, one) in enumerate(zip(blocks, counts, strict=True))
        ]

    head, tail = side(chain.head, ties.head), side(chain.tail, Names())
    copies = side(chain.tail, ties.head)
    tied_numbers = sum(a.dense_trainable - b.dense_trainable for a, b in zip(copies, tail, strict=True))
    groups = [side(group, ties.first, mode) for group in chain.groups]
    full = groups
    if mode != "full" or problem.fixed.recomputed is not None:
        full = [side(group, ties.first, "full") for group in chain.groups]
    return _Prices(head=head, tail=tail, tail_tied=tied_numbers, groups=groups, full=full)


def _without_experts(strategy: Strategy) -> Strategy:
    """What blocks without experts cost the same in: they ask whether gradients are summed, not over how many ranks."""
    mesh, batch = strategy.mesh, strategy.batch
    shards = min(mesh.dp_shard, 2)
    few = replace(mesh, ep=1, dp_shard=shards)
    return replace(strategy, mesh=few, batch=replace(batch, global_=batch.global_ // mesh.dp_shard * shards))


def _row(chain: Chain, strategy: Strategy, prices: _Prices) -> tuple[float, ...]:
    head, tail, groups, full = prices.head, prices.tail, prices.groups, prices.full
    counts = chain.counts
    # Where activations go to the host, a recomputed layer group, which has fewer to copy, may take less time.
    ways = list(zip(groups, full if strategy.offload.activations else groups, strict=True))
    forward, backward, inputs = (
        [min(_sum(prices, name) for prices in both) for both in ways]
        for name in ("forward_s", "backward_s", "input_s")
    )
    every = [*head, *tail, *(price for group in groups for price in group)]
    kept = [(groups[kind], full[kind]) for kind in kinds_that_count(chain)]
    least = [min(_sum(a, "saved"), _sum(b, "saved")) for a, b in zip(groups, full, strict=True)]
    last = [prices[-1] for prices in (*groups, *full)]
    counted = [prices[-1] for both in kept for prices in both]
    sides = [_sum(prices, name) for prices in (head, tail) for name in ("forward_s", "backward_s")]
    return (
        min((forward[kind] for kind in kinds_that_count(chain)), default=0.0),
        min((backward[kind] for kind in kinds_that_count(chain)), default=0.0),
        sum(n * f for n, f in zip(counts, forward, strict=True)) + sides[0] + sides[2],
        sum(n * b for n, b in zip(counts, backward, strict=True)) + sides[1] + sides[3],
        sum(n * i for n, i in zip(counts, inputs, strict=True)) + _sum([*head, *tail], "input_s"),
        min((inputs[kind] for kind in kinds_that_count(chain)), default=0.0),
        min((min(_sum(a, "weight_s"), _sum(b, "weight_s")) for a, b in kept), default=0.0),
        sides[0] + sides[1],
        sides[0],
        _sum(head, "input_s"),
        sides[2] + sides[3],
        sides[2],
        _sum(tail, "input_s"),
        max(min((_sum(b, "backward_s") - _sum(a, "backward_s") for a, b in kept), default=0.0), 0.0),
        min((_sum(group, "saved") for group, _ in kept), default=0.0),
        min((least[kind] for kind in kinds_that_count(chain)), default=0.0),
        min(least, default=0.0),
        _sum(head, "saved"),
        _sum(tail, "saved"),
        *_peak_columns(last, counted, tail, _backward_of),
        *_peak_columns(last, counted, tail, lambda price: min(price.half_peak, _backward_of(price))),
        *(min((_sum(group, n) for group, _ in kept), default=0.0) for n in NUMBERS),
        float(max((price.dense_trainable for price in every), default=0)),
        _sum(head, "dense"),
        _sum(tail, "dense"),
        _sum(head, "dense_trainable"),
        _sum(tail, "dense_trainable"),
        *(
            _sum([*head, *tail], n) + sum(c * _sum(u, n) for c, u in zip(counts, groups, strict=True))
            for n in NUMBERS
        ),
        float(min((price.buffer_bytes for price in every), default=0)),
        float(prices.tail_tied),
        *(
            n
            for kind in range(len(groups))
            for n in _kind_row(ways[kind], groups[kind], full[kind], least[kind])
        ),
    )


def _kind_row(
    ways: Sequence[Sequence[BlockPrice]],
    group: Sequence[BlockPrice],
    full: Sequence[BlockPrice],
    least: float,
) -> tuple[float, ...]:
    """What of `BY_KIND` a kind of layer group has; `ways` are those of kept and recomputed that may take least time."""
    return (
        *(min(_sum(prices, name) for prices in ways) for name in ("forward_s", "backward_s", "input_s")),
        min(_sum(group, "weight_s"), _sum(full, "weight_s")),
        *(_sum(group, name) for name in NUMBERS),
        _sum(group, "saved"),
        least,
        max(_sum(full, "backward_s") - _sum(group, "backward_s"), 0.0),
        _sum(group, "weight_saved"),
        min(_sum(group, "weight_saved"), _sum(full, "weight_saved")),
        _sum(group, "host_bytes"),
        min(_sum(group, "host_bytes"), _sum(full, "host_bytes")),
    )


def _backward_of(price: BlockPrice) -> int:
    return price.recomputed + price.backward_temp


def _peak_columns(
    last: Sequence[BlockPrice], counted: Sequence[BlockPrice], tail: Sequence[BlockPrice], backward: Callable[[BlockPrice], int]
) -> tuple[float, ...]:  # fmt: skip
    """PEAK to TAIL_PEAK of a table, where a block's backward holds what `backward` says."""
    found = list[float]()
    for prices in (last, counted):
        found.append(min((max(p.forward_temp, backward(p)) for p in prices), default=0.0))
        found.append(min(map(backward, prices), default=0.0))
    held, peak = 0, 0
    for price in tail:
        held += price.saved
        peak = max(peak, held + price.forward_temp, held + backward(price))
    return (*found, float(peak) if tail else found[0])


def _sum(prices: Iterable[BlockPrice], name: str) -> float:
    return float(sum(getattr(price, name) for price in prices))


def as_columns(rows: Floats, which: Ints) -> PriceTable:
    """Some of the rows, each as often as asked for, as columns."""
    if len(which) < len(rows):
        single = np.ascontiguousarray(rows[which, : len(SINGLE)].T)
    else:  # a column of few rows is picked from much faster than many rows are turned into columns
        single = np.ascontiguousarray(rows[:, : len(SINGLE)].T)[:, which]
    kinds = (rows.shape[1] - len(SINGLE)) // len(BY_KIND)
    by_kind = rows[which, len(SINGLE) :].reshape(len(which), kinds, len(BY_KIND))
    return PriceTable(**dict(zip(SINGLE, single, strict=True)), by_kind=by_kind)


def take_rows(table: PriceTable, rows: Ints) -> PriceTable:
    """The columns at `rows`."""
    return PriceTable(**{f.name: getattr(table, f.name)[rows] for f in fields(PriceTable)})
