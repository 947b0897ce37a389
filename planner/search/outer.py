"""The outer level of the search: columns of the space joined with prices, and their bounds."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil

import numpy as np

from autoparallel.costmodel.program import Axis, BlockWork
from autoparallel.planner.expand import state
from autoparallel.planner.expand.expander import MIB, Expander, mesh_axes, nearest_stride
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.bounds import Bounds, shape_bounds, variant_bounds
from autoparallel.planner.search.candidates import Candidate, candidate, strategy_of
from autoparallel.planner.search.deals import even_deal
from autoparallel.planner.search.evaluate import Evaluation
from autoparallel.planner.search.forms import Chain, units_of
from autoparallel.planner.search.inner import UNEVEN_CHUNKS_BLOCKS
from autoparallel.planner.search.prices import PriceBook, least_message_bytes
from autoparallel.planner.search.ranks import Rows
from autoparallel.planner.search.space import MESH_KEYS, Ints, Space, Variants, build_space, variants
from autoparallel.planner.search.tables import Floats, Units, placed_row, take_units, unit_table


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

    def excess_bytes(self, found: Evaluation) -> int:
        """Bytes that a simulated strategy has too many on the fullest pipeline rank."""
        return ceil(min(found.excess_bytes, found.peak_bytes - self.capacity_bytes))


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


def tensor_strides(outer: Outer, found: Variants) -> Ints:
    """Distance between neighbours along tp, as `planner.expand.nearest_stride` has it; 1 without tp."""
    columns, inverse = _axis_columns(outer, found, "tp")
    strides = [
        nearest_stride(Axis(name="tp", size=size, stride=stride), outer.problem.cluster) if size > 1 else 1
        for size, stride in columns
    ]
    return np.array(strides, dtype=np.int64)[inverse]


def _axis_columns(outer: Outer, found: Variants, name: str) -> tuple[list[tuple[int, int]], Ints]:
    """Size and stride of an axis in the distinct placed meshes of some variants, and which of them each has."""
    keys = outer.space.shapes.mesh[found.shape] * len(outer.space.meshes.orders) + found.order
    distinct, inverse = np.unique(keys, return_inverse=True)
    columns = []
    for key in distinct.tolist():
        mesh, order = divmod(key, len(outer.space.meshes.orders))
        sizes = dict(zip(MESH_KEYS, outer.space.meshes.sizes[mesh].tolist(), strict=True))
        names = outer.space.meshes.orders[order]
        inside = names[names.index(name) + 1 :]
        columns.append((sizes[name], int(np.prod([sizes[n] for n in inside] or [1]))))
    return columns, inverse.reshape(-1)


def _sends_s(outer: Outer, found: Variants) -> Floats:
    """Seconds of the shortest message between neighbouring stages."""
    shapes = outer.space.shapes.take(found.shape)
    columns, inverse = _axis_columns(outer, found, "pp")
    axes = np.array(columns, dtype=np.int64).reshape(-1, 2)[inverse]
    # Never fewer than `scatters_messages` has it.
    shared = (shapes.sequence_parallel > 0) | (outer.problem.execution.kernels == "fused")
    parts = shapes.cp * np.where(shared, shapes.tp, 1)
    keys = np.stack([axes[:, 0], axes[:, 1], shapes.micro, parts], axis=1)
    distinct, which = np.unique(keys, axis=0, return_inverse=True)
    seconds = [
        outer.book.send_s(
            (Axis(name="pp", size=pp, stride=stride),), least_message_bytes(outer.problem, micro, share)
        )
        if pp > 1
        else 0.0
        for pp, stride, micro, share in distinct.tolist()
    ]
    return np.array(seconds, dtype=np.float64)[which.reshape(-1)]


def refined_bounds(outer: Outer, found: Variants, stride: int, below_s: float, *, memory: bool) -> Bounds:
    """Bounds of variants of one shape's setting, priced with tensor parallelism `stride` devices apart."""
    row = placed_row(outer.problem, outer.chain, outer.book, outer.space.shapes, int(found.shape[0]), stride)
    columns = np.repeat(np.array([row], dtype=np.float64), len(found), axis=0)
    units = Units(**{f.name: columns[:, i] for i, f in enumerate(fields(Units))})
    return bound_variants(outer, found, below_s, memory=memory, units=units)


