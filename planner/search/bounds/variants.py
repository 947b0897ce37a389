"""Lower bounds on step time and memory, for many strategies at once, before any block is divided to a stage.

Every bound is true: no partition of blocks to stages, and no choice of recomputed blocks, gives a step that `score`
finds shorter, or a fullest device that it finds less full.

    shared    T >= mean over the ranks of fill, work, reduction and optimizer; and one micro-batch through all stages
    messages    T >= the messages on one link, and what a micro-batch on its way takes over how many are (`messages.py`)
    divided     T >= the least time in which the ranks' most blocks (`planner/search/bounds/ranks.py`) sum to all blocks

The number of blocks that a rank can hold grows with T, so the least T is found by bisection, for all rows at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoparallel.planner.problem import Problem
from autoparallel.planner.search.bounds.communication import CommunicationPrices
from autoparallel.planner.search.bounds.messages import Messages, forth_s, messages_s
from autoparallel.planner.search.bounds.ranks import RankBounds, all_state_bytes, rates_of
from autoparallel.planner.search.bounds.rows import Rows
from autoparallel.planner.search.bounds.tables import PriceTable
from autoparallel.planner.search.partition.forms import Chain
from autoparallel.planner.search.space.build import WHOLE_BACKWARD, Space
from autoparallel.planner.search.space.meshes import Bools, Floats, Ints

HALVINGS = 14  # of the bracket in which a bound is found, at most
CLOSE = 1e-4  # of a bound: a bracket this narrow is not halved again
AT_ONCE = 65_536  # numbers in a column by rank and variant: what a core's cache holds. Kind: formula
FOREVER = 1e18  # seconds; longer than any step


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Seconds and bytes that no member of a row goes below; infinite where nothing fits."""

    time_s: Floats
    memory_bytes: Floats

    def take(self, rows: Ints | Bools) -> Bounds:
        return Bounds(time_s=self.time_s[rows], memory_bytes=self.memory_bytes[rows])


