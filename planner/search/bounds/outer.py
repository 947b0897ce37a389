"""The outer level of the search: columns of the space joined with prices, and their bounds."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import ceil

import numpy as np

from autoparallel.costmodel.prediction import Held
from autoparallel.planner.expand.axes import axes_of, inner_axes, tensor_stride
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.problem import Objective, Problem
from autoparallel.planner.search.bounds.pace import no_faster_than, pace_of_ranks
from autoparallel.planner.search.bounds.prices import PriceBook
from autoparallel.planner.search.bounds.ranks import Rows
from autoparallel.planner.search.bounds.tables import (
    Units,
    UnitTable,
    kinds_that_count,
    placed_row,
    take_units,
    unit_table,
)
from autoparallel.planner.search.bounds.variants import Bounds, quick_bounds, shape_bounds, variant_bounds
from autoparallel.planner.search.bounds.wires import WireBook, Wires
from autoparallel.planner.search.space.build import (
    UNEVEN_CHUNKS_BLOCKS,
    WHOLE_BACKWARD,
    Space,
    Variants,
    build_space,
    even_share,
    variants,
)
from autoparallel.planner.search.space.meshes import Floats, Ints
from autoparallel.planner.search.stages.forms import Chain, units_of
from autoparallel.planner.search.stages.unlike import capacities, fastest, lacking_bytes, rank_devices
from autoparallel.planner.strategy.types import Mesh

PROMISING = 12_000  # shapes that are bounded with what they exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """A problem's space with the price of every shape, and bounds of every shape, which `settle` tightens."""

    problem: Problem
    space: Space
    chain: Chain
    book: PriceBook
    table: UnitTable
    units: Units  # of the table
    wires: WireBook
    bounds: Bounds
    counts: Ints  # variants of each shape
    capacity_bytes: float
    pace: Floats | None = (
        None  # by rank and shape, over unlike devices: `planner.search.bounds.pace.pace_of_ranks`
    )

    @property
    def repeated(self) -> int:
        """Units of the kinds that bounds look at."""
        return _counted(self.chain)

    def settle(self, shapes: Ints) -> bool:
        """Price what is known of these shapes by their cores alone, and bound again the shapes that this tells of; whether
        there was any."""
        changed = self.table.settle(shapes)
        if not len(changed):
            return False
        part = replace(self.space, shapes=self.space.shapes.take(changed))
        bounds = shape_bounds(self.problem, part, take_units(self.units, changed), self.repeated)
        self.bounds.memory_bytes[changed] = bounds.memory_bytes
        self.bounds.time_s[changed] = np.maximum(bounds.time_s, self.bounds.time_s[changed])
        fits = changed[bounds.memory_bytes <= self.capacity_bytes]
        self.bounds.time_s[fits] = exchange_bounds(self, fits)
        return True

    def best_first(self, shapes: Ints, number: int, *, by_memory: bool = False) -> Ints:
        """Of these shapes those with the least bounds on time, or on memory, which are settled."""
        while True:
            bounds = self.bounds.memory_bytes if by_memory else self.bounds.time_s
            first = shapes[np.argsort(bounds[shapes], kind="stable")][:number]
            if not self.settle(first):
                return np.asarray(first)

    def copy(self) -> Outer:
        """The same; what is settled in one is not in the other."""
        table = self.table.copy()
        bounds = Bounds(time_s=self.bounds.time_s.copy(), memory_bytes=self.bounds.memory_bytes.copy())
        return replace(self, table=table, units=table.units, bounds=bounds)

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
    book = PriceBook(expander=expander, pricer=expander.pricer, device=fastest(rank_devices(problem)))
    return build_outer(problem, space, units_of(problem.graph), book, max(capacities(problem)), processes)


def build_outer(
    problem: Problem,
    space: Space,
    chain: Chain,
    book: PriceBook,
    capacity_bytes: float,
    processes: int = 1,
    *,
    whole: bool = False,
) -> Outer:
    """Price every shape of a space: at once (`whole`, or where bytes or unlike devices need it), or where settings are
    many as far as bounds of time need it before a shape comes up (`Outer.settle`)."""
    best = book.at_best()
    pace = pace_of_ranks(problem, chain, best, space.shapes)
    whole = whole or pace is not None or problem.objective == Objective.MEMORY
    table = unit_table(problem, chain, best, space.shapes, capacity_bytes, processes, whole=whole)
    units = table.units
    bounds = shape_bounds(problem, space, units, _counted(chain))
    if pace is not None:
        bounds = no_faster_than(bounds, space.shapes, units, pace)
    outer = Outer(
        problem=problem, space=space, chain=chain, book=book, table=table, units=units,
        counts=space.counts(),
        wires=WireBook.of(problem, space, units, book, chain),
        bounds=bounds, capacity_bytes=capacity_bytes, pace=pace,
    )  # fmt: skip
    return with_exchanges(outer)


