"""The outer level of the search: columns of the space joined with prices, and their bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, prod

import numpy as np

from autoparallel.costmodel.prediction import Held
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.problem import Objective, Problem
from autoparallel.planner.search.bounds.communication import Communication, CommunicationPrices
from autoparallel.planner.search.bounds.exchanged import gathers_s, of_kinds, updates_s
from autoparallel.planner.search.bounds.families import ANYWHERE, Alike, Alternatives, LeastCommunication
from autoparallel.planner.search.bounds.far import FarPrices
from autoparallel.planner.search.bounds.pace import no_faster_than, pace_of_ranks
from autoparallel.planner.search.bounds.prices import PriceBook
from autoparallel.planner.search.bounds.rows import Rows
from autoparallel.planner.search.bounds.settings import SettingPrices
from autoparallel.planner.search.bounds.tables import PriceTable, kinds_that_count
from autoparallel.planner.search.bounds.variants import (
    CLOSE,
    Bounds,
    communicated_s,
    quick_bounds,
    shape_bounds,
    variant_bounds,
)
from autoparallel.planner.search.partition.forms import Chain, chain_of
from autoparallel.planner.search.partition.unlike import capacities, fastest, lacking_bytes, rank_devices
from autoparallel.planner.search.space.build import (
    Families,
    Space,
    Variants,
    build_space,
    families,
    spread,
    variants,
)
from autoparallel.planner.search.space.meshes import Floats, Ints, alike
from autoparallel.planner.search.space.syncs import open_algorithms, widest_bucket_mib

ALIKE_CLOSE = (
    0.02  # to which shapes that are alike are bounded, of whose families most are ruled out at one look
)
FAMILY_CLOSE = 0.01  # and families of one shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """A problem's space with the price of every shape, and bounds of every shape."""

    problem: Problem
    space: Space
    chain: Chain
    book: PriceBook
    prices: SettingPrices
    communication: CommunicationPrices
    least: LeastCommunication
    alike: Alike
    far: FarPrices
    bounds: Bounds  # of each shape, by what is known of its prices
    counts: Ints  # variants of each shape
    capacity_bytes: float
    families_s: Floats  # of each shape, what none of its families that fits goes below, as far as `bound_alike` was asked
    looked_s: Floats  # and up to where that was looked for
    pace: Floats | None = (
        None  # by rank and shape, over unlike devices: `planner.search.bounds.pace.pace_of_ranks`
    )

    @property
    def repeated(self) -> int:
        """Layer groups of the kinds that bounds look at."""
        return _counted(self.chain)

    def best_first(self, shapes: Ints, number: int, *, by_memory: bool = False) -> Ints:
        """Of these shapes those with the least bounds on time, or on memory."""
        bounds = self.bounds.memory_bytes if by_memory else self.bounds.time_s
        return np.asarray(shapes[np.argsort(bounds[shapes], kind="stable")][:number])

    def ask(self, shapes: Ints) -> None:
        """Have the prices of some shapes made, and bound all anew that these are of."""
        found = self.prices.ask(shapes)
        if len(found):
            own = shape_bounds(
                self.problem, self.space, found, self.prices.table(found), _counted(self.chain)
            )
            self.bounds.time_s[found] = np.maximum(self.bounds.time_s[found], own.time_s)
            self.bounds.memory_bytes[found] = np.maximum(self.bounds.memory_bytes[found], own.memory_bytes)

    def excess_bytes(self, found: Held) -> int:
        """Bytes that a simulated strategy has too many on the fullest pipeline rank."""
        return ceil(max(self.lacking_bytes(found)))

    def lacking_bytes(self, found: Held) -> tuple[float, ...]:
        """Bytes that a simulated strategy has too many on each pipeline rank; negative where there is room."""
        if self.capacity_bytes > max(capacities(self.problem)):  # a search without limits
            return tuple(rank.peak - self.capacity_bytes for rank in found.memory)
        rooms = (min(room, self.capacity_bytes) for room in found.capacities_bytes)
        return tuple(rank.peak - room for rank, room in zip(found.memory, rooms, strict=True))

    def fits(self, found: Held) -> bool:
        """Whether a simulated strategy fits in the memory of the devices and of their hosts."""
        return self.excess_bytes(found) <= 0 and found.host_excess_bytes <= 0


