"""Lower bounds on step time and memory, for many strategies at once, before any block is dealt to a stage.

Every bound is true: no deal of blocks to stages, and no choice of recomputed blocks, gives a step that `score`
finds shorter, or a fullest device that it finds less full. Notation as in docs/planner.md: m micro-batches, p
ranks, n[r] blocks and k[r] recomputed ones on rank r, f and b seconds of a block, F and B of the whole model.

    work      fill[r] + m (f + b) n[r] + m rec k[r] + reduction and optimizer of n[r]    <= T
    round     F + B + (m - 1) b n[r] + (m - warm-up[r]) f n[r]                            <= T    (one chunk)
    memory    state n[r] + live[r] (saved n[r] - freed k[r]) + peak                      <= capacity
    all       sum floor(n[r]) >= N

The largest n[r] that these admit grows with T, so the least T is found by bisection, for all rows at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoparallel.costmodel.graph import ITEM_BYTES
from autoparallel.planner import state
from autoparallel.planner.local import TENSOR_DTYPE
from autoparallel.planner.problem import Problem
from autoparallel.planner.space import OPEN_SCHEDULES, SCHEDULES, Bools, Ints, Shapes, Space
from autoparallel.planner.tables import Floats, Units, take_units

HALVINGS = 14  # of the bracket in which a bound is found: a ten-thousandth of it is left
FOREVER = 1e18  # seconds; longer than any step
EPSILON = 1e-9  # numbers of blocks this close to a whole one are taken for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Seconds and bytes that no member of a row goes below; infinite where nothing fits."""

    time_s: Floats
    memory_bytes: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes of state per parameter and per trainable parameter."""

    parameter: Floats
    trainable: Floats


def state_rates(problem: Problem, zero: Ints, ranks: Ints) -> Rates:
    """Bytes per parameter (held, cast) and per trainable one (gradient, optimizer) under ZeRO over `ranks`."""
    execution = problem.execution
    held = state.dtype_bytes(execution.param_dtype)
    offloaded = problem.constraints.get("offload.optimizer", 0.0)
    kept = 1.0 - (float(offloaded) if isinstance(offloaded, (int, float)) else 0.0)
    stepped = state.optimizer_bytes_per_parameter(execution) * kept
    graded = state.dtype_bytes(execution.grad_dtype)
    return Rates(
        parameter=held / np.where(zero == 3, ranks, 1),
        trainable=graded / np.where(zero >= 2, ranks, 1) + stepped / np.where(zero >= 1, ranks, 1),
    )


def shape_bounds(problem: Problem, space: Space, units: Units) -> Bounds:
    """Bounds of each shape over all of its variants: no communication, the most sharded state."""
    shapes, n = space.shapes, max(space.repeated, 1)
    most = -(-n // shapes.pp)
    unit_s = units.unit_forward_s + units.unit_backward_s
    whole_s = units.all_forward_s + units.all_backward_s
    busiest_s = np.maximum(most * unit_s, whole_s / shapes.pp)
    ranks = shapes.dp_shard * shapes.cp
    best = max(space.zeros)
    rates = state_rates(problem, np.where(ranks > 1, best, 0), ranks)
    per_unit = units.unit_parameters * rates.parameter + units.unit_trainable * rates.trainable
    tail = units.tail_parameters * rates.parameter + units.tail_trainable * rates.trainable
    blocks = most if space.repeated else np.zeros_like(most)
    middle = blocks * (per_unit + units.least_saved) + units.peak
    # The last of several stages may be the tail alone.
    before = np.where(shapes.pp > 1, 0.0, n * (per_unit + units.least_saved))
    last = tail + before + units.tail_peak
    return Bounds(
        time_s=np.maximum(shapes.micro_batches * busiest_s, whole_s),
        memory_bytes=np.maximum(middle, last),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Variants with all that their bounds are made of."""

    shapes: Shapes
    units: Units
    zero: Ints
    schedule: Ints
    chunks: Ints  # per rank
    reduce_s: Floats  # per trainable parameter
    gather_s: Floats  # of a unit's parameters, ZeRO-3
    repeated: int
    least_per_chunk: Ints  # blocks of a chunk that is not at an end of the model
    slow: float  # 1 + compute_slowdown
    slow_comm: float


