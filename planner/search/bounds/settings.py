"""Prices of settings, made when they are asked for.

A setting is all that the price of a block depends on. A large space has thousands of them, of which a search looks at few. So
at first only *anchors* are priced: nothing recomputed, nothing on the host, and of the micro-batches some that the others
divide. Until it is asked for, a setting is taken to cost its anchor's share,

    seconds(mode, micro) >= seconds(none, M) * micro / M     for every M that micro divides, bytes likewise,

as recomputation and copies only take time, and nothing is faster or smaller per sample when it has fewer of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import gcd

import numpy as np

from autoparallel.costmodel.program import Axis
from autoparallel.costmodel.topology import slow_unit
from autoparallel.planner.expand.axes import nearest_axes
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.bounds.prices import PriceBook
from autoparallel.planner.search.bounds.tables import SINGLE, PriceTable, as_columns, row_length, setting_row
from autoparallel.planner.search.partition.forms import Chain
from autoparallel.planner.search.partition.quick import even_partition
from autoparallel.planner.search.space.candidates import Candidate, strategy_of
from autoparallel.planner.search.space.meshes import Bools, Floats, Ints, alike
from autoparallel.planner.search.space.shapes import MODES, Shapes
from autoparallel.planner.sharding.plan import TensorPlan
from autoparallel.planner.sharding.rules import NotShardable
from autoparallel.planner.sharding.solve import TensorRequest
from autoparallel.planner.side_by_side import side_by_side
from autoparallel.planner.strategy.types import AXES, Batch, Mesh, Offload, Strategy

FEW = 256  # settings that are priced sooner than another process is started. Kind: measured
FURTHEST = 4  # times as large as a micro-batch its anchor is at most. Kind: choice
SETTING = ("activations_offloaded", "tp", "sequence_parallel", "recompute", "cp", "ep")
OFFLOADED, MODE, ADDED, MICRO = 0, SETTING.index("recompute"), -2, -1  # in a setting's key
FAR = ("pp", "dp_shard", "cp", "tp", "dp_replicate")  # tensor parallelism outside the replicas
# What an anchor says of others. What of the layer groups is kept may be on the host.
SECONDS = [at for at, name in enumerate(SINGLE) if name.endswith("_s") and name != "recompute_s"]
ON_DEVICE = [SINGLE.index(name) for name in ("least_saved", "peak", "split_peak")]
BYTES = [SINGLE.index(name) for name in ("tail_peak", "split_tail_peak")]
COUNTS = [
    at for at, name in enumerate(SINGLE)
    if name.endswith(("_parameters", "_trainable", "_experts", "buffer_bytes", "tail_tied"))
]  # fmt: skip
Key = tuple[float, ...]


@dataclass(slots=True, kw_only=True)
class SettingPrices:
    """The prices of a space's settings, with tensor parallelism on neighbouring devices, where it is cheapest. Where one layer
    group or the tail alone does not fit, rows are infinite, and so are those of a degree that the model has no
    tensor-parallel plan for."""

    problem: Problem
    chain: Chain
    book: PriceBook
    capacity_bytes: float
    keys: list[Key]  # of each setting, as `representative` takes them
    setting_of: Ints  # by shape
    rows: Floats  # by setting: `tables.setting_row`
    exact: Bools  # whether they are its own, and not what an anchor says
    _shapes: tuple[Ints, Ints] = field(
        init=False
    )  # by setting, one after the other; and where each one's begin

    def __post_init__(self) -> None:
        order = np.argsort(self.setting_of, kind="stable")
        first = np.searchsorted(self.setting_of[order], np.arange(len(self.keys) + 1))
        self._shapes = order, first

    @staticmethod
    def of(
        problem: Problem,
        chain: Chain,
        book: PriceBook,
        shapes: Shapes,
        capacity_bytes: float,
        processes: int = 1,
    ) -> SettingPrices:
        """The anchors' prices. Raises `NotShardable` where the model has no tensor-parallel plan for any of the shapes."""
        settings, setting_of = settings_of(problem, shapes)
        keys = [tuple(key) for key in settings.tolist()]
        anchors = _anchors(keys)
        known = _side_by_side(problem, chain, book, list(dict.fromkeys(anchors)), processes)
        rows = np.empty((len(keys), row_length(chain)))
        for at, (key, anchor) in enumerate(zip(keys, anchors, strict=True)):
            rows[at] = known[key] if key in known else _share(known[anchor], anchor, key)
        found = SettingPrices(
            problem=problem, chain=chain, book=book, capacity_bytes=capacity_bytes, keys=keys,
            setting_of=setting_of, rows=rows, exact=np.array([key in known for key in keys], dtype=np.bool_),
        )  # fmt: skip
        found._drop_too_large(slice(None))
        return found

    @property
    def priced(self) -> int:
        """Settings with prices of their own."""
        return int(self.exact.sum())

    def column(self, name: str, shapes: Ints | slice = slice(None)) -> Floats:
        """One column of the table of some shapes."""
        return np.asarray(self.rows[self.setting_of[shapes], SINGLE.index(name)])

    def table(self, shapes: Ints | slice) -> PriceTable:
        """The prices of some shapes as they are known."""
        return as_columns(self.rows, self.setting_of[shapes])

    def knows(self, shapes: Ints) -> Bools:
        """Which of some shapes have prices of their own."""
        return np.asarray(self.exact[self.setting_of[shapes]])

    def ask(self, shapes: Ints | slice) -> Ints:
        """Price what is not known of some shapes. All shapes whose prices are others now."""
        settings = self.setting_of[shapes]
        settings = settings[~self.exact[settings]]
        if not len(settings):
            return settings
        settings = np.unique(settings)
        rows, _ = _priced(self.problem, self.chain, self.book, [self.keys[at] for at in settings.tolist()])
        self.rows[settings] = rows
        self.exact[settings] = True
        self._drop_too_large(settings)
        shapes, first = self._shapes
        return np.concatenate([shapes[first[at] : first[at + 1]] for at in settings.tolist()])

    def _drop_too_large(self, settings: Ints | slice) -> None:
        """Make rows infinite where one layer group, or the tail, alone is too large."""
        rows = self.rows[settings]
        peak, tail = (
            np.minimum(rows[:, SINGLE.index(name)], rows[:, SINGLE.index(f"split_{name}")])
            for name in ("peak", "tail_peak")
        )
        group = rows[:, SINGLE.index("least_saved")] + peak
        rows[np.maximum(group, tail) > self.capacity_bytes] = np.inf
        self.rows[settings] = rows


