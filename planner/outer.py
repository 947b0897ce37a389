"""The outer level of the search: columns of the space joined with prices, and their bounds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoparallel.costmodel.program import BlockWork
from autoparallel.planner import state
from autoparallel.planner.bounds import Bounds, Rows, shape_bounds, variant_bounds
from autoparallel.planner.candidates import Candidate, candidate, even_deal, strategy_of
from autoparallel.planner.expand import MIB, Expander, mesh_axes
from autoparallel.planner.forms import Chain, units_of
from autoparallel.planner.inner import UNEVEN_CHUNKS_BLOCKS
from autoparallel.planner.prices import PriceBook
from autoparallel.planner.problem import Problem
from autoparallel.planner.space import Ints, Space, Variants, build_space, variants
from autoparallel.planner.tables import Units, take_units, unit_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """A problem's space with the price of every shape, and bounds of every shape."""

    problem: Problem
    space: Space
    chain: Chain
    book: PriceBook
    units: Units
    bounds: Bounds
    counts: Ints  # variants of each shape
    capacity_bytes: float


def outer_of(problem: Problem, expander: Expander | None = None) -> Outer | None:
    """Space, prices and bounds of a problem; None where no strategy is legal."""
    space = build_space(problem)
    if not len(space.shapes) or not space.counts().any():
        return None
    expander = expander or Expander(graph=problem.graph, cluster=problem.cluster)
    groups = problem.fixed_ints("mesh.groups")
    devices = [problem.cluster.groups[g].device for g in groups] if groups else [problem.cluster.device]
    fastest = max(devices, key=lambda d: max(d.peak_flops.values()))
    book = PriceBook(expander=expander, pricer=expander.pricer, device=fastest)
    capacity = min(d.memory_bytes - d.reserve_bytes for d in devices)
    return build_outer(problem, space, units_of(problem.graph), book, capacity)


def build_outer(
    problem: Problem, space: Space, chain: Chain, book: PriceBook, capacity_bytes: float
) -> Outer:
    """Price every shape of a space."""
    units = unit_table(problem, chain, book, space.shapes, capacity_bytes)
    return Outer(
        problem=problem, space=space, chain=chain, book=book, units=units, counts=space.counts(),
        bounds=shape_bounds(problem, space, units), capacity_bytes=capacity_bytes,
    )  # fmt: skip


def expand_shapes(
    outer: Outer, rows: Ints, below_s: float, *, memory: bool = False
) -> tuple[Variants, Bounds]:
    """The variants of some shapes, with their bounds (of bytes where `memory` asks for them)."""
    found = variants(outer.space, rows)
    return found, bound_variants(outer, found, below_s, memory=memory)


def bound_variants(outer: Outer, found: Variants, below_s: float, *, memory: bool = False) -> Bounds:
    """Bounds of variants: their communication is priced once per distinct setting."""
    shapes = outer.space.shapes.take(found.shape)
    constants = outer.book.device.constants
    keys = np.stack(
        [shapes.mesh, found.order, found.zero, found.compression, shapes.sequence_parallel], axis=1
    )
    distinct, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    del distinct
    wires = [
        _wire_s(outer, candidate(outer.space, found, int(i)), outer.units.unit_parameters[found.shape[i]])
        for i in first
    ]
    columns = np.array(wires, dtype=np.float64).reshape(-1, 2)[inverse.reshape(-1)]
    rows = Rows(
        shapes=shapes,
        units=take_units(outer.units, found.shape),
        zero=found.zero,
        schedule=found.schedule,
        chunks=found.virtual_stages,
        reduce_s=columns[:, 0],
        gather_s=columns[:, 1],
        repeated=outer.space.repeated,
        least_per_chunk=_least_per_chunk(outer, shapes.pp, found.virtual_stages),
        slow=1.0 + constants.get("overlap.compute_slowdown", 0.0),
        slow_comm=1.0 + constants.get("overlap.comm_slowdown", 0.0),
    )
    return variant_bounds(outer.problem, rows, outer.capacity_bytes, below_s, memory=memory)


def _least_per_chunk(outer: Outer, pp: Ints, virtual_stages: Ints) -> Ints:
    """As `planner.inner.chunk_sizes` deals the chunks that are not at an end of the model."""
    repeated, blocks = outer.space.repeated, outer.problem.fixed_ints("pipeline.stage_blocks")
    if blocks is not None:
        return np.full_like(pp, min((*blocks[1:-1], 1)))
    even = np.maximum(repeated // (pp * virtual_stages), 1)
    return np.where((virtual_stages > 1) & (repeated > UNEVEN_CHUNKS_BLOCKS), even, 1)


def _wire_s(outer: Outer, chosen: Candidate, unit_parameters: float) -> tuple[float, float]:
    """Seconds to reduce the gradient of one parameter, and to gather the parameters of the smallest unit."""
    if chosen.mesh.data_parallel * chosen.mesh.cp == 1:
        return 0.0, 0.0
    strategy = strategy_of(outer.problem, chosen, even_deal(len(outer.chain.kinds), chosen.chunks))
    axes, pricer = mesh_axes(strategy), outer.book.pricer
    if state.zero_level(strategy) < 3:
        item = state.dtype_bytes(strategy.execution.grad_dtype)
        bucket = round(strategy.grad_sync.bucket_mib * MIB)
        return outer.book.reduce_rate(strategy, axes, bucket) * item, 0.0
    whole = outer.problem.graph.parameter_count  # per parameter nothing smaller is faster
    reduce_s = sum(pricer.collective_s(c, axes) for c in state.reduction_of(whole, strategy)) / max(whole, 1)
    unit = BlockWork(
        name="unit", forward=(), backward_input=(), backward_weight=(), parameters=int(unit_parameters)
    )
    gather = state.gather_of(unit, strategy)
    return reduce_s, pricer.collective_s(gather, axes) if gather is not None else 0.0