def variant_bounds(
    problem: Problem, rows: Rows, capacity_bytes: float, below_s: float, *, memory: bool
) -> Bounds:
    """Bounds of each variant; one that cannot be shorter than `below_s` is only known to be that long. Bytes are
    bounded where `memory` asks for it, else 0."""
    time_s, least_bytes = np.full(len(rows.zero), np.inf), np.zeros(len(rows.zero))
    for pp in np.unique(rows.shapes.pp):
        index = np.flatnonzero(rows.shapes.pp == pp)
        part = _take(rows, index)
        ranks = [_Rank(problem, part, r, int(pp)) for r in range(int(pp))]
        forever = np.full(len(index), FOREVER)
        fits = _dealt(part, ranks, forever, capacity_bytes)
        if memory:
            least_bytes[index] = _least_memory(part, ranks)
        top_s = _top(part, below_s)
        open_ = fits & _dealt(part, ranks, top_s, capacity_bytes)
        time_s[index] = np.where(fits, top_s, np.inf)
        if open_.any():
            kept = _take(part, np.flatnonzero(open_))
            inner = [_Rank(problem, kept, r, int(pp)) for r in range(int(pp))]
            time_s[index[open_]] = _least_time(kept, inner, capacity_bytes, top_s[open_])
    return Bounds(time_s=time_s, memory_bytes=least_bytes)


def _top(rows: Rows, below_s: float) -> Floats:
    """Where the search for the least time begins: at what it must stay below, or above any likely step."""
    work_s = _work_s(rows)
    if np.isfinite(below_s):
        return np.maximum(work_s, below_s)
    wires_s = rows.repeated * (rows.gather_s + rows.reduce_s * rows.units.unit_trainable)
    extra_s = wires_s + rows.repeated * rows.units.recompute_s
    return 4.0 * (work_s * rows.shapes.pp + rows.shapes.micro_batches * 2 * extra_s)


def _work_s(rows: Rows) -> Floats:
    """One micro-batch through the whole model, and an even share of all of them."""
    whole_s = rows.units.all_forward_s + rows.units.all_backward_s
    return np.maximum(whole_s, rows.shapes.micro_batches * whole_s / rows.shapes.pp)


def _take(rows: Rows, index: Ints) -> Rows:
    return Rows(
        shapes=rows.shapes.take(index), units=take_units(rows.units, index), zero=rows.zero[index],
        schedule=rows.schedule[index], chunks=rows.chunks[index], reduce_s=rows.reduce_s[index],
        gather_s=rows.gather_s[index], repeated=rows.repeated, least_per_chunk=rows.least_per_chunk[index], slow=rows.slow, slow_comm=rows.slow_comm,
    )  # fmt: skip


class _Rank:
    """Coefficients of one pipeline rank: time and bytes are linear in its blocks n and recomputed blocks k."""

    def __init__(self, problem: Problem, rows: Rows, rank: int, pp: int) -> None:
        self._time(rows, rank, pp)
        self._memory(problem, rows, rank, pp)

    def _time(self, rows: Rows, rank: int, pp: int) -> None:
        shapes, u, m = rows.shapes, rows.units, rows.shapes.micro_batches
        first, last = rank == 0, rank == pp - 1
        gain = max(1.0 / rows.slow + 1.0 / rows.slow_comm - 1.0, 0.0)
        more, less = max(1.0 - rows.slow_comm * gain, 0.0), max(1.0 - rows.slow * gain, 0.0)
        f = _beside(u.unit_forward_s, rows.gather_s, more, less)
        gathered_s = _beside(u.unit_backward_s, rows.gather_s, more, less)
        ended_s = _beside(u.unit_backward_s, rows.gather_s + rows.reduce_s * u.unit_trainable, more, less)
        b = np.where(rows.zero >= 2, ended_s, gathered_s)
        plain = rows.schedule < len(OPEN_SCHEDULES)  # the backward is whole
        before = np.maximum(
            rank * rows.least_per_chunk - 1, 0
        )  # blocks in the stages before: the first may have one less
        own_s = shapes.micro_batches * (u.head_s * first + u.tail_s * last)
        # fill, work, reduce and step; or fill, work, drain
        self.per_block_s = m * f + np.where(plain, (m - 1) * b + ended_s, m * gathered_s)
        self.base_s = own_s + np.where(plain, before * f, 0.0)
        self.drained_per_block_s = m * f + np.where(plain, m * b, m * gathered_s)
        self.drained_base_s = own_s + np.where(plain, (0.0 if first else u.head_s) + before * (f + b), 0.0)
        single = plain & (rows.chunks == 1)
        gpipe = rows.schedule == SCHEDULES.index("gpipe")
        warm = np.where(gpipe, 1, np.minimum(pp - rank, m))
        self.round_per_block_s = np.where(single, (m - 1) * b + (m - warm) * f, 0.0)
        self.round_base_s = np.where(single, u.all_forward_s + u.all_backward_s, 0.0)
        self.recompute_s = m * u.recompute_s

    def _memory(self, problem: Problem, rows: Rows, rank: int, pp: int) -> None:
        shapes, u, m = rows.shapes, rows.units, rows.shapes.micro_batches
        ranks = shapes.dp_shard * shapes.cp
        rates = state_rates(problem, np.where(ranks > 1, rows.zero, 0), ranks)
        state_bytes = u.unit_parameters * rates.parameter + u.unit_trainable * rates.trainable
        word = {name: rows.schedule == SCHEDULES.index(name) for name in OPEN_SCHEDULES}
        ahead = np.where(word["1f1b"], pp - rank, 1)
        ahead = np.where(word["interleaved-1f1b"], min(pp, 2 * (pp - 1 - rank) + 1), ahead)
        self.live = np.where(word["gpipe"], m, np.minimum(ahead, m))  # micro-batches of its fewest-held chunk
        self.per_block_bytes = state_bytes + self.live * u.saved
        self.freed_bytes = self.live * (u.saved - u.least_saved)
        execution = problem.execution
        item = min(state.dtype_bytes(execution.param_dtype), ITEM_BYTES[TENSOR_DTYPE[execution.dtype]])
        gathered = np.where((rows.zero == 3) & (ranks > 1), item * u.unit_parameters, 0.0)
        whole = state.dtype_bytes(execution.grad_dtype) * u.unit_trainable
        reduced = np.where((rows.zero >= 2) & (ranks > 1), whole, 0.0)
        peak = np.maximum(u.peak, u.backward_peak + reduced) + gathered
        # An end stage may hold glue alone: then no unit's peak stands on top.
        base = u.tail_peak if rank == pp - 1 else (peak if rank else np.zeros(len(m)))
        if pp == 1 and rows.repeated:
            base = np.maximum(peak, base)
        if rank == 0:
            base = base + u.head_parameters * rates.parameter + u.head_trainable * rates.trainable
            base = base + (self.live - 1) * u.head_saved
        if rank == pp - 1:
            base = base + u.tail_parameters * rates.parameter + u.tail_trainable * rates.trainable
            base = base + (self.live - 1) * u.tail_saved
        self.base_bytes = base

    def most_blocks(self, time_s: Floats, capacity_bytes: float | Floats) -> Floats:
        """The largest number of blocks that fits time and memory, recomputing as many as that takes."""
        room_s, room = time_s - self.base_s, capacity_bytes - self.base_bytes
        with np.errstate(divide="ignore", invalid="ignore"):
            n = np.minimum(
                room_s / self.per_block_s, (time_s - self.drained_base_s) / self.drained_per_block_s
            )
            n = np.minimum(n, (time_s - self.round_base_s) / self.round_per_block_s)
            # k = (n bytes - room) / freed, put into time: n (s + rec bytes / freed) <= room_s + rec room / freed
            again = np.where(self.freed_bytes > 0, self.recompute_s / self.freed_bytes, 0.0)
            with_recompute = (room_s + again * room) / (self.per_block_s + again * self.per_block_bytes)
            kept = room / self.per_block_bytes
            recomputed = room / (self.per_block_bytes - self.freed_bytes)
        limit = np.minimum(np.maximum(with_recompute, kept), recomputed)
        limit = np.where(self.freed_bytes > 0, limit, kept)
        n = np.minimum(n, np.where(np.isnan(limit), np.inf, limit))
        return np.where((room_s < 0) | (room < 0), -1.0, n)