def outer_of(problem: Problem, expander: Expander | None = None, processes: int = 1) -> Outer | None:
    """Space, prices and bounds of a problem; None where no strategy is legal. Prices are made in so many processes."""
    space = build_space(problem)
    if not len(space.shapes) or not space.counts().any():
        return None
    expander = expander or Expander(graph=problem.graph, cluster=problem.cluster)
    book = PriceBook(
        expander=expander, pricer=expander.pricer, device=fastest(rank_devices(problem)),
        algorithms=open_algorithms(problem), bucket_mib=widest_bucket_mib(problem),
    )  # fmt: skip
    return build_outer(problem, space, chain_of(problem.graph), book, max(capacities(problem)), processes)


def build_outer(
    problem: Problem,
    space: Space,
    chain: Chain,
    book: PriceBook,
    capacity_bytes: float,
    processes: int = 1,
) -> Outer:
    """Price every shape of a space, and bound it."""
    best, every = book.at_best(), np.arange(len(space.shapes))
    prices = SettingPrices.of(problem, chain, best, space.shapes, capacity_bytes, processes)
    mixed = len({device.name for device in rank_devices(problem)}) > 1
    if mixed or problem.objective == Objective.MEMORY or capacity_bytes > max(capacities(problem)):
        prices.ask(every)  # little is left out where what counts are bytes, or the paces of unlike devices
    table = prices.table(every)
    pace = pace_of_ranks(problem, chain, best, prices)
    bounds = shape_bounds(problem, space, every, table, _counted(chain))
    communication = CommunicationPrices.of(problem, space, prices, book, chain)
    least_s = communicated_s(space, table, communication, chain, *slowdowns(book))
    bounds = replace(bounds, time_s=np.fmax(bounds.time_s, least_s))
    if pace is not None:
        bounds = no_faster_than(bounds, space.shapes, table, pace)
    return Outer(
        problem=problem, space=space, chain=chain, book=book, prices=prices,
        counts=space.counts(),
        communication=communication,
        least=LeastCommunication.of(communication),
        alike=Alike.of(space.shapes, prices.setting_of, communication.exchanges.offloaded),
        far=FarPrices(problem=problem, chain=chain, book=best),
        bounds=bounds, capacity_bytes=capacity_bytes, pace=pace,
        families_s=np.zeros(len(space.shapes)), looked_s=np.zeros(len(space.shapes)),
    )  # fmt: skip


def _counted(chain: Chain) -> int:
    return sum(chain.kinds.count(kind) for kind in kinds_that_count(chain))


def expand_shapes(
    outer: Outer, rows: Ints, below_s: float, *, memory: bool = False
) -> tuple[Variants, Bounds]:
    """The variants of some shapes, with their bounds (of bytes where `memory` asks for them)."""
    found = variants(outer.space, _possible(outer, rows))
    return found, bound_variants(outer, found, below_s, memory=memory)


def expand_quickly(outer: Outer, rows: Ints) -> tuple[Variants, Bounds]:
    """The variants of some shapes, with bounds that do not look at each rank."""
    found = variants(outer.space, _possible(outer, rows))
    return found, quickly_bounded(outer, found)


def _possible(outer: Outer, rows: Ints) -> Ints:
    """Of some shapes those that are strategies at all, by prices of their own."""
    outer.ask(rows)
    return np.asarray(rows[np.isfinite(outer.bounds.time_s[rows])])


def quickly_bounded(outer: Outer, found: Variants) -> Bounds:
    """Bounds of variants that do not look at each rank."""
    priced = rows_of(outer, found)
    bounds = quick_bounds(outer.problem, priced, outer.capacity_bytes)
    least = np.maximum(bounds.memory_bytes, outer.bounds.memory_bytes[found.shape])
    return Bounds(time_s=np.maximum(bounds.time_s, outer.bounds.time_s[found.shape]), memory_bytes=least)


def families_of(outer: Outer, rows: Ints) -> Families:
    """The families of some shapes."""
    at, placed = _placements(outer, rows)
    return families(outer.space, rows[at], placed)[0]


def spread_families(outer: Outer, found: Families) -> tuple[Variants, Ints]:
    """Every variant of some families, and which family each is of."""
    return spread(outer.space, found, outer.communication.inner_of(outer.space.shapes.mesh[found.shape]))


