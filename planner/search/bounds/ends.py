"""What a rank waits for before it computes: updated parameters; and what it still has to do when it has computed all: reductions
that stand in line, weight gradients, updates.

All of these bounds hold for every partition of blocks, and say how many blocks a rank has time for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoparallel.planner.search.bounds.messages import Messages, forth_s
from autoparallel.planner.search.bounds.rows import EPSILON, Rows, passes
from autoparallel.planner.search.space.meshes import Bools, Floats, Ints


def least_of_stages(rows: Rows, rank: Ints, pp: int) -> tuple[Floats, Bools]:
    """What updates take however little a stage holds, once for each that surely holds something; and whether a bucket is surely
    reduced after all that a rank computes; [rank, variant]."""
    u, alone, (first, last) = rows.table, rows.chunks == 1, _ends(rows, rank)
    sure = (u.group_trainable > 0) & bool(rows.repeated and not rows.others)
    ends = (first.astype(np.int64) + last) * (pp > 1)
    stages = np.maximum(rows.chunks - ends * (rows.least_per_end == 0), 0) * sure
    at_end = first & (u.head_trainable > 0) | last & (u.tail_trainable > 0)
    several = rows.plain & (rows.first_chunk(rank) > 0) & sure
    reduces = np.where(alone, (stages > 0) | at_end, several)
    return rows.step_least_s * np.maximum(stages, at_end), np.asarray(reduces)


def _ends(rows: Rows, rank: Ints) -> tuple[Bools, Bools]:
    """Which ranks have the first, and the last stage."""
    return np.asarray(rank == 0), np.where(rows.v_shaped, rank == 0, rank == rows.shapes.pp - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class InLine:
    """Ranks of one stage whose reductions stand in line on their link. A bucket of b bytes is full when a backward w of s bytes
    has come so far, w b / s, and there are s / b of them, each of which takes `reduce_least_s` a beside what its bytes take:
    whatever b,

        w b / s + a s / b >= 2 sqrt(w a)    or, in one bucket, w + a
    """

    base_s: Floats  # [rank, variant]
    per_block_s: Floats
    root_s: Floats  # sqrt(w a) of one block

    @staticmethod
    def of(rows: Rows, rank: Ints, slower: Floats | float, reduces: Bools, besides_s: Floats) -> InLine:
        """`reduces`: where a bucket surely is; `besides_s`: what comes before the first forward and after the last reduction."""
        u, m, (first, last) = rows.table, rows.shapes.micro_batches, _ends(rows, rank)
        times = np.where(rows.zero == 2, m, 1)  # passes that end with reductions
        f, _, _, b = passes(rows, slower)
        made = np.maximum(u.of_kinds("dense_trainable"), 1.0)
        each_s = np.where(
            rows.plain,
            *((u.of_kinds(name) / made).min(axis=1, initial=np.inf) for name in ("backward_s", "weight_s")),
        )
        tail_s = u.tail_s - u.tail_forward_s - np.where(rows.plain, 0.0, u.tail_input_s)
        with np.errstate(divide="ignore", invalid="ignore"):
            of_tail_s = np.where(last & (u.tail_trainable > 0), tail_s / u.tail_trainable, np.inf)
        made_s = np.minimum(each_s, of_tail_s)
        made_s = np.where(np.isfinite(made_s), np.maximum(made_s, 0.0), 0.0) * u.group_trainable
        some = reduces & (u.all_expert_trainable == 0)  # which fill buckets, too
        input_s = np.where(rows.plain, 0.0, u.group_input_s)
        line_s = m * f + (m - times) * b + times * (input_s + rows.group_reduce_s) + rows.group_step_s
        own_s = (m - times) * (u.head_s * first + u.tail_s * last)
        own_s = own_s + times * (u.head_forward_s * first + u.tail_forward_s * last)
        return InLine(
            base_s=besides_s + own_s + times * rows.reduce_s * u.head_trainable * first,
            per_block_s=np.where(rows.chunks == 1, line_s, 0.0),
            root_s=np.where(some, times * np.sqrt(made_s * rows.reduce_least_s), 0.0),
        )

    def most_blocks(self, time_s: Floats) -> Floats:
        """How many blocks each rank has time for: c n + 2 r sqrt(n) <= time."""
        room_s, each_s = time_s - self.base_s, self.per_block_s
        root = (np.sqrt(self.root_s**2 + each_s * np.maximum(room_s, 0.0)) - self.root_s) / each_s
        return np.where(each_s > 0, np.where(room_s < 0, -1.0, root**2), np.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """What a rank does after the last micro-batch has come back to its first stage: one has passed all stages by then, and the
    stages before this one, all that it passes later, hold no more layer groups than their ranks have time for."""

    base_s: Floats  # [rank, variant]: forth through all stages and back to this one, as if no layer group stood before
    per_block_s: Floats  # [variant]: of what comes after it
    before_s: Floats  # a layer group's way back, at most

    @staticmethod
    def of(rows: Rows, rank: Ints, sent: Messages, after_s: Floats) -> Passed:
        """`after_s`: of what comes after it, what does not depend on layer groups."""
        u, alone = rows.table, rows.chunks == 1
        each_s = np.where(
            rows.plain, *(u.of_kinds(one).max(axis=1, initial=0.0) for one in ("backward_s", "input_s"))
        )
        back_s = np.where(rows.plain, u.all_backward_s, u.all_input_s)
        head_s = np.where(rows.plain, u.head_s - u.head_forward_s, u.head_input_s)
        hops = rows.shapes.pp * rows.chunks - 1 - rows.v_shaped
        sent_s = sent.together_s(hops) + sent.together_s(hops - rank)
        # Of a single chunk the last micro-batch is the last through every link.
        sent_s += np.where(alone, (rows.shapes.micro_batches - 1) * sent.longest_s(hops), 0.0)
        left_s = np.maximum(rows.group_reduce_s - u.group_backward_s * (rows.slow / rows.slow_comm), 0.0)
        whole = np.where(rows.zero >= 2, 0.0, left_s)
        split = rows.beside(u.group_weight_s, rows.group_reduce_s)
        base_s = u.all_forward_s + back_s - head_s * (rank > 0) + sent_s + after_s
        return Passed(
            base_s=base_s if not rows.others else np.zeros_like(base_s),
            per_block_s=np.where(alone, np.where(rows.plain, whole, split), 0.0) + rows.group_step_s,
            before_s=each_s,
        )

    def most_blocks(self, time_s: Floats, blocks: Floats) -> Floats:
        """Of so many `blocks` [rank, variant] those that there is time for, the first rank's before the next one's."""
        found, before = blocks.copy(), np.zeros_like(time_s)
        for rank in range(len(found)):
            room_s = time_s - self.base_s[rank] + self.before_s * before
            most = np.where(room_s < 0, -1.0, room_s / self.per_block_s)
            found[rank] = np.minimum(found[rank], np.floor(most * (1 + EPSILON) + EPSILON))
            before = before + np.maximum(found[rank], 0.0)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaited:
    """Ranks whose first forwards wait for updated parameters that are gathered beside them: of one stage for all of its own; of several
    the last one's ends when all of the rank's have come, and no backward begins before. And ranks whose last backwards wait for the
    messages that are sent forth."""

    base_s: Floats  # [3, rank, variant]: to the end of what is computed, of what is reduced, and of that after the messages
    per_block_s: Floats

    @staticmethod
    def of(
        rows: Rows, rank: Ints, slower: Floats | float, sent: Messages, computed: tuple[Floats, Floats],
        reduced: tuple[Floats, Floats],
    ) -> Awaited:  # fmt: skip
        """`computed`, `reduced`: seconds besides and of each layer group, all forwards included, from a rank's first forward to the end of its
        step, as it computes all, and as it reduces what its last backwards leave."""
        u, m, (first, last) = rows.table, rows.shapes.micro_batches, _ends(rows, rank)
        alone, gathered_s = rows.chunks == 1, rows.group_updated_s
        forward_s = rows.beside(u.group_forward_s * slower, rows.group_gather_s)
        ends_s = u.head_forward_s * first + u.tail_forward_s * last
        ends_gathered_s = rows.updated_s * (u.head_parameters * first + u.tail_parameters * last)
        # One of the two forms of `Rows.beside`, whichever all of the rank's layer groups are in.
        least_s = np.minimum(rows.computed(ends_s, ends_gathered_s), ends_gathered_s + rows.rest(ends_s))
        base_s = np.stack([
            computed[0] + np.where(alone, least_s - ends_s, ends_gathered_s - m * ends_s),
            reduced[0] + np.where(alone, least_s, ends_gathered_s),
            reduced[0] + forth_s(rows, sent),
        ])  # fmt: skip
        more_s = np.where(
            alone, rows.longer(u.group_forward_s * slower, gathered_s), gathered_s - m * forward_s
        )
        waiting_s = [np.where(gathered_s > 0, one[1] + more_s, 0.0) for one in (computed, reduced)]
        each_s = (*waiting_s, reduced[1] - m * forward_s)
        return Awaited(
            base_s=base_s, per_block_s=np.stack([np.broadcast_to(s, base_s.shape[1:]) for s in each_s])
        )

    def most_blocks(self, time_s: Floats) -> Floats:
        """How many blocks each rank has time for."""
        most = np.where(self.per_block_s > 0, (time_s - self.base_s) / self.per_block_s, np.inf)
        return np.asarray(most.min(axis=0))