def _beside(compute: Floats, communicate: Floats, more: float, less: float) -> Floats:
    """Seconds of both on two streams at least: `planner.forms.PricedChain.beside`."""
    return np.maximum(compute + more * communicate, communicate + less * compute)


def _dealt(rows: Rows, ranks: list[_Rank], time_s: Floats, capacity: float | Floats) -> Bools:
    """Whether every block can be dealt: each rank has at least its chunks, and all of them enough."""
    total, fits = np.zeros(len(time_s)), np.ones(len(time_s), dtype=np.bool_)
    for number, rank in enumerate(ranks):
        least = (rows.chunks if rows.repeated else 0) - (number in (0, len(ranks) - 1)) * (len(ranks) > 1)
        n = np.fmin(rank.most_blocks(time_s, capacity) * (1 + EPSILON) + EPSILON, rows.repeated + 1.0)
        n = np.floor(np.maximum(n, -1.0))
        fits &= n >= least
        total += n
    return np.asarray(fits & (total >= rows.repeated))


def _least_time(rows: Rows, ranks: list[_Rank], capacity_bytes: float, top_s: Floats) -> Floats:
    """The least time in which all blocks can be dealt, `top_s` at most: no deal is faster."""
    low, high = _work_s(rows), top_s
    early = _dealt(rows, ranks, low, capacity_bytes)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        done = _dealt(rows, ranks, middle, capacity_bytes)
        high, low = np.where(done, middle, high), np.where(done, low, middle)
    return np.where(early, _work_s(rows), low)


def _least_memory(rows: Rows, ranks: list[_Rank]) -> Floats:
    """The least capacity under which all blocks can be dealt, however long the step takes."""
    size = len(rows.zero)
    forever = np.full(size, FOREVER)
    low, high = np.zeros(size), np.ones(size)
    while not (done := _dealt(rows, ranks, forever, high)).all():
        high = np.where(done, high, high * 4)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        done = _dealt(rows, ranks, forever, middle)
        high, low = np.where(done, middle, high), np.where(done, low, middle)
    return low
