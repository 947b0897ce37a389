"""Variants with all that their bounds are made of, as columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoparallel.planner.search.bounds.flight import is_v_shaped
from autoparallel.planner.search.bounds.tables import PriceTable, take_rows
from autoparallel.planner.search.space.build import WHOLE_BACKWARD
from autoparallel.planner.search.space.meshes import Bools, Floats, Ints, alike
from autoparallel.planner.search.space.shapes import Shapes

EPSILON = 1e-9  # numbers of blocks this close to a whole one are taken for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Variants with all that their bounds are made of."""

    shapes: Shapes
    table: PriceTable
    zero: Ints
    schedule: Ints
    chunks: Ints  # per rank
    pp_stride: Ints  # devices between neighbouring pipeline ranks; 0 where they may stand in any order
    group_reduce_s: Floats  # the gradients of a layer group
    all_reduce_s: Floats  # of the whole model
    group_gather_s: Floats  # the parameters of a layer group, ZeRO-3
    all_gather_s: Floats
    group_regather_s: Floats  # likewise, before a backward pass
    all_regather_s: Floats
    group_step_s: Floats  # the optimizer and the gather of updated parameters of a layer group
    all_step_s: Floats
    kind_gather_s: Floats  # likewise [variant, kind of layer group]
    kind_regather_s: Floats
    kind_reduce_s: Floats
    kind_step_s: Floats
    gather_each_s: Floats  # of one parameter, when all are gathered at once
    regather_each_s: Floats
    group_updated_s: Floats  # updated parameters of a layer group, gathered beside the next step's first forward: of several stages
    all_updated_s: Floats
    kind_updated_s: Floats
    updated_s: Floats  # of one parameter
    step_s: Floats  # likewise per trainable parameter, experts aside
    reduce_s: Floats  # the gradient of one
    reduce_least_s: Floats  # gradients of a stage, however few
    step_least_s: Floats  # likewise its update
    sends_s: Floats  # the messages between neighbouring stages, [variant, one of `Chain.messages`]
    send_s: Floats  # the shortest of them
    places: tuple[int, ...]  # of the chain that send each of them, as far as cuts there may be told apart
    tied_s: Floats  # the exchange of tied gradients, which the first stage's step waits for where its backward is whole
    summed_s: Floats  # of some stage: gradients that are summed over the replicas once a step, before any stage's step
    repeated: int  # layer groups of the kinds that count
    others: int  # layer groups of other kinds, which may stand anywhere and count for nothing
    least_per_chunk: Ints  # blocks of a chunk that is not at an end of the model
    least_per_end: Ints  # of one that is
    most_per_chunk: Ints  # of any
    slow: float  # 1 + compute_slowdown
    slow_comm: float
    tied_between: bool  # whether layer groups hold any tensor that the ends of the model do
    apart: bool  # reductions run beside nothing: grad_sync.overlap = false
    slower: Floats | None = (
        None  # over unlike devices, [rank, variant]: the fastest one's pace against the rank's
    )
    lacking_bytes: tuple[float, ...] = ()  # likewise by rank, below the largest capacity

    @property
    def plain(self) -> Bools:
        """Variants whose backward is whole, and whose ranks end with their first stage."""
        return np.asarray(self.schedule < len(WHOLE_BACKWARD))

    @property
    def v_shaped(self) -> Bools:
        """Variants whose first rank holds both ends of the model."""
        return is_v_shaped(self.schedule)

    def peaks(self, name: str) -> Floats:
        """One of the table's columns of peaks, by whether backwards are split."""
        split = getattr(self.table, f"split_{name}")
        return np.asarray(np.where(self.plain, getattr(self.table, name), split))

    def take(self, index: Ints) -> Rows:
        columns = (
            "zero", "schedule", "chunks", "pp_stride", "group_reduce_s", "all_reduce_s", "group_gather_s", "all_gather_s",
            "group_regather_s", "all_regather_s", "kind_regather_s", "regather_each_s",
            "group_step_s", "all_step_s", "step_s", "reduce_s", "sends_s", "send_s", "tied_s", "summed_s",
            "group_updated_s", "all_updated_s", "kind_updated_s", "updated_s", "kind_gather_s", "kind_reduce_s", "kind_step_s", "gather_each_s", "reduce_least_s", "step_least_s",
        )  # fmt: skip
        return Rows(
            shapes=self.shapes.take(index), table=take_rows(self.table, index),
            **{name: getattr(self, name)[index] for name in columns},
            repeated=self.repeated, others=self.others, least_per_chunk=self.least_per_chunk[index],
            least_per_end=self.least_per_end[index], most_per_chunk=self.most_per_chunk[index], slow=self.slow, slow_comm=self.slow_comm,
            places=self.places, tied_between=self.tied_between, apart=self.apart,
            slower=None if self.slower is None else self.slower[:, index], lacking_bytes=self.lacking_bytes,
        )  # fmt: skip

    def beside(self, compute_s: Floats, communicate_s: Floats) -> Floats:
        """Seconds of both on two streams at least: `planner.search.partition.forms.PricedChain.beside`."""
        return np.maximum(self.computed(compute_s, communicate_s), communicate_s + self.rest(compute_s))

    def rest(self, compute_s: Floats) -> Floats:
        """What of a computation communication does not hide, however much that is."""
        gain = max(1.0 / self.slow + 1.0 / self.slow_comm - 1.0, 0.0)
        return max(1.0 - self.slow * gain, 0.0) * compute_s

    def computed(self, compute_s: Floats, communicate_s: Floats) -> Floats:
        """The one of both forms of `beside` in which all computation counts."""
        gain = max(1.0 / self.slow + 1.0 / self.slow_comm - 1.0, 0.0)
        return compute_s + max(1.0 - self.slow_comm * gain, 0.0) * communicate_s

    def longer(self, compute_s: Floats, communicate_s: Floats) -> Floats:
        """How much longer a computation takes at least beside communication, all of which it waits for."""
        return self.beside(compute_s, communicate_s) - compute_s

    def ended(self, compute_s: Floats, gather_s: Floats, reduce_s: Floats) -> Floats:
        """Seconds of a backward at least that gathers, and ends with a reduction."""
        if self.apart:
            return self.beside(compute_s, gather_s) + reduce_s
        return self.beside(compute_s, gather_s + reduce_s)

    def before(self, rank: Ints) -> Ints:
        """Layer groups in the stages that a rank's first input passes: the others cannot hold all the rest."""
        after = (self.shapes.pp * self.chunks - rank) * self.most_per_chunk
        least = np.where(rank > 0, (rank - 1) * self.least_per_chunk + self.least_per_end, 0) - self.others
        return np.asarray(np.maximum(np.maximum(least, self.repeated - after), 0))

    def filled(self) -> Ints:
        """The sum of `before` over the ranks."""
        columns = (self.shapes.pp, self.chunks, self.least_per_chunk, self.least_per_end, self.most_per_chunk)
        first, which = alike(*columns)
        sums = np.zeros(len(first), dtype=np.int64)
        for at, (pp, chunks, least, end, most) in enumerate(np.stack(columns)[:, first].T.tolist()):
            rank = np.arange(pp)
            fewest = np.where(rank > 0, (rank - 1) * least + end, 0) - self.others
            sums[at] = np.maximum(np.maximum(fewest, self.repeated - (pp * chunks - rank) * most), 0).sum()
        return np.asarray(sums[which])

    def first_stage_s(self) -> Floats:
        """What stands besides on the way of a micro-batch through all stages and back: the first stage's forwards of the
        other micro-batches, the rest of its reduction, and its step."""
        u, held = self.table, self.first_chunk(np.zeros(1, dtype=np.int64))
        f, _, ended_s, b = passes(self, 1.0)
        others = (self.shapes.micro_batches - 1) * f * held
        return np.asarray(others + held * (ended_s - b + self.group_step_s) + u.head_trainable * self.step_s)

    def ends_left_s(self) -> tuple[Floats, Floats]:
        """What the last backward of the model's head, and of its tail, leaves of the reductions of their gradients: the head's are
        the last to be made, the tail's nothing where layer groups may hide them."""
        u, hidden = self.table, self.slow / self.slow_comm
        again_s = u.of_kinds("backward_s") + u.of_kinds("recompute_s")
        hides_s = np.where(self.plain[:, None], again_s, u.of_kinds("weight_s"))
        left = self.zero < 2
        never = left & (self.kind_reduce_s > hides_s * hidden).all(axis=1)
        copied = self.copied()
        ends = []
        for numbers, side, some in (
            (u.head_trainable, "head", left), (u.tail_trainable + copied, "tail", never),
        ):  # fmt: skip
            whole_s, forward_s = getattr(u, f"{side}_s"), getattr(u, f"{side}_forward_s")
            beside_s = whole_s - forward_s - np.where(self.plain, 0.0, getattr(u, f"{side}_input_s"))
            ends.append(np.where(some, np.maximum(numbers * self.reduce_s - beside_s * hidden, 0.0), 0.0))
        return ends[0], ends[1]

    def copied(self) -> Floats:
        """Trainable numbers of the tail that the head holds, too, and the last stage again."""
        alone = (self.chunks == 1) | (not self.tied_between)  # another stage of its rank may have them
        return np.where((self.shapes.pp > 1) & ~self.v_shaped & alone, self.table.tail_tied, 0.0)

    def ending_s(self) -> Floats:
        """From the end of the first stage's last backward, of which only input gradients are counted where it is split, to the
        end of its step: its weight gradients, what is left of its reduction, the exchange of tied gradients, the update."""
        u = self.table
        weights_s = np.where(self.plain, 0.0, u.head_s - u.head_forward_s - u.head_input_s)
        tied_s = np.where(self.v_shaped, 0.0, self.tied_s)
        return np.asarray(weights_s + self.ends_left_s()[0] + tied_s + self.step_s * u.head_trainable)

    def first_chunk(self, rank: Ints) -> Ints:
        """Layer groups of the rank's first stage at least."""
        least = np.where(rank > 0, self.least_per_chunk, self.least_per_end)
        return np.asarray(np.maximum(least - self.others, 0))