def bound_families(outer: Outer, found: Families, below_s: float) -> Floats:
    """Seconds that no variant of each family goes below; one that cannot be shorter than `below_s` is only known to be that
    long."""
    first, which = alike(found.shape, found.zero, found.placed)  # schedules communicate alike
    few = found.take(first)
    alternatives = outer.least.price(few.shape, few.zero, few.placed, np.arange(len(few)))
    return _bound_families(outer, found, alternatives, which, below_s, FAMILY_CLOSE)


def bound_alike(outer: Outer, rows: Ints, below_s: float) -> int:
    """Bound some shapes, whose own prices are known, and all that are like them, by families of the most sharded ones, wherever
    their blocks communicate; up to `below_s`. How many ranks of families were looked at."""
    unknown, bounds = (outer.looked_s < below_s) & (outer.families_s >= outer.looked_s), outer.bounds
    open_ = unknown & (bounds.time_s < below_s) & (bounds.memory_bytes <= outer.capacity_bytes)
    members = outer.alike.members(rows[unknown[rows]])
    members = members[open_[members]]
    if not len(members):
        return 0
    _, first, group = np.unique(outer.alike.number[members], return_index=True, return_inverse=True)
    most_sharded, group = members[first], group.reshape(-1)
    found, own = families(outer.space, most_sharded, np.full_like(most_sharded, ANYWHERE))
    zeros, shapes = np.array(outer.space.zeros), outer.space.shapes.take(members)
    level, at = np.nonzero(np.stack([outer.space.zero_fits(shapes, zero) for zero in outer.space.zeros]))
    zero, levels = zeros[level], int(zeros.max()) + 1
    number, placed = group[at] * levels + zero, np.full_like(at, ANYWHERE)
    alternatives = outer.least.price(members[at], zero, placed, number)
    time_s = _bound_families(outer, found, alternatives, own * levels + found.zero, below_s, ALIKE_CLOSE)
    least_s = np.full(len(first), np.inf)
    np.minimum.at(least_s, own, time_s)
    outer.families_s[members] = np.maximum(outer.families_s[members], least_s[group])
    outer.looked_s[members] = below_s
    return int(outer.space.shapes.pp[found.shape].sum())


def _placements(outer: Outer, rows: Ints) -> tuple[Ints, Ints]:
    """Where the blocks of some shapes may communicate: the row of each place, and its number."""
    inner = outer.communication.inner_of(outer.space.shapes.mesh[rows])
    at, order = np.nonzero(inner >= 0)
    first, _ = alike(at, inner[at, order])
    return at[first], inner[at, order][first]


def _bound_families(
    outer: Outer, found: Families, alternatives: Alternatives, group: Ints, below_s: float, close: float
) -> Floats:
    """Seconds that no variant of each family goes below, which communicates like one of the alternatives of its `group`."""
    at, row = alternatives.of(group)
    each, least_s = found.take(at), np.full(len(found), np.inf)
    shapes = outer.space.shapes.take(each.shape)
    table = outer.far.apply(outer.prices.table(each.shape), shapes, each.placed)
    rows = _rows(outer, each, table, alternatives.communication.take(row))
    bounds = variant_bounds(outer.problem, rows, outer.capacity_bytes, below_s, memory=False, close=close)
    if outer.pace is not None:
        bounds = no_faster_than(bounds, rows.shapes, rows.table, outer.pace[:, each.shape])
    np.minimum.at(least_s, at, bounds.time_s)
    return least_s


def bound_variants(
    outer: Outer, found: Variants, below_s: float, *, memory: bool = False, close: float = CLOSE
) -> Bounds:
    """Bounds of variants, as `close` as that: their communication is priced once per distinct setting."""
    rows = rows_of(outer, found)
    bounds = variant_bounds(outer.problem, rows, outer.capacity_bytes, below_s, memory=memory, close=close)
    if outer.pace is None:
        return bounds
    return no_faster_than(bounds, rows.shapes, rows.table, outer.pace[:, found.shape])


def rows_of(outer: Outer, found: Variants) -> Rows:
    """Variants with their prices, and the numbers of blocks that their chunks may have (`_blocks_per_chunk`)."""
    outer.ask(found.shape)
    table = outer.far.apply(
        outer.prices.table(found.shape), outer.space.shapes.take(found.shape),
        outer.communication.inner_placements(found),
    )  # fmt: skip
    return _rows(outer, found, table, outer.communication.price(found))