def with_exchanges(outer: Outer) -> Outer:
    """The most promising shapes bounded again, with what they exchange."""
    bounds = outer.bounds
    fits = np.flatnonzero(bounds.memory_bytes <= outer.capacity_bytes)
    rows = fits[np.argsort(bounds.time_s[fits], kind="stable")][:PROMISING]
    time_s = bounds.time_s.copy()
    time_s[rows] = exchange_bounds(outer, rows)
    return replace(outer, bounds=Bounds(time_s=time_s, memory_bytes=bounds.memory_bytes))


def _counted(chain: Chain) -> int:
    return sum(chain.kinds.count(kind) for kind in kinds_that_count(chain))


def expand_shapes(
    outer: Outer, rows: Ints, below_s: float, *, memory: bool = False
) -> tuple[Variants, Bounds]:
    """The variants of some shapes, with their bounds (of bytes where `memory` asks for them)."""
    found = variants(outer.space, rows)
    return found, bound_variants(outer, found, below_s, memory=memory)


def refined_bounds(outer: Outer, found: Variants, mesh: Mesh, below_s: float, *, memory: bool) -> Bounds:
    """Bounds of variants with the same setting and placement of blocks: the prices are those of one's `mesh`."""
    row = placed_row(
        outer.problem, outer.chain, outer.book.at_best(), outer.space.shapes, int(found.shape[0]),
        inner_axes(axes_of(mesh)), tensor_stride(mesh, outer.problem.cluster),
    )  # fmt: skip
    columns = np.repeat(np.array([row], dtype=np.float64), len(found), axis=0)
    units = Units(**{f.name: columns[:, i] for i, f in enumerate(fields(Units))})
    return bound_variants(outer, found, below_s, memory=memory, units=units)


def expand_quickly(outer: Outer, rows: Ints) -> tuple[Variants, Bounds]:
    """The variants of some shapes, with bounds that do not look at each rank."""
    found = variants(outer.space, rows)
    priced = _rows(outer, found)
    bounds = quick_bounds(outer.problem, priced, outer.capacity_bytes)
    least = np.maximum(bounds.memory_bytes, outer.bounds.memory_bytes[found.shape])
    return found, Bounds(
        time_s=np.maximum(bounds.time_s, outer.bounds.time_s[found.shape]), memory_bytes=least
    )


def exchange_bounds(outer: Outer, rows: Ints) -> Floats:
    """Seconds that no variant of these shapes whose state fits goes below, the least that gradients and parameters take to
    exchange among them: every level of ZeRO with the placement that suits it best, and chunks of any number of blocks."""
    space, least_s = outer.space, np.full(len(outer.space.shapes), np.inf)
    for kind in ("whole", "looped", "split"):
        plans = [plan for plan in space.schedules if _kind_of(plan) == kind]
        shapes = space.shapes.take(rows)
        planned = (
            rows[np.any([space.plan_fits(shapes, *plan) for plan in plans], axis=0)] if plans else rows[:0]
        )
        for zero in space.zeros if len(planned) else ():
            hit = planned[space.zero_fits(space.shapes.take(planned), zero)]
            bounds = quick_bounds(
                outer.problem, _least_rows(outer, hit, plans[0], zero), outer.capacity_bytes
            )
            least_s[hit] = np.minimum(least_s[hit], bounds.time_s)
    return np.asarray(np.maximum(least_s[rows], outer.bounds.time_s[rows]))


def _kind_of(plan: tuple[int, int]) -> str:
    """Schedules whose variants have bounds alike: the backward whole, one chunk a rank or several; or split."""
    schedule, chunks = plan
    if schedule >= len(WHOLE_BACKWARD):
        return "split"
    return "whole" if chunks == 1 else "looped"