def passes(rows: Rows, slower: Floats | float) -> tuple[Floats, Floats, Floats, Floats]:
    """Seconds of a layer group's forward, its backward, its last backward, and the backwards before that, with what runs
    beside them, where computation is so much slower."""
    u = rows.table
    f = rows.beside(u.group_forward_s * slower, rows.group_gather_s)
    gathered_s = rows.beside(u.group_backward_s * slower, rows.group_regather_s)
    ended_s = rows.ended(u.group_backward_s * slower, rows.group_regather_s, rows.group_reduce_s)
    return f, gathered_s, ended_s, np.where(rows.zero >= 2, ended_s, gathered_s)


def hidden(rows: Rows, slower: Floats | float) -> Floats:
    """Seconds of further computation, as recomputation is, that a layer group's communication hides in a step at most: what each of its
    passes takes longer than the linear form of `Rows.beside` that computation adds to."""
    u, m = rows.table, rows.shapes.micro_batches
    compute_s, back_s = u.group_forward_s * slower, u.group_backward_s * slower
    f, gathered_s, ended_s, _b = passes(rows, slower)
    rest_s = 0.0 if rows.apart else rows.group_reduce_s
    alone_s = rows.group_reduce_s if rows.apart else 0.0
    of_forward = f - rows.computed(compute_s, rows.group_gather_s)
    of_gathered = gathered_s - rows.computed(back_s, rows.group_regather_s)
    of_ended = ended_s - alone_s - rows.computed(back_s, rows.group_regather_s + rest_s)
    of_each = np.where(rows.zero >= 2, of_ended, of_gathered)
    return np.maximum(m * of_forward + (m - 1) * of_each + np.maximum(of_ended, of_each), 0.0)