def shape_bounds(problem: Problem, space: Space, rows: Ints, table: PriceTable, repeated: int) -> Bounds:
    """Bounds of some shapes, whose prices these are, over all of their variants: no communication, the most sharded state;
    `repeated` layer groups are of the kinds that count."""
    shapes, n = space.shapes.take(rows), max(repeated, 1)
    most = -(-n // shapes.pp)
    group_s = table.group_forward_s + table.group_backward_s
    whole_s = table.all_forward_s + table.all_backward_s
    busiest_s = np.maximum(most * group_s, whole_s / shapes.pp)
    best = np.full(len(shapes), max(space.zeros))
    # One micro-batch there and back; a schedule that splits the backward need not run its weight gradients on the way.
    split = _may_split(space) & (shapes.pp > 1)
    split_s = np.where(split, table.all_forward_s + table.all_input_s, whole_s)
    through_s = np.minimum(whole_s, split_s)
    rates, _ = rates_of(problem, shapes, best)
    per_group = (
        table.group_parameters * (rates.parameter + rates.passing) + table.group_trainable * rates.trainable
    )
    tail = table.tail_parameters * rates.parameter + table.tail_trainable * rates.trainable
    blocks = most if repeated else np.zeros_like(most)
    peak, tail_peak = (
        np.where(split, np.minimum(whole, halves), whole)
        for whole, halves in ((table.peak, table.split_peak), (table.tail_peak, table.split_tail_peak))
    )
    middle = blocks * (per_group + table.least_saved) + peak
    # The last of several stages may be the tail alone.
    before = np.where(shapes.pp > 1, 0.0, n * (per_group + table.least_saved))
    last = tail + before + tail_peak
    return Bounds(
        time_s=np.maximum(shapes.micro_batches * busiest_s, through_s),
        memory_bytes=np.maximum(
            np.maximum(middle, last), all_state_bytes(problem, shapes, table, best) / shapes.pp
        ),
    )


def communicated_s(
    space: Space,
    table: PriceTable,
    communication: CommunicationPrices,
    chain: Chain,
    slow: float,
    slow_comm: float,
) -> Floats:
    """Seconds that no variant of a shape goes below, as its gradients are reduced, its parameters updated and its messages
    sent: the least of all orders of the mesh's axes. `slow` and `slow_comm`: what either takes longer beside the other."""
    shapes, least, found_s = space.shapes, communication.least_s(), np.full(len(space.shapes), np.inf)
    trainable, experts = (
        np.where(np.isfinite(table.all_forward_s), numbers, 0.0)  # a shape that is no strategy has none
        for numbers in (table.all_trainable, table.all_expert_trainable)
    )
    placed = space.meshes.placed[shapes.mesh]
    for order in range(len(space.meshes.orders)):
        rows = np.flatnonzero(placed[:, order])
        at, m, pp = (shapes.mesh[rows], order), shapes.micro_batches[rows], shapes.pp[rows]
        forward_s, backward_s = table.all_forward_s[rows], table.all_backward_s[rows]
        step_s = least.step_s[at] * trainable[rows] + least.step_expert_s[at] * experts[rows]
        reduce_s = least.reduce_s[at] * trainable[rows] + least.reduce_expert_s[at] * experts[rows]
        left_s = np.maximum(reduce_s - backward_s * (slow / slow_comm), 0.0)
        one_s = (
            m * (forward_s + backward_s) + left_s + step_s
        )  # one stage, which reduces beside its last backward
        several_s = np.maximum(m * (forward_s + backward_s), m * forward_s + left_s) + step_s
        send_s = communication.shortest_s(rows, order, chain)
        # What `messages.messages_s` says of every schedule, however many chunks a rank has.
        through_s = forward_s + table.all_input_s[rows] + 2 * (pp - 1) * send_s
        through_s = np.maximum(through_s, table.all_input_s[rows] + (m + 2 * pp - 3) * send_s)
        each_s = np.where(pp == 1, one_s, np.maximum(several_s / pp, through_s))
        found_s[rows] = np.minimum(found_s[rows], each_s)
    return found_s


def _may_split(space: Space) -> bool:
    """Whether some schedule splits the backward: weight gradients then need not stand in a micro-batch's way back."""
    return any(schedule >= len(WHOLE_BACKWARD) for schedule, _ in space.schedules)


def quick_bounds(problem: Problem, rows: Rows, capacity_bytes: float) -> Bounds:
    """What of the variants' bounds needs no look at each rank: "shared", and the state of the whole model."""
    time_s = _shared_s(rows)
    share = all_state_bytes(problem, rows.shapes, rows.table, rows.zero) / rows.shapes.pp
    time_s[(share > capacity_bytes) | ~np.isfinite(rows.table.group_forward_s)] = np.inf
    return Bounds(time_s=time_s, memory_bytes=share)


def variant_bounds(
    problem: Problem, rows: Rows, capacity_bytes: float, below_s: float, *, memory: bool, close: float = CLOSE
) -> Bounds:
    """Bounds of each variant, as `close` as that; one that cannot be shorter than `below_s` is only known to be that long.
    Bytes are bounded where `memory` asks for it, else 0."""
    quick = quick_bounds(problem, rows, capacity_bytes)
    time_s, least_bytes = np.maximum(quick.time_s, below_s), np.zeros(len(rows.zero))
    wanted = np.isfinite(rows.table.group_forward_s) & ((quick.time_s < below_s) | memory)
    for pp in np.unique(rows.shapes.pp[wanted]).tolist():
        index = np.flatnonzero(wanted & (rows.shapes.pp == pp))
        for part in np.array_split(index, -(-len(index) * pp // AT_ONCE)):
            some = rows.take(part)
            if memory:
                ranks = RankBounds(problem, some, pp)
                least_bytes[part] = np.maximum(_least_memory(some, ranks), quick.memory_bytes[part])
            time_s[part] = _least_time(
                problem,
                some,
                pp,
                capacity_bytes,
                quick.time_s[part],
                np.minimum(time_s[part], FOREVER),
                below_s,
                close,
            )
    time_s[np.isinf(quick.time_s)] = np.inf
    return Bounds(time_s=time_s, memory_bytes=least_bytes)


def _shared_s(rows: Rows) -> Floats:
    """One micro-batch through the whole model, and what the ranks take on average, however blocks are divided."""
    u, m, pp, plain = rows.table, rows.shapes.micro_batches, rows.shapes.pp, rows.plain
    sent = Messages.of(rows)
    sends_s = 2 * sent.together_s(pp * rows.chunks - 1)
    ending_s = rows.ending_s()
    whole_s = u.all_forward_s + u.all_backward_s
    first_s = rows.tied_s + np.where(rows.chunks > 1, rows.first_stage_s(), 0.0)
    whole_s += np.maximum(first_s, ending_s)
    # A schedule in the shape of a V turns on its last rank, without a message.
    turning_s = 2 * sent.together_s(pp * rows.chunks - 1 - rows.v_shaped)
    there_and_back_s = u.all_forward_s + u.all_input_s + turning_s + ending_s
    through_s = np.where(plain, whole_s + sends_s, there_and_back_s)
    forward_s = rows.beside(u.all_forward_s, rows.all_gather_s)
    backward_s = rows.beside(u.all_backward_s, rows.all_regather_s)
    ended_s = rows.ended(u.all_backward_s, rows.all_regather_s, rows.all_reduce_s)
    backward_s = np.where(rows.zero >= 2, ended_s, backward_s)
    last_s = np.where((rows.chunks == 1) | rows.apart, ended_s, backward_s)
    fill = rows.filled()
    sent_s = pp * sent.together_s((pp - 1) / 2)  # of the ranks together, the sum of whose ways is convex
    fill_s, drain_s = fill * u.group_forward_s + sent_s, fill * u.group_backward_s + sent_s
    stepped_s = m * forward_s + (m - 1) * backward_s + last_s + rows.all_step_s + fill_s
    drained_s = m * (forward_s + backward_s) + np.where(plain, fill_s + drain_s, 0.0)
    beside_s = np.where(plain, u.all_backward_s, u.all_backward_s - u.all_input_s) * (
        rows.slow / rows.slow_comm
    )
    left_s = np.where(rows.zero >= 2, 0.0, np.maximum(rows.all_reduce_s - beside_s, 0.0))
    # No chunk's last backward starts before every micro-batch has passed all stages.
    reduced_s = fill_s + m * forward_s + left_s + rows.all_step_s
    # First forwards wait for updated parameters, of each further chunk for those of the ones before.
    alone, gathered_s = rows.chunks == 1, rows.all_updated_s
    first_s = np.where(alone, m * forward_s + rows.longer(u.all_forward_s, gathered_s), gathered_s)
    stepped_s = np.maximum(stepped_s, first_s + (m - 1) * backward_s + last_s + rows.all_step_s)
    reduced_s = np.maximum(
        reduced_s, np.maximum(first_s, pp * forth_s(rows, sent)) + left_s + rows.all_step_s
    )
    back_s = np.where(plain, u.all_backward_s, u.all_input_s)
    passing_s = messages_s(rows, sent, u.all_forward_s, back_s)
    through_s = np.maximum(through_s, np.where(pp > 1, passing_s, 0.0))
    through_s += np.maximum(rows.summed_s - rows.tied_s, 0.0)  # the one or the other is waited for
    return np.maximum(through_s, np.maximum(np.maximum(stepped_s, drained_s), reduced_s) / pp + rows.summed_s)


def _least_time(
    problem: Problem,
    rows: Rows,
    pp: int,
    capacity_bytes: float,
    low_s: Floats,
    top_s: Floats,
    below_s: float,
    close: float,
) -> Floats:
    """The least time, `low_s` or more, in which all blocks can be divided, and `top_s` where that is not less."""
    found_s = top_s.copy()
    ranks = RankBounds(problem, rows, pp)
    room = ranks.room(capacity_bytes)
    open_ = ranks.divided(rows.repeated, top_s, room)
    if below_s > FOREVER:  # then what cannot be divided does not fit
        found_s[~open_] = np.inf
    kept = np.flatnonzero(open_ & (low_s < top_s))
    if not len(kept):
        return found_s
    if len(kept) < len(open_):
        rows = rows.take(kept)
        ranks, low_s, top_s = RankBounds(problem, rows, pp), low_s[kept], top_s[kept]
        room = ranks.room(capacity_bytes)
    early = ranks.divided(rows.repeated, low_s, room)
    low, high = low_s, np.minimum(2 * low_s, top_s)
    # At `top_s` all are open, which other rows beside them may have told otherwise.
    while not (done := early | (high >= top_s) | ranks.divided(rows.repeated, high, room)).all():
        low, high = np.where(done, low, high), np.where(done, high, np.minimum(2 * high, top_s))
    for _ in range(HALVINGS):
        if (early | (high - low <= close * low)).all():
            break
        middle = (low + high) / 2
        done = ranks.divided(rows.repeated, middle, room)
        high, low = np.where(done, middle, high), np.where(done, low, middle)
    found_s[kept] = np.where(early, low_s, low)
    return found_s


def _least_memory(rows: Rows, ranks: RankBounds) -> Floats:
    """The least capacity under which all blocks can be divided, however long the step takes."""
    size = len(rows.zero)
    ranks.hosts = None  # which hold no more for any capacity of the devices
    forever = np.full(size, FOREVER)
    low, high = np.zeros(size), np.ones(size)
    while not (done := ranks.divided(rows.repeated, forever, ranks.room(high))).all():
        high = np.where(done, high, high * 4)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        done = ranks.divided(rows.repeated, forever, ranks.room(middle))
        high, low = np.where(done, middle, high), np.where(done, low, middle)
    return low