def bound_variants(
    outer: Outer, found: Variants, below_s: float, *, memory: bool = False, units: Units | None = None
) -> Bounds:
    """Bounds of variants: their communication is priced once per distinct setting."""
    shapes = outer.space.shapes.take(found.shape)
    constants = outer.book.device.constants
    keys = np.stack(
        [shapes.mesh, found.order, found.zero, found.compression, shapes.sequence_parallel], axis=1
    )
    distinct, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    del distinct
    wires = [_wire_s(outer, candidate(outer.space, found, int(i)), int(found.shape[i])) for i in first]
    columns = np.array(wires, dtype=np.float64).reshape(-1, 3)[inverse.reshape(-1)]
    least, most = _blocks_per_chunk(outer, shapes.pp, found.virtual_stages)
    rows = Rows(
        shapes=shapes,
        units=take_units(outer.units, found.shape) if units is None else units,
        zero=found.zero,
        schedule=found.schedule,
        chunks=found.virtual_stages,
        reduce_s=columns[:, 0],
        gather_s=columns[:, 1],
        step_s=columns[:, 2],
        send_s=_sends_s(outer, found),
        repeated=outer.space.repeated,
        least_per_chunk=least,
        most_per_chunk=most,
        slow=1.0 + constants.get("overlap.compute_slowdown", 0.0),
        slow_comm=1.0 + constants.get("overlap.comm_slowdown", 0.0),
    )
    return variant_bounds(outer.problem, rows, outer.capacity_bytes, below_s, memory=memory)


def _blocks_per_chunk(outer: Outer, pp: Ints, virtual_stages: Ints) -> tuple[Ints, Ints]:
    """As `planner.search.inner.chunk_sizes` deals: the fewest blocks of a chunk that is not at an end of the model,
    and the most of any."""
    repeated, blocks = outer.space.repeated, outer.problem.fixed_ints("pipeline.stage_blocks")
    if blocks is not None:
        return np.full_like(pp, min((*blocks[1:-1], 1))), np.full_like(pp, max(blocks))
    even = repeated // (pp * virtual_stages)
    uneven = (virtual_stages == 1) | (repeated <= UNEVEN_CHUNKS_BLOCKS)
    least = np.where(uneven, 1, np.maximum(even, 1))
    return least, np.where(uneven, repeated, even + 1)


def _wire_s(outer: Outer, chosen: Candidate, shape: int) -> tuple[float, float, float]:
    """Seconds to reduce the gradient of one parameter, to gather the parameters of the smallest unit, and to
    update one parameter and gather it again. Per parameter nothing is faster than more of them at once."""
    strategy = strategy_of(outer.problem, chosen, even_deal(len(outer.chain.kinds), chosen.chunks))
    axes, book, mode = mesh_axes(strategy), outer.book, strategy.execution.kernels
    whole = max(outer.problem.graph.parameter_count, 1)
    updates = state.optimizer_kernel(whole, strategy)
    step_s = sum(book.pricer.kernel_s(kernel, book.device, mode) for kernel in updates)
    step_s += sum(book.pricer.collective_s(c, axes) for c in state.updated_gather(whole, strategy))
    if chosen.mesh.data_parallel * chosen.mesh.cp == 1:
        return 0.0, 0.0, step_s / whole
    if state.zero_level(strategy) < 3:
        item = state.dtype_bytes(strategy.execution.grad_dtype)
        bucket = round(strategy.grad_sync.bucket_mib * MIB)
        return book.reduce_rate(strategy, axes, bucket) * item, 0.0, step_s / whole
    most = max(int(outer.units.most_trainable[shape]), 1)
    reduce_s = sum(book.pricer.collective_s(c, axes) for c in state.reduction_of(most, strategy)) / most
    parameters = int(outer.units.unit_parameters[shape])
    unit = BlockWork(name="unit", forward=(), backward_input=(), backward_weight=(), parameters=parameters)
    gather = state.gather_of(unit, strategy)
    gather_s = book.pricer.collective_s(gather, axes) if gather is not None else 0.0
    return reduce_s, gather_s, step_s / whole