def _anchors(keys: Iterable[Key]) -> list[Key]:
    """The anchor of each setting."""
    keys = list(keys)
    alike: dict[Key, list[Key]] = {}
    for key in keys:
        alike.setdefault((*key[1:MODE], *key[MODE + 1 : MICRO]), []).append(key)
    found: dict[Key, Key] = {}
    for some in alike.values():
        modes = {key[MODE] for key in some}
        mode = float(MODES.index("none")) if len(modes) > 1 else min(modes)
        offloaded = min(key[OFFLOADED] for key in some)
        anchors: dict[float, float] = {}
        for micro in sorted({key[MICRO] for key in some}, reverse=True):
            others = (other for other in anchors.values() if other % micro == 0 and other <= micro * FURTHEST)
            anchors[micro] = min(others, default=micro)
        for key in some:
            found[key] = (
                offloaded, *key[1:MODE], mode, *key[MODE + 1 : MICRO], anchors[key[MICRO]],
            )  # fmt: skip
    return [found[key] for key in keys]


def _share(row: Sequence[float], anchor: Key, key: Key) -> Floats:
    """What an anchor's row says of another setting: nothing of what no bound of a shape asks for."""
    whole, share = np.array(row), key[MICRO] / anchor[MICRO]
    if np.isinf(whole[0]):
        return whole
    found = np.zeros_like(whole)
    found[[*SECONDS, *BYTES]] = whole[[*SECONDS, *BYTES]] * share
    found[COUNTS] = whole[COUNTS]
    if key[OFFLOADED] == anchor[OFFLOADED]:
        found[ON_DEVICE] = whole[ON_DEVICE] * share
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Rows of some settings, the tensor-parallel plans that were solved for them, and why some have none."""

    rows: list[tuple[float, ...]]
    plans: Mapping[TensorRequest, TensorPlan]
    illegal: NotShardable | None


def _side_by_side(
    problem: Problem, chain: Chain, book: PriceBook, keys: Sequence[Key], processes: int
) -> dict[Key, tuple[float, ...]]:
    """Rows of settings, priced in so many processes. Raises `NotShardable` where all are illegal."""
    alike: dict[Key, list[Key]] = {}  # settings with the same tensor-parallel plans
    for key in keys:
        alike.setdefault(key[1:3], []).append(key)

    def piece(some: Sequence[Key]) -> _Piece:
        known = set(book.expander.works.plans)
        rows, illegal = _priced(problem, chain, book, some)
        every = book.expander.works.plans.items()
        return _Piece(rows=rows, plans={k: v for k, v in every if k not in known}, illegal=illegal)

    pieces, sizes = [partial(piece, some) for some in alike.values()], list(map(len, alike.values()))
    found = side_by_side(pieces, sizes, processes if len(keys) > FEW else 1)
    illegal = next((one.illegal for one in found if one.illegal is not None), None)
    if illegal is not None and all(np.isinf(row[0]) for one in found for row in one.rows):
        raise illegal
    for one in found:
        book.expander.works.know(one.plans)
    return {
        key: row
        for some, one in zip(alike.values(), found, strict=True)
        for key, row in zip(some, one.rows, strict=True)
    }


def _priced(
    problem: Problem, chain: Chain, book: PriceBook, keys: Sequence[Key]
) -> tuple[list[tuple[float, ...]], NotShardable | None]:
    """Rows of settings; infinite where there is no tensor-parallel plan, and why."""
    rows: list[tuple[float, ...]] = []
    illegal: NotShardable | None = None
    apart = slow_unit(problem.cluster)
    for key in keys:
        try:
            strategy = representative(problem, chain, key)
            row = _row_at(problem, chain, book, key, strategy)
            if (other := _of_another_plan(problem, chain, book, key, strategy)) is not None:
                row = tuple(map(min, row, _row_at(problem, chain, book, key, other)))
            far = min(apart, problem.cluster.devices // strategy.mesh.devices)
            if far > 1:  # neighbours may be slower than devices of different units
                strategy = representative(problem, chain, key, far)
                row = tuple(map(min, row, _row_at(problem, chain, book, key, strategy, far)))
        except NotShardable as error:
            illegal, row = illegal or error, (np.inf,) * row_length(chain)
        rows.append(row)
    return rows, illegal


def _of_another_plan(
    problem: Problem, chain: Chain, book: PriceBook, key: Key, strategy: Strategy
) -> Strategy | None:
    """The setting with tensor parallelism over the outermost level, where another tensor plan is the best. Plans are made for one
    sample with its share of the step, so that it may be the faster one for neighbours, too: in steps of many samples."""
    levels, devices = problem.cluster.levels, strategy.mesh.devices
    apart = min(levels[-2].size, problem.cluster.devices // devices) if len(levels) > 1 else 1
    if strategy.mesh.tp == 1 or apart <= 1:
        return None
    other, works = representative(problem, chain, key, apart), book.expander.works
    same = works.tensor_plan(other).blocks == works.tensor_plan(strategy).blocks
    return None if same else other


def _row_at(
    problem: Problem, chain: Chain, book: PriceBook, key: Key, strategy: Strategy, apart: int = 1
) -> tuple[float, ...]:
    """The row of a setting whose blocks communicate with the devices that are nearest, or so many `apart`."""
    nearest = nearest_axes(strategy.mesh, ordered=problem.fixed.order is not None)
    axes = tuple(replace(axis, stride=axis.stride * apart) for axis in nearest)
    return setting_row(problem, chain, book, strategy, axes, added=key[ADDED] > 0)


def setting_columns(shapes: Shapes) -> tuple[Floats | Ints, ...]:
    """What of a shape the price of a block depends on beside its micro-batches, as `representative` takes it."""
    return tuple(getattr(shapes, name) for name in SETTING)


def settings_of(problem: Problem, shapes: Shapes) -> tuple[Floats, Ints]:
    """The distinct settings that blocks are priced in (columns as `representative` takes them), and each shape's.
    The one with smaller micro-batches stands before that with larger ones."""
    columns = (*setting_columns(shapes), added_up(problem, shapes), shapes.micro)
    _, offloaded = np.unique(columns[OFFLOADED], return_inverse=True)
    others = (column.astype(np.int64, copy=False) for column in columns[1:])
    first, rows = alike(offloaded.reshape(-1), *(alike(column)[1] for column in others))
    return np.stack([column[first].astype(np.float64) for column in columns], axis=1), rows


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
    return setting_row(problem, chain, book, strategy, axes, added=False)


def representative(problem: Problem, chain: Chain, key: Sequence[float], stride: int = 1) -> Strategy:
    """A strategy with this setting and nothing else: no pipeline, no ZeRO even where the user fixes its level, and replicas only
    where tensor parallelism is placed `stride` devices apart."""
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
    batch, shard = Batch(global_=several * micro * stride * shards, micro=micro), strategy.shard
    return replace(strategy, batch=batch, shard=replace(shard, zero=0, secondary=0))
