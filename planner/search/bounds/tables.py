"""Price tables of the outer level: what one layer group of the chain costs, for every distinct setting, as columns."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from autoparallel.costmodel.program import Axis
from autoparallel.planner.expand.axes import nearest_axes
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.bounds.prices import BlockPrice, PriceBook
from autoparallel.planner.search.partition.forms import Chain
from autoparallel.planner.search.partition.quick import even_partition
from autoparallel.planner.search.space.build import MODES, Shapes
from autoparallel.planner.search.space.candidates import Candidate, strategy_of
from autoparallel.planner.search.space.meshes import Floats, Ints
from autoparallel.planner.sharding.rules import NotShardable
from autoparallel.planner.side_by_side import side_by_side
from autoparallel.planner.strategy.types import AXES, Batch, Mesh, Offload, Strategy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from autoparallel.planner.sharding.plan import TensorPlan
    from autoparallel.planner.sharding.solve import TensorRequest

NUMBERS = ("dense", "dense_trainable", "experts", "expert_trainable")  # of parameters: fields of BlockPrice
# Share of the layer groups from which on the other kinds are left out of bounds by rank. Kind: formula.
NEARLY_ALL = 0.9
FEW = 256  # settings that are priced sooner than another process is started. Kind: measured
SETTING = ("activations_offloaded", "tp", "sequence_parallel", "recompute", "cp", "ep")
# What of each kind of layer group stands in `PriceTable.by_kind`: seconds of a micro-batch, of the cheaper of kept and
# recomputed; numbers of parameters; bytes kept of a micro-batch, at least if it is recomputed in full, and the seconds
# that this then costs; bytes kept for the weight gradients alone, and likewise at least.
BY_KIND = (
    "forward_s", "backward_s", "input_s", "weight_s", *NUMBERS, "saved", "least_saved", "recompute_s",
    "weight_saved", "least_weight_saved",
)  # fmt: skip
KIND_TIMES = 4  # of these the first are seconds
FAR = ("pp", "dp_shard", "cp", "tp", "dp_replicate")  # tensor parallelism outside the replicas


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


def price_table(
    problem: Problem, chain: Chain, book: PriceBook, shapes: Shapes, capacity_bytes: float, processes: int = 1
) -> PriceTable:
    """One row per shape. Each distinct setting (tp, sequence parallelism, micro-batch, mode, ...) is priced once, with
    tensor parallelism on neighbouring devices, where it is cheapest. Where one layer group or the tail alone does not
    fit, rows are infinite, and so are those of a degree that the model has no tensor-parallel plan for. Raises
    `NotShardable` where no row is left because of that.
    """
    settings, setting_of = settings_of(problem, shapes)
    alike: dict[tuple[float, ...], list[int]] = {}  # settings with the same tensor-parallel plans
    for at, key in enumerate(settings.tolist()):
        alike.setdefault(tuple(key[1:3]), []).append(at)
    price = partial(_priced, problem, chain, book, capacity_bytes=capacity_bytes)
    pieces = [partial(price, settings[some].tolist()) for some in alike.values()]
    sizes = [len(some) for some in alike.values()]
    found = side_by_side(pieces, sizes, processes if len(settings) > FEW else 1)
    illegal = next((one.illegal for one in found if one.illegal is not None), None)
    if illegal is not None and not any(one.legal for one in found):
        raise illegal
    rows = np.empty((len(settings), row_length(chain)))
    for some, one in zip(alike.values(), found, strict=True):
        rows[some] = one.rows
        book.expander.works.know(one.plans)
    columns = rows[setting_of]
    single = columns[:, : len(SINGLE)].T
    by_kind = columns[:, len(SINGLE) :].reshape(len(columns), -1, len(BY_KIND))
    return PriceTable(**dict(zip(SINGLE, single, strict=True)), by_kind=by_kind)


def row_length(chain: Chain) -> int:
    """Numbers in a row of the table: those of the model, then those of each kind of layer group."""
    return len(SINGLE) + len(chain.groups) * len(BY_KIND)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    """Rows of some settings, and the tensor-parallel plans that were solved for them."""

    rows: list[tuple[float, ...]]
    legal: bool  # some of them
    illegal: NotShardable | None  # why others are not
    plans: Mapping[TensorRequest, TensorPlan]


def _priced(
    problem: Problem,
    chain: Chain,
    book: PriceBook,
    keys: Sequence[Sequence[float]],
    capacity_bytes: float,
) -> _Priced:
    """Rows of settings."""
    nothing = (np.inf,) * row_length(chain)
    known = set(book.expander.works.plans)
    priced: list[tuple[float, ...]] = []
    full: tuple[float, ...] = ()  # the setting whose smaller micro-batches are too large already
    illegal: NotShardable | None = None
    legal, ordered = False, problem.fixed.order is not None
    for key in keys:
        setting = tuple(key[:-1])
        try:
            row = nothing
            if setting != full:
                strategy = representative(problem, chain, key)
                axes = nearest_axes(strategy.mesh, ordered=ordered)
                prices = _block_prices(problem, chain, book, strategy, axes, added=key[-2] > 0)
                row = _row(chain, strategy, prices)
            legal = legal or row is not nothing
        except NotShardable as error:
            illegal, row = illegal or error, nothing
        group = row[SINGLE.index("least_saved")] + row[SINGLE.index("peak")]
        if max(group, row[SINGLE.index("tail_peak")]) > capacity_bytes:
            row, full = nothing, setting
        priced.append(row)
    plans = {request: plan for request, plan in book.expander.works.plans.items() if request not in known}
    return _Priced(rows=priced, legal=legal, illegal=illegal, plans=plans)


def setting_columns(shapes: Shapes) -> tuple[Floats | Ints, ...]:
    """What of a shape the price of a block depends on beside its micro-batches, as `representative` takes it."""
    return tuple(getattr(shapes, name) for name in SETTING)


def settings_of(problem: Problem, shapes: Shapes) -> tuple[Floats, Ints]:
    """The distinct settings that blocks are priced in (columns as `representative` takes them), and each shape's.
    The one with smaller micro-batches stands before that with larger ones."""
    keys = np.stack([*setting_columns(shapes), added_up(problem, shapes), shapes.micro], axis=1)
    distinct, rows = np.unique(keys, axis=0, return_inverse=True)
    return np.asarray(distinct, dtype=np.float64), rows.reshape(-1)


def added_up(problem: Problem, shapes: Shapes) -> Ints:
    """How many micro-batches' gradients are added up, 2 for more; 1 with fused kernels, which do so on the way, and 0 where
    ZeRO-2 or 3 may add them to shards, for which nothing is counted."""
    if problem.execution.kernels == "fused" and not problem.execution.added_gradients:
        return np.ones_like(shapes.micro_batches)
    level = problem.fixed.shard.zero
    sharded = (shapes.dp_shard * shapes.cp > 1) & (level is None or level >= 2)
    return np.asarray(np.where(sharded, 0, np.minimum(shapes.micro_batches, 2)))


def placed_row(
    problem: Problem,
    chain: Chain,
    book: PriceBook,
    shapes: Shapes,
    shape: int,
    axes: tuple[Axis, ...],
    apart: int,
) -> tuple[float, ...]:
    """The row of one shape's setting with nothing recomputed and nothing on the host, whose blocks communicate along these
    axes, tensor parallelism `apart` devices apart."""
    columns = {"activations_offloaded": 0.0, "recompute": float(MODES.index("none"))}
    named = zip(SETTING, setting_columns(shapes), strict=True)
    key = (*(columns.get(name, float(column[shape])) for name, column in named), 0, int(shapes.micro[shape]))
    strategy = representative(problem, chain, key, apart)
    return _row(chain, strategy, _block_prices(problem, chain, book, strategy, axes, added=False))


def representative(problem: Problem, chain: Chain, key: Sequence[float], stride: int = 1) -> Strategy:
    """A strategy with this setting and nothing else: no pipeline, and replicas only where tensor parallelism is
    placed `stride` devices apart."""
    tp, sequence, mode, cp, ep, added, micro = map(int, key[1:])
    several = max(added, 1)
    shards = ep // gcd(ep, cp * tp)
    chosen = Candidate(
        mesh=Mesh(
            tp=tp, cp=cp, ep=ep, dp_shard=shards, dp_replicate=stride, order=FAR if stride > 1 else AXES
        ),
        micro=micro, micro_batches=several, zero=0, sequence_parallel=bool(sequence), schedule="none",
        virtual_stages=1, mode=MODES[mode], offload=Offload(activations=key[0]),
        compression=(),
    )  # fmt: skip
    strategy = strategy_of(problem, chosen, even_partition(len(chain.kinds), 1), bucketed=False)
    return replace(strategy, batch=Batch(global_=several * micro * stride * shards, micro=micro))


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
    tied = [any(p.tied for p in block.parameters) for block in problem.graph.blocks]

    def block_price(block: int, how: str, *, held: bool = False) -> BlockPrice:
        return book.block_price(strategy, block, how, held=held or not tied[block], axes=axes, added=added)

    head = [block_price(b, "none", held=chain.head.count(b) == 1) for b in chain.head]
    tail = [block_price(b, "none") for b in chain.tail]
    copies = [block_price(b, "none", held=True) for b in chain.tail]
    tied_numbers = sum(a.dense_trainable - b.dense_trainable for a, b in zip(copies, tail, strict=True))
    groups = [
        [block_price(b, mode if i == 0 else "none") for i, b in enumerate(group)] for group in chain.groups
    ]
    full = groups
    if mode != "full" or problem.fixed.recomputed is not None:
        full = [
            [block_price(b, "full" if i == 0 else "none") for i, b in enumerate(group)]
            for group in chain.groups
        ]
    return _Prices(head=head, tail=tail, tail_tied=tied_numbers, groups=groups, full=full)


def _row(chain: Chain, strategy: Strategy, prices: _Prices) -> tuple[float, ...]:
    head, tail, groups, full = prices.head, prices.tail, prices.groups, prices.full
    counts = [chain.kinds.count(kind) for kind in range(len(chain.groups))]
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
    peaks, backward_peaks = _peaks(last)
    counted = _peaks([prices[-1] for both in kept for prices in both])
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
        min(peaks, default=0.0),
        min(backward_peaks, default=0.0),
        *(min(each, default=0.0) for each in counted),
        _tail_peak(tail) if tail else min(peaks, default=0.0),
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
    )


def _peaks(prices: Sequence[BlockPrice]) -> tuple[list[int], list[int]]:
    """Of each block's passes, and of its backward alone, what stands above what is saved."""
    return (
        [max(p.forward_temp, p.recomputed + p.backward_temp) for p in prices],
        [p.recomputed + p.backward_temp for p in prices],
    )


def _tail_peak(tail: Sequence[BlockPrice]) -> float:
    """Largest moment of the tail, above what the layer groups before it saved."""
    held, peak = 0, 0
    for price in tail:
        held += price.saved
        peak = max(peak, held + price.forward_temp, held + price.recomputed + price.backward_temp)
    return float(peak)


def _sum(prices: Iterable[BlockPrice], name: str) -> float:
    return float(sum(getattr(price, name) for price in prices))


def take_rows(table: PriceTable, rows: Ints) -> PriceTable:
    """The columns at `rows`."""
    return PriceTable(**{f.name: getattr(table, f.name)[rows] for f in fields(PriceTable)})
