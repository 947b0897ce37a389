"""Pipeline ranks in the bounds: how many layer groups each can hold in a given time and memory, for many variants at once.

With n layer groups on rank r, k of them recomputed, m micro-batches, and seconds f, b of a layer group's forward and
backward:

    work      fill[r] + m (f + b) n + m rec k + reduction and optimizer of n             <= T
    drained   fill[r] + m (f + b) n + m rec k + drain[r]                                 <= T
    round     F + B + (m - 1) b n + (m - warm-up[r]) f n + m rec k                       <= T    (one chunk)
    memory    state n + saved M(n) - freed R(k) + peak                                   <= capacity

fill and drain are one micro-batch through the stages before r and the messages between them; M(n) is the least that
n layer groups of the rank's chunks weigh when each is counted as often as its chunk is in flight, R(k) the most of that
which k of them free. Of k rec only what communication does not hide (`rows.hidden`) counts. Every term is one that no partition of blocks to stages goes below. Arrays are [rank, variant] or [variant].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoparallel.costmodel.graph import ITEM_BYTES
from autoparallel.planner.expand import state
from autoparallel.planner.expand.local import TENSOR_DTYPE
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.bounds.ends import Awaited, InLine, Passed, least_of_stages
from autoparallel.planner.search.bounds.flight import InFlight, deferred_weights, in_flight, weights_share
from autoparallel.planner.search.bounds.hosts import host_room
from autoparallel.planner.search.bounds.messages import Messages
from autoparallel.planner.search.bounds.rows import EPSILON, Rows, hidden, passes
from autoparallel.planner.search.bounds.tables import PriceTable
from autoparallel.planner.search.space.build import SCHEDULES
from autoparallel.planner.search.space.meshes import Bools, Floats, Ints
from autoparallel.planner.search.space.shapes import Shapes

ROUNDS = 4  # of looking whether one block less is enough


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes of state per parameter and per trainable parameter all through a step; and those that come and go in a step of one
    micro-batch: parameters that are there while a pass may need them, gradients once they are made."""

    parameter: Floats
    trainable: Floats
    passing: Floats
    made: Floats


def state_rates(
    problem: Problem, zero: Ints, ranks: Ints, offloaded: Floats, several: Bools, makes: Bools
) -> Rates:
    """Bytes per parameter (held, cast) and per trainable one (gradient, optimizer) under ZeRO over `ranks`, with a share
    of the optimizer's state `offloaded` on the host; `several`: micro-batches; `makes`: gradients are there when they are made.
    As `planner.expand.state` has them."""
    execution = problem.execution
    held = state.dtype_bytes(execution.param_dtype)
    stepped = state.optimizer_bytes_per_parameter(execution) * (1.0 - offloaded)
    graded = state.dtype_bytes(execution.grad_dtype)
    gradient, parameter = graded / np.where(zero >= 2, ranks, 1), held / np.where(zero == 3, ranks, 1)
    passing = np.zeros(len(zero))
    if execution.fsdp2:
        whole = min(held, ITEM_BYTES[TENSOR_DTYPE[execution.dtype]])
        gathered = (zero == 1) | (zero == 2)
        passing = np.where(gathered & ~several, whole, 0.0)
        parameter = np.where(gathered, held / ranks + whole - passing, parameter)
        gradient = np.where(zero == 1, np.where(several, graded, graded / ranks), gradient)
    made = np.where(makes, gradient, 0.0)
    trainable = gradient - made + stepped / np.where(zero >= 1, ranks, 1)
    return Rates(parameter=parameter, trainable=trainable, passing=passing, made=made)


