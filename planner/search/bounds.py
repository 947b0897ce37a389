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
from autoparallel.planner.expand import state
from autoparallel.planner.expand.local import TENSOR_DTYPE
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.space import OPEN_SCHEDULES, SCHEDULES, Bools, Ints, Shapes, Space
from autoparallel.planner.search.tables import Floats, Units, take_units

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
    step_s: Floats  # optimizer and gather of updated parameters, per trainable parameter
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
        work_s = _work_s(part)
        top_s = np.maximum(work_s, below_s)
        open_ = fits & _dealt(part, ranks, np.where(np.isfinite(top_s), top_s, FOREVER), capacity_bytes)
        time_s[index] = np.where(fits, top_s, np.inf)
        if open_.any():
            kept = _take(part, np.flatnonzero(open_))
            inner = [_Rank(problem, kept, r, int(pp)) for r in range(int(pp))]
            time_s[index[open_]] = _least_time(kept, inner, capacity_bytes, top_s[open_])
    return Bounds(time_s=time_s, memory_bytes=least_bytes)


def _work_s(rows: Rows) -> Floats:
    """One micro-batch through the whole model, and an even share of all of them."""
    whole_s = rows.units.all_forward_s + rows.units.all_backward_s
    return np.maximum(whole_s, rows.shapes.micro_batches * whole_s / rows.shapes.pp)


def _take(rows: Rows, index: Ints) -> Rows:
    return Rows(
        shapes=rows.shapes.take(index), units=take_units(rows.units, index), zero=rows.zero[index],
        schedule=rows.schedule[index], chunks=rows.chunks[index], reduce_s=rows.reduce_s[index],
        gather_s=rows.gather_s[index], step_s=rows.step_s[index], repeated=rows.repeated, least_per_chunk=rows.least_per_chunk[index], slow=rows.slow, slow_comm=rows.slow_comm,
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
        single = plain & (rows.chunks == 1)
        step_s = np.where(single, rows.step_s, 0.0)
        ends = u.head_trainable * first + u.tail_trainable * last
        # fill, work, reduce and step; or fill, work, drain
        self.per_block_s = m * f + np.where(plain, (m - 1) * b + ended_s, m * gathered_s)
        self.per_block_s += step_s * u.unit_trainable
        self.base_s = own_s + np.where(plain, before * f, 0.0) + step_s * ends
        self.drained_per_block_s = m * f + np.where(plain, m * b, m * gathered_s)
        self.drained_base_s = own_s + np.where(plain, (0.0 if first else u.head_s) + before * (f + b), 0.0)
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
        least, most, held = _in_flight(word, rows, rank, pp)
        spread = rows.least_per_chunk * np.maximum(held - rows.chunks * least, 0)
        spread = np.maximum(
            spread - (most - least) * (rank in (0, pp - 1)), 0
        )  # an end chunk has one block less
        self.per_block_bytes = state_bytes + least * u.saved
        self.freed_bytes = most * (u.saved - u.least_saved)
        self.per_block_all_bytes = state_bytes + least * u.least_saved
        execution = problem.execution
        item = min(state.dtype_bytes(execution.param_dtype), ITEM_BYTES[TENSOR_DTYPE[execution.dtype]])
        gathered = np.where((rows.zero == 3) & (ranks > 1), item * u.unit_parameters, 0.0)
        whole = state.dtype_bytes(execution.grad_dtype) * u.unit_trainable
        reduced = np.where((rows.zero >= 2) & (ranks > 1), whole, 0.0)
        several = pp == 1 and rows.repeated > 2  # the next unit's parameters, the last one's gradients
        peak = np.maximum(u.peak, u.backward_peak + reduced) + gathered * (1 + several)
        if several:
            peak = np.maximum(peak, u.backward_peak + 2 * (reduced + gathered) - u.saved)
        # An end stage may hold glue alone: then no unit's peak stands on top.
        base = u.tail_peak if rank == pp - 1 else (peak if rank else np.zeros(len(m)))
        if pp == 1 and rows.repeated:
            base = np.maximum(peak, base)
        if rank == 0:
            base = base + u.head_parameters * rates.parameter + u.head_trainable * rates.trainable
            base = base + (least - 1) * u.head_saved
        if rank == pp - 1:
            base = base + u.tail_parameters * rates.parameter + u.tail_trainable * rates.trainable
            base = base + (least - 1) * u.tail_saved
        self.base_bytes, self.base_all_bytes = base + spread * u.saved, base + spread * u.least_saved

    def most_blocks(self, time_s: Floats, capacity_bytes: float | Floats) -> Floats:
        """The largest number of blocks that fits time and memory, recomputing as many as that takes."""
        room_s, room = time_s - self.base_s, capacity_bytes - self.base_bytes
        with np.errstate(divide="ignore", invalid="ignore"):
            n = np.minimum(
                room_s / self.per_block_s, (time_s - self.drained_base_s) / self.drained_per_block_s
            )
            again_s = (time_s - self.round_base_s) / self.round_per_block_s
            n = np.where(self.round_per_block_s > 0, np.minimum(n, again_s), n)
            # k = (n bytes - room) / freed, put into time: n (s + rec bytes / freed) <= room_s + rec room / freed
            again = np.where(self.freed_bytes > 0, self.recompute_s / self.freed_bytes, 0.0)
            with_recompute = (room_s + again * room) / (self.per_block_s + again * self.per_block_bytes)
            kept = room / self.per_block_bytes
            recomputed = (capacity_bytes - self.base_all_bytes) / self.per_block_all_bytes
        limit = np.minimum(np.maximum(with_recompute, kept), recomputed)
        limit = np.where(self.freed_bytes > 0, limit, kept)
        n = np.minimum(n, np.where(np.isnan(limit), np.inf, limit))
        return np.where((room_s < 0) | (capacity_bytes < self.base_all_bytes), -1.0, n)


def _in_flight(word: dict[str, Bools], rows: Rows, rank: int, pp: int) -> tuple[Ints, Ints, Ints]:
    """Micro-batches that a rank holds when its warm-up ends: of its fewest-held chunk, of its most-held one, and
    the sum over its chunks. 1F1B and its interleaved form take turns in rounds; other schedules hold one at least.
    """
    m, v = rows.shapes.micro_batches, rows.chunks
    plain = np.where(word["gpipe"], m, np.where(word["1f1b"], np.minimum(pp - rank, m), 1))
    round_ = m // np.maximum(1, m // pp)
    held = np.minimum((v - 1) * round_ + 2 * (pp - 1 - rank) + 1, v * m)
    turns, rest = held // (v * round_), held % (v * round_)
    most = turns * round_ + np.minimum(rest, round_)
    least = turns * round_ + np.maximum(rest - (v - 1) * round_, 0)
    looped = word["interleaved-1f1b"]
    return (
        np.where(looped, least, plain),
        np.where(looped, most, np.where(word["gpipe"] | word["1f1b"] | word["none"], plain, m)),
        np.where(looped, held, plain * v),
    )


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
    """The least time in which all blocks can be dealt (they can in `top_s`): no deal is faster."""
    low = _work_s(rows)
    done = _dealt(rows, ranks, low, capacity_bytes)
    low, high = np.where(done, 0.0, low), np.where(done, low, np.minimum(2 * low, top_s))
    early = done
    while not (done := _dealt(rows, ranks, high, capacity_bytes)).all():
        low, high = np.where(done, low, high), np.where(done, high, np.minimum(2 * high, top_s))
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