def _least_rows(outer: Outer, hit: Ints, plan: tuple[int, int], zero: int) -> Rows:
    """For each shape a row that no variant with such a schedule and this level of ZeRO is below."""
    same, nothing = np.ones(len(hit), dtype=np.int64), np.zeros(len(hit))
    found = Variants(
        shape=hit, zero=zero * same, schedule=plan[0] * same, virtual_stages=plan[1] * same, order=0 * same,
        compression=0 * same,
    )  # fmt: skip
    reduce_s, gather_s = outer.wires.least(outer.space.shapes.mesh[hit], zero)
    wires = Wires(
        reduce_s=reduce_s, gather_s=nothing, gather_each_s=gather_s, step_s=nothing, reduce_expert_s=nothing,
        gather_expert_s=nothing, step_expert_s=nothing, send_s=nothing, tied_s=nothing,
    )  # fmt: skip
    sizes = None if _kind_of(plan) == "whole" else (0 * same, 0 * same, outer.space.repeated * same)
    return _rows(outer, found, wires=wires, sizes=sizes)


def bound_variants(
    outer: Outer, found: Variants, below_s: float, *, memory: bool = False, units: Units | None = None
) -> Bounds:
    """Bounds of variants: their communication is priced once per distinct setting."""
    rows = _rows(outer, found, units)
    bounds = variant_bounds(outer.problem, rows, outer.capacity_bytes, below_s, memory=memory)
    if outer.pace is None:
        return bounds
    return no_faster_than(bounds, rows.shapes, rows.units, outer.pace[:, found.shape])


def _rows(
    outer: Outer,
    found: Variants,
    units: Units | None = None,
    wires: Wires | None = None,
    sizes: tuple[Ints, Ints, Ints] | None = None,
) -> Rows:
    """Variants with their prices, and the numbers of blocks that their chunks may have (`_blocks_per_chunk`)."""
    shapes = outer.space.shapes.take(found.shape)
    constants = outer.book.device.constants
    wires = outer.wires.price(found) if wires is None else wires
    units = take_units(outer.units, found.shape) if units is None else units
    gather_s = wires.gather_s + wires.gather_expert_s * units.unit_experts
    least, ends, most = _blocks_per_chunk(outer, shapes.pp, found.virtual_stages) if sizes is None else sizes
    return Rows(
        shapes=shapes,
        units=units,
        zero=found.zero,
        schedule=found.schedule,
        chunks=found.virtual_stages,
        unit_reduce_s=wires.reduce_s * units.unit_trainable
        + wires.reduce_expert_s * units.unit_expert_trainable,
        all_reduce_s=wires.reduce_s * units.all_trainable
        + wires.reduce_expert_s * units.all_expert_trainable,
        unit_gather_s=gather_s,
        all_gather_s=np.maximum(
            outer.repeated * gather_s,
            wires.gather_each_s * units.all_parameters + wires.gather_expert_s * units.all_experts,
        ),
        unit_step_s=wires.step_s * units.unit_trainable + wires.step_expert_s * units.unit_expert_trainable,
        all_step_s=wires.step_s * units.all_trainable + wires.step_expert_s * units.all_expert_trainable,
        step_s=wires.step_s,
        send_s=wires.send_s,
        tied_s=wires.tied_s,
        repeated=outer.repeated,
        others=outer.space.repeated - outer.repeated,
        least_per_chunk=least,
        least_per_end=ends,
        most_per_chunk=most,
        slow=1.0 + constants.get("overlap.compute_slowdown", 0.0),
        slow_comm=1.0 + constants.get("overlap.comm_slowdown", 0.0),
        slower=None if outer.pace is None else 1.0 / outer.pace[:, found.shape],
        lacking_bytes=lacking_bytes(outer.problem),
    )


def _blocks_per_chunk(outer: Outer, pp: Ints, virtual_stages: Ints) -> tuple[Ints, Ints, Ints]:
    """As `planner.search.stages.sizes.chunk_sizes` deals: the fewest blocks of a chunk that is not at an end of the model,
    of one that is, and the most of any."""
    space, blocks = outer.space, outer.problem.fixed_ints("pipeline.stage_blocks")
    if blocks is not None:
        ends = min(blocks[0], blocks[-1])
        return tuple(np.full_like(pp, n) for n in (min(blocks[1:-1], default=0), ends, max(blocks)))  # type: ignore[return-value]
    chunks = pp * virtual_stages
    share, even = even_share(space.repeated, chunks, space.most_chunks)
    single = (virtual_stages == 1) | (space.repeated <= UNEVEN_CHUNKS_BLOCKS) | (outer.pace is not None)
    rest = space.repeated - (chunks - 2) * share - share
    least = np.where(single, 1, np.where(even, share, np.maximum(share - 1, 1)))
    ends = np.where(~single & even, np.maximum(rest, 0), np.maximum(least - 1, 0))
    most = np.where(single, space.repeated, np.maximum(share, 1))
    return least, ends, most