def rates_of(problem: Problem, shapes: Shapes, zero: Ints) -> tuple[Rates, Rates]:
    """Rates of parameters that all ranks of dp_shard * cp hold alike, and of experts under ep > 1."""
    execution, several = problem.execution, shapes.micro_batches > 1
    ranks = shapes.dp_shard * shapes.cp
    level = np.where(ranks > 1, zero, 0)
    alike = np.maximum(ranks * shapes.tp // shapes.ep, 1)
    alone = (shapes.dp_replicate == 1) & ((level > 0) | (ranks == 1))
    makes = alone & ~several & (execution.fsdp2 and execution.param_dtype == execution.grad_dtype)
    return (
        state_rates(problem, level, ranks, shapes.optimizer_offloaded, several, makes),
        state_rates(
            problem, np.where(alike > 1, level, 0), alike, shapes.optimizer_offloaded, several, makes
        ),
    )


def all_state_bytes(problem: Problem, shapes: Shapes, table: PriceTable, zero: Ints) -> Floats:
    """State of the whole model, of which the fullest rank holds its share at least: where all gradients are made, or all
    parameters there that come and go."""
    rates, expert_rates = rates_of(problem, shapes, zero)
    held = (
        table.all_parameters * rates.parameter
        + table.all_trainable * rates.trainable
        + table.all_experts * expert_rates.parameter
        + table.all_expert_trainable * expert_rates.trainable
    )
    if not problem.execution.fsdp2:
        return np.asarray(held)
    with np.errstate(invalid="ignore"):  # a shape that is no strategy holds infinitely much
        passing = table.all_parameters * rates.passing + table.all_experts * expert_rates.passing
        made = table.all_trainable * rates.made + table.all_expert_trainable * expert_rates.made
    return np.asarray(np.where(np.isfinite(held), held + np.maximum(passing, made), held))


class RankBounds:
    """Coefficients of all pipeline ranks of variants with as many: time and bytes are linear in a rank's blocks n and
    recomputed blocks k."""

    def __init__(self, problem: Problem, rows: Rows, pp: int) -> None:
        rank = np.arange(pp)[:, None]
        self.first: Bools = np.asarray(rank == 0)
        self.last: Bools = np.where(rows.v_shaped, rank == 0, rank == pp - 1)
        self.ends = (self.first.astype(np.int64) + self.last) * (pp > 1)
        fewer = rows.least_per_chunk - rows.least_per_end
        least = rows.chunks * rows.least_per_chunk - self.ends * fewer - rows.others
        self.least = np.maximum(least, 0) * bool(rows.repeated)
        self.most = np.minimum(rows.chunks * rows.most_per_chunk, rows.repeated)
        self.waits = bool(pp > 1 and (rows.chunks == 1).any())
        self._time(rows, rank, pp)
        self._memory(problem, rows, rank, pp)

    def _time(self, rows: Rows, rank: Ints, pp: int) -> None:
        u, m, plain = rows.table, rows.shapes.micro_batches, rows.plain
        first, last = self.first, self.last
        others_f, _, _, others_b = passes(rows, 1.0)  # of layer groups on other ranks
        slower = 1.0 if rows.slower is None else rows.slower[:pp]
        f, _, ended_s, b = passes(rows, slower)
        alone = rows.chunks == 1
        single = plain & alone
        own_s = m * (u.head_s * first + u.tail_s * last)
        sent = Messages.of(rows)
        before, sends_s = rows.before(rank), sent.together_s(rank)
        fill_s = before * others_f + sends_s
        # What each further layer group on the ranks before adds: of several chunks it may stand in any.
        self.before, self.fill_s, self.drain_s = before, single * others_f, single * others_b
        step_s, tied_s = rows.step_s, np.where(plain, rows.tied_s, 0.0)
        ends = u.head_trainable * first + u.tail_trainable * last
        # Of several chunks only the reduction of the first, which is the last to end, is surely not hidden.
        shown = alone | rows.apart
        final_s = np.where(shown, ended_s, b)
        exposed_s = np.where(plain & ~shown, (ended_s - b) * rows.first_chunk(rank), 0.0)
        self.per_block_s = m * f + (m - 1) * b + final_s + rows.group_step_s
        self.hides_s, self.hides_once_s = hidden(rows, slower), exposed_s
        self.least_per_block_s = np.array(np.atleast_2d(self.per_block_s - self.hides_s).min(axis=0))
        self.base_s = own_s + fill_s + np.where(plain, exposed_s, 0.0) + step_s * ends
        self.base_s += np.maximum(tied_s * first, rows.summed_s)
        stepped_s, reduces = least_of_stages(rows, rank, pp)
        left_least_s = rows.reduce_least_s * reduces
        every_s = left_least_s * np.where((rows.zero == 2) & alone, m, 1)
        self.base_s += stepped_s + every_s + rows.reduce_s * ends * rows.apart
        at_end_s = stepped_s + step_s * ends + rows.summed_s
        self.in_line = InLine.of(rows, rank, slower, reduces & alone, fill_s + at_end_s)
        self.passed = Passed.of(rows, rank, sent, left_least_s * alone + at_end_s)
        self._drain(rows, slower, (f, b), (others_f, others_b), sends_s)
        gpipe = rows.schedule == SCHEDULES.index("gpipe")
        warm = np.where(gpipe, 1, np.minimum(pp - rank, m))
        whole_s = u.all_forward_s + u.all_backward_s + 2 * sent.together_s(np.full(len(m), pp - 1))
        self.round_per_block_s = np.where(single, (m - 1) * b + (m - warm) * f, 0.0)
        self.round_base_s = np.where(single, whole_s + rows.ending_s(), 0.0)
        # Its first backward waits for one micro-batch's way through all stages, of a single chunk for its way back, too; then
        # the rank has all of its backwards before it, and the forwards that its warm-up has left over.
        flight = in_flight(rows.schedule, rows.chunks, m, rank, pp)
        self.late_per_block_s = m * b + (m - flight.most) * f + rows.group_step_s
        self.late_base_s = u.all_forward_s + step_s * ends + np.where(last, u.tail_s - u.tail_forward_s, 0.0)
        self.late_base_s += stepped_s + every_s
        self.late_s = np.where(alone, u.group_input_s, 0.0)  # for each layer group on the ranks behind
        # What is left of the reductions after the last backwards beside which they run stands in line on the rank's link.
        beside_s = np.where(plain, u.group_backward_s, u.group_weight_s) * (rows.slow / rows.slow_comm)
        left_s = np.where(rows.zero >= 2, 0.0, np.maximum(rows.group_reduce_s - beside_s, 0.0))
        # No chunk's last backward starts before every micro-batch has passed all stages.
        self.reduced_per_block_s = m * f + left_s + rows.group_step_s
        head_left_s, tail_left_s = rows.ends_left_s()
        reduced_s = step_s * ends + head_left_s * first + tail_left_s * last + stepped_s + left_least_s
        self.reduced_base_s = fill_s + reduced_s
        computed = self.base_s - fill_s, self.per_block_s
        self.awaited = Awaited.of(rows, rank, slower, sent, computed, (reduced_s, self.reduced_per_block_s))
        self.recompute_s = m * u.recompute_s

    def _drain(
        self, rows: Rows, slower: Floats | float, own: tuple[Floats, Floats], others: tuple[Floats, Floats], sends_s: Floats,
    ) -> None:  # fmt: skip
        """After its last backward the stages before have theirs, of which a split one need not wait for weight gradients."""
        u, m, plain, first = rows.table, rows.shapes.micro_batches, rows.plain, self.first
        (f, b), (others_f, others_b) = own, others
        back, others_back = (
            np.where(plain, whole, rows.beside(u.group_input_s * pace, rows.group_regather_s))
            for whole, pace in ((b, slower), (others_b, 1.0))
        )
        head_s, tail_s = (
            np.where(plain, whole, forward + inputs)
            for whole, forward, inputs in (
                (u.head_s, u.head_forward_s, u.head_input_s), (u.tail_s, u.tail_forward_s, u.tail_input_s),
            )
        )  # fmt: skip
        self.drained_per_block_s = m * (f + back)
        self.drained_base_s = m * (head_s * first + tail_s * self.last) + np.where(first, 0.0, head_s)
        self.drained_base_s += self.before * (others_f + others_back) + 2 * sends_s + rows.ending_s()

    def _memory(self, problem: Problem, rows: Rows, rank: Ints, pp: int) -> None:
        u, (rates, expert_rates) = rows.table, rates_of(problem, rows.shapes, rows.zero)
        # Its fullest moment, when the last layer group begins to go back: no gradient is made yet, no parameter has gone but
        # the tail's.
        held, expert_held = (one.parameter + one.passing for one in (rates, expert_rates))
        state_bytes = u.group_parameters * held + u.group_trainable * rates.trainable
        state_bytes += u.group_experts * expert_held
        state_bytes += u.group_expert_trainable * expert_rates.trainable
        scheduled = rows.schedule, rows.chunks, rows.shapes.micro_batches, rank, pp
        deferred = deferred_weights(*scheduled)
        begun = in_flight(*scheduled)
        self.hosts = host_room(problem, rows, begun.least)
        flight = begun.with_weights(deferred, weights_share(u), rows.chunks)
        spread = rows.least_per_chunk * np.maximum(flight.all - rows.chunks * flight.least, 0)
        fewer = rows.least_per_chunk - rows.least_per_end
        spread = np.maximum(spread - fewer * (flight.most - flight.least) * self.ends, 0)
        freed = u.saved - u.least_saved
        self.per_block_bytes = state_bytes + flight.least * u.saved
        self.freed_bytes = flight.most * freed
        self.per_block_all_bytes = state_bytes + flight.least * u.least_saved
        # Layer groups are counted in the chunk that is least in flight, but for those that every chunk must have.
        part = np.where(rows.others, 0, rows.least_per_chunk)
        self.freed_least_bytes = flight.least * freed
        self.freeing = (
            (self.freed_bytes, part * flight.whole),
            (flight.part * freed, part),
            (self.freed_least_bytes, None),
        )
        gathered, reduced = _moving_bytes(problem, rows)
        peak = self._base_bytes(rows, pp, gathered, reduced)
        base = peak + self._end_bytes(rows, rates, begun)
        # A rank with a layer group of the kinds that count runs it on top of what all of these save; of several chunks
        # the fullest moment may be another one's.
        own = np.maximum(rows.peaks("counted_peak"), rows.peaks("counted_backward_peak") + reduced) + gathered
        self.running_bytes = np.maximum(own - peak, 0.0) * (bool(rows.repeated) & (rows.chunks == 1))
        if rows.lacking_bytes:
            base = base + np.array(rows.lacking_bytes)[:, None]
        # Where other kinds may be what fills a chunk, no layer group is counted on to keep more than the least of any kind.
        self.base_bytes = base + spread * (u.any_least_saved if rows.others else u.saved)
        self.base_all_bytes = base + spread * (u.any_least_saved if rows.others else u.least_saved)

    def _base_bytes(self, rows: Rows, pp: int, gathered: Floats, reduced: Floats) -> Floats:
        """The peak of one action above what is held."""
        u, backward, tail_peak = rows.table, rows.peaks("backward_peak"), rows.peaks("tail_peak")
        several = pp == 1 and rows.repeated > 2  # the next layer group's parameters, the last one's gradients
        peak = np.maximum(rows.peaks("peak"), backward + reduced) + gathered * (1 + several)
        if several:
            peak = np.maximum(peak, backward + 2 * (reduced + gathered) - u.saved)
        if pp == 1 and rows.repeated:
            return np.asarray(np.maximum(peak, tail_peak))
        # An end stage may hold glue alone: then no layer group's peak stands on top.
        inside = np.where(self.first, 0.0, peak)
        return np.asarray(np.where(self.last, tail_peak, inside), dtype=np.float64)

    def _end_bytes(self, rows: Rows, rates: Rates, flight: InFlight) -> Floats:
        """State of the ends of the model, and what they keep of micro-batches in flight."""
        u = rows.table
        head = u.head_parameters * rates.parameter + u.head_trainable * rates.trainable
        tail = u.tail_parameters * rates.parameter + u.tail_trainable * rates.trainable
        again = flight.least - 1
        return np.asarray(
            np.where(self.first, head + again * u.head_saved, 0.0)
            + np.where(self.last, tail + again * u.tail_saved, 0.0)
        )

    def divided(self, repeated: int, time_s: Floats, room: Room) -> Bools:
        """Whether every block can be divided: each rank has at least its chunks, and all of them enough.

        What the ranks from one on cannot hold stands before it, which is what it waits for.
        """
        further: Floats | int = 0
        behind: Floats | int = 0
        with np.errstate(divide="ignore", invalid="ignore"):
            n = self.most_blocks(time_s, room, further, behind)
            for _ in range(ROUNDS if self.waits else 0):
                some = np.maximum(n, 0.0)
                before = np.maximum(repeated - np.cumsum(some[::-1], axis=0)[::-1] - self.before, 0)
                after = np.maximum(repeated - np.cumsum(some, axis=0), 0)
                if (before <= further).all() and (after <= behind).all():
                    break
                further, behind = before, after
                n = self.most_blocks(time_s, room, further, behind)
            n = self.passed.most_blocks(time_s, n) if len(n) > 1 else n
        found = (n >= self.least).all(axis=0) & (n.sum(axis=0) >= repeated)
        if self.hosts is not None:
            spare_s = time_s - self.base_s + self.hides_once_s
            found &= self.hosts.hold(repeated, n, spare_s, self.least_per_block_s)
        return np.asarray(found)

    def room(self, capacity_bytes: float | Floats) -> Room:
        """What a capacity leaves every rank."""
        free = capacity_bytes - self.base_bytes - self.running_bytes
        none = capacity_bytes < self.base_all_bytes
        free_all = capacity_bytes - self.base_all_bytes - self.running_bytes
        frees, frees_least = self.freed_bytes > 0, self.freed_least_bytes > 0
        with np.errstate(divide="ignore", invalid="ignore"):
            kept, kept_all = free / self.per_block_bytes, free_all / self.per_block_bytes
            most = np.where(frees, free_all / self.per_block_all_bytes, kept)
            again_s = np.where(frees, self.recompute_s / self.freed_bytes, 0.0)
            again_least_s = np.where(frees_least, self.recompute_s / self.freed_least_bytes, 0.0)
        return Room(
            free=free, free_all=free_all, none=none, kept=kept, kept_all=np.where(frees_least, kept_all, np.inf),
            most=most, again_s=again_s, again_least_s=again_least_s,
        )  # fmt: skip

    def most_blocks(
        self, time_s: Floats, room: Room, further: Floats | int = 0, behind: Floats | int = 0
    ) -> Floats:
        """No fewer blocks than fit time and memory, recomputing as many as that takes; -1 where none do. `further`:
        layer groups on the ranks before, beside those that surely stand there; `behind`: layer groups on the ranks
        after."""
        base_s = self.base_s + further * self.fill_s
        drained_base_s = self.drained_base_s + further * (self.fill_s + self.drain_s)
        room_s = time_s - base_s
        n = np.minimum(room_s / self.per_block_s, (time_s - drained_base_s) / self.drained_per_block_s)
        round_s = (time_s - self.round_base_s) / self.round_per_block_s
        n = np.where(self.round_per_block_s > 0, np.minimum(n, round_s), n)
        n = np.minimum(n, (time_s - self.reduced_base_s) / self.reduced_per_block_s)
        n = np.minimum(n, self.in_line.most_blocks(time_s - further * self.fill_s))
        n = np.minimum(n, self.awaited.most_blocks(time_s))
        late_base_s = self.late_base_s + behind * self.late_s
        n = np.minimum(n, (time_s - late_base_s) / self.late_per_block_s)
        limit = room.most
        # k = (n bytes - room) / freed, put into time: n (s + rec bytes / freed) <= room_s + rec room / freed
        for free, kept, again_s in (
            (room.free, room.kept, room.again_s), (room.free_all, room.kept_all, room.again_least_s),
        ):  # fmt: skip
            spare_s = room_s + self.hides_once_s + again_s * free
            each_s = self.per_block_s - self.hides_s + again_s * self.per_block_bytes
            with_recompute = np.where(each_s > 0, spare_s / each_s, np.inf)  # else all of it may be hidden
            limit = np.minimum(limit, np.maximum(with_recompute, kept))
        limit = np.where((limit < 0) & ~room.none, 0.0, limit)  # none of these, which needs no room for one
        n = np.minimum(n, np.where(np.isnan(limit), np.inf, limit))
        n = np.where((room_s < 0) | (time_s < late_base_s) | room.none, -1.0, n)
        n = np.floor(np.clip(n * (1 + EPSILON) + EPSILON, -1.0, self.most))
        return self._whole_blocks(n, time_s, room.free, base_s, drained_base_s)

    def _whole_blocks(
        self, n: Floats, time_s: Floats, free: Floats, base_s: Floats, drained_base_s: Floats
    ) -> Floats:
        """Fewer, where that many do not fit once the recomputed ones are counted as whole blocks."""
        limit_s = time_s * (1 + EPSILON)
        for _ in range(ROUNDS):
            lacking_bytes = n * self.per_block_bytes - free
            if not ((lacking_bytes > 0) & (n > 0)).any():
                break
            again = self._recomputed(lacking_bytes)
            late_s = np.maximum(self.recompute_s * again - n * self.hides_s - self.hides_once_s, 0.0)
            late = (base_s + n * self.per_block_s + late_s > limit_s) | (again > n)
            late |= drained_base_s + n * self.drained_per_block_s + late_s > limit_s
            late |= self.round_base_s + n * self.round_per_block_s + late_s > limit_s
            late &= n > 0
            if not late.any():
                break
            n = n - late
        return n

    def _recomputed(self, lacking_bytes: Floats) -> Floats:
        """The fewest blocks whose recomputation frees so many bytes, those of the fullest chunks first."""
        found: Floats | float = 0.0
        left = lacking_bytes * (1 - EPSILON)
        for freed, most in self.freeing:
            need = np.where(left > 0, np.ceil(left / freed - EPSILON), 0.0)
            if most is None:  # the last ones, as many as it takes
                return np.asarray(found + np.where(freed > 0, need, np.where(left > 0, np.inf, 0.0)))
            here = np.minimum(np.where(freed > 0, need, 0.0), most)
            found, left = found + here, left - here * freed
        raise AssertionError(self.freeing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a capacity leaves a rank, [rank, variant]: bytes beside what it holds without a block, whether there are too
    few even for that, how many blocks it holds with none recomputed and with all that can be, and what each byte that
    recomputation frees takes. `_all`: where the layer groups that every chunk must have are recomputed, and each further
    one frees the `_least`, as in the chunk that is least in flight, where it was counted."""

    free: Floats
    free_all: Floats
    none: Bools
    kept: Floats
    kept_all: Floats  # infinite where recomputation frees nothing there
    most: Floats
    again_s: Floats
    again_least_s: Floats


def _moving_bytes(problem: Problem, rows: Rows) -> tuple[Floats, Floats]:
    """Parameters of a layer group gathered to run it, and whole gradients of one on their way to a reduction."""
    u, execution = rows.table, problem.execution
    # One parameter at a time; or as a unit of FSDP2, in whose own peaks both are (`planner.expand.units`).
    if execution.parameter_gathers or execution.fsdp2:
        return np.zeros(len(rows.zero)), np.zeros(len(rows.zero))
    sharded = rows.shapes.dp_shard * rows.shapes.cp > 1
    item = min(state.dtype_bytes(execution.param_dtype), ITEM_BYTES[TENSOR_DTYPE[execution.dtype]])
    whole = state.dtype_bytes(execution.grad_dtype) * u.group_trainable
    return (
        np.where((rows.zero == 3) & sharded, item * u.group_parameters, 0.0),
        np.where((rows.zero >= 2) & sharded, whole, 0.0),
    )