def _rows(outer: Outer, found: Variants | Families, table: PriceTable, communication: Communication) -> Rows:
    """Variants, or families, with these prices."""
    shapes = outer.space.shapes.take(found.shape)
    slow, slow_comm = slowdowns(outer.book)
    least, ends, most = _blocks_per_chunk(outer, shapes.pp)
    # A model of one stage ends its first forward when all parameters have come, and not before.
    waits_s = np.maximum(
        communication.updated_s * table.all_parameters
        + communication.updated_expert_s * table.all_experts
        - table.all_forward_s,
        0.0,
    )
    waits_s *= shapes.pp == 1
    return Rows(
        shapes=shapes,
        table=table,
        zero=found.zero,
        schedule=found.schedule,
        chunks=found.virtual_stages,
        pp_stride=_pp_strides(outer.space, found),
        group_reduce_s=communication.reduce_s * table.group_trainable
        + communication.reduce_expert_s * table.group_expert_trainable,
        all_reduce_s=communication.reduce_s * table.all_trainable
        + communication.reduce_expert_s * table.all_expert_trainable,
        **gathers_s(outer.repeated, communication, table, again=outer.problem.graph.backward_throughout),
        **updates_s(shapes.pp, communication, table),
        group_step_s=communication.step_s * table.group_trainable
        + communication.step_expert_s * table.group_expert_trainable
        + waits_s / max(outer.repeated, 1),
        all_step_s=communication.step_s * table.all_trainable
        + communication.step_expert_s * table.all_expert_trainable
        + waits_s,
        kind_reduce_s=of_kinds(table, communication.reduce_s, communication.reduce_expert_s, "trainable"),
        kind_step_s=of_kinds(table, communication.step_s, communication.step_expert_s, "trainable"),
        step_s=communication.step_s,
        reduce_s=communication.reduce_s,
        reduce_least_s=communication.reduce_least_s,
        step_least_s=communication.step_least_s,
        sends_s=communication.sends_s,
        send_s=_shortest(communication.sends_s, outer.chain),
        places=outer.chain.places if outer.problem.cluster.network is None else (),
        tied_s=communication.tied_s,
        summed_s=communication.summed_least_s
        + communication.summed_s
        * table.all_trainable
        / (outer.space.shapes.pp[found.shape] * found.virtual_stages),
        repeated=outer.repeated,
        others=outer.space.repeated - outer.repeated,
        least_per_chunk=least,
        least_per_end=ends,
        most_per_chunk=most,
        slow=slow,
        slow_comm=slow_comm,
        tied_between=bool(outer.chain.ties.ends & outer.chain.ties.groups),
        apart=outer.problem.fixed.grad_sync.overlap is False,
        slower=None if outer.pace is None else 1.0 / outer.pace[:, found.shape],
        lacking_bytes=lacking_bytes(outer.problem),
    )


def _pp_strides(space: Space, found: Variants | Families) -> Ints:
    """Devices between neighbouring pipeline ranks; 0 of families, which leave the order of the axes open."""
    strides = np.zeros(len(found), dtype=np.int64)
    if isinstance(found, Families):
        return strides
    for number in np.unique(found.order).tolist():
        order = space.meshes.orders[number]
        rows = np.flatnonzero(found.order == number)
        inner = [getattr(space.shapes, axis)[found.shape[rows]] for axis in order[order.index("pp") + 1 :]]
        strides[rows] = prod(inner, start=np.ones(len(rows), dtype=np.int64))
    return strides


def slowdowns(book: PriceBook) -> tuple[float, float]:
    """How many times as long computation and communication take beside each other."""
    constants = book.device.constants
    return 1.0 + constants.get("overlap.compute_slowdown", 0.0), 1.0 + constants.get(
        "overlap.comm_slowdown", 0.0
    )


def _shortest(sends_s: Floats, chain: Chain) -> Floats:
    """The shortest message of each variant."""
    return sends_s[:, chain.sent].min(axis=1) if chain.sent else np.zeros(len(sends_s))


def _blocks_per_chunk(outer: Outer, pp: Ints) -> tuple[Ints, Ints, Ints]:
    """The fewest blocks of a chunk that is not at an end of the model, of one that is, and the most of any."""
    blocks = outer.problem.fixed.stage_blocks
    if blocks is not None:
        ends = min(blocks[0], blocks[-1])
        return tuple(np.full_like(pp, n) for n in (min(blocks[1:-1], default=0), ends, max(blocks)))  # type: ignore[return-value]
    return np.ones_like(pp), np.zeros_like(pp), np.full_like(pp, outer.space.repeated)
