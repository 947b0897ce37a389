"""Memory in the bounds by paths: what a byte is worth at the moments of a schedule that are full.

With a price u[j] >= 0 of each byte at moment j, and weights l[p] of the paths that sum to one, for whatever partition fits

    T >= sum l[p] path[p] + sum u[j] (moment[j] - capacity)

which divides into layer groups as the paths alone do: each stands in the chunk, and is kept or recomputed, where its seconds
and the price of its bytes are least. The prices are dual values of one variant's linear program. They are noted as multiples
of what recomputation takes to free a byte, which is what a byte is worth to others of the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoparallel.planner.search.bounds.ranks import Rates
from autoparallel.planner.search.bounds.rows import Rows
from autoparallel.planner.search.partition.forms import PS, Chain
from autoparallel.planner.search.partition.problem import Q, Row, StageProblem, without_idle_rows
from autoparallel.planner.search.partition.relaxation import GIB, Relaxation
from autoparallel.planner.search.space.meshes import Floats

# What of a layer group a moment holds. What a pass holds above that, its own micro-batch's activations are among.
HELD = {
    Q.STATE: 0, Q.SAVED: 1, Q.FORWARD_PEAK: 1, Q.BACKWARD_PEAK: 1, Q.WEIGHT_SAVED: 2, Q.WEIGHT_PEAK: 2,
}  # fmt: skip
STATE, SAVED, WEIGHT_SAVED = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWeights:
    """Prices of the bytes of a schedule's moments, in multiples of what recomputation takes to free one."""

    counts: Floats  # [STATE, SAVED or WEIGHT_SAVED, chunk]: of a layer group's bytes
    ends: Floats  # likewise of what the ends of the model hold, the running pass's own micro-batch left out
    peaks: Floats  # [chunk]: of what a backward pass needs besides
    moments: float  # of all moments together, each of which has the devices' capacity

    def with_memory(
        self,
        rows: Rows,
        chain: Chain,
        rates: tuple[Rates, Rates],
        capacity_bytes: float,
        each: Floats,
        again: Floats,
    ) -> tuple[Floats, Floats]:
        """Of layer groups that take `each` [variant, kind, chunk] and `again` more if they are recomputed, what they take with
        their bytes priced; and what stands besides [variant]."""
        u, (dense, expert) = rows.table, rates
        byte_s = _byte_s(rows, chain)
        state = u.of_kinds("dense") * dense.parameter[:, None]
        state = state + u.of_kinds("dense_trainable") * dense.trainable[:, None]
        state = state + u.of_kinds("experts") * expert.parameter[:, None]
        state = state + u.of_kinds("expert_trainable") * expert.trainable[:, None]
        kept, freed = (
            _outer(state, self.counts[STATE])
            + _outer(u.of_kinds(f"{least}saved"), self.counts[SAVED])
            + _outer(u.of_kinds(f"{least}weight_saved"), self.counts[WEIGHT_SAVED])
            for least in ("", "least_")
        )
        price = byte_s[:, None, None]
        fewer = np.minimum(each + price * kept, each + again + price * freed)
        besides = rows.peaks("backward_peak") * self.peaks[1:-1].sum() * (rows.least_per_chunk > 0)
        for at, side in ((0, "head"), (-1, "tail")):
            held = getattr(u, f"{side}_parameters") * dense.parameter
            held = held + getattr(u, f"{side}_trainable") * dense.trainable
            besides = besides + held * self.ends[STATE][at]
            besides = besides + getattr(u, f"{side}_saved") * self.ends[SAVED][at]
        return fewer, byte_s * (besides - self.moments * capacity_bytes)


def that_bind(problem: StageProblem) -> tuple[Row, ...]:
    """The moments of the devices' own memory that some partition overfills, where recomputation may help."""
    if not problem.recompute or problem.recomputed is not None or _freeing_s(problem) <= 0.0:
        return ()
    return tuple(row for row in without_idle_rows(problem).memory if row.capacity_bytes is None)


def held_weights(program: Relaxation, total: float) -> HeldWeights | None:
    """The dual values of the moments of a solved program, whose paths' ones sum to `total`; None where none counts."""
    problem = program.problem
    counts, ends = np.zeros((3, problem.chunks)), np.zeros((3, problem.chunks))
    peaks, moments = np.zeros(problem.chunks), 0.0
    scale = total * GIB * _freeing_s(problem)
    for row, moment in program.moments.items():
        price = max(-moment.dual_value(), 0.0) / scale
        if not price > 0.0:
            continue
        moments += price
        for q, chunk, factor in row.terms:
            counts[HELD[Q(q)], chunk] += price * factor
            if q in (Q.STATE, Q.SAVED):
                ends[HELD[Q(q)], chunk] += price * factor
            if q == Q.BACKWARD_PEAK:
                peaks[chunk] += price * factor
    return HeldWeights(counts=counts, ends=ends, peaks=peaks, moments=moments) if moments > 0.0 else None


def _freeing_s(problem: StageProblem) -> float:
    """Seconds that the recomputation of a layer group of the commonest kind takes for each byte that it frees."""
    kind = max(set(problem.kinds), key=problem.kinds.count)
    backward, saved = (problem.quantities[q].forms[0] for q in (Q.BACKWARD, Q.SAVED))
    freed = saved.kept[kind] - saved.recomputed[kind]
    return max(backward.recomputed[kind] - backward.kept[kind], 0) / PS / freed if freed > 0 else 0.0


def _byte_s(rows: Rows, chain: Chain) -> Floats:
    """Likewise of each variant."""
    kind = max(set(chain.kinds), key=chain.kinds.count)
    freed = (rows.table.of_kinds("saved") - rows.table.of_kinds("least_saved"))[:, kind]
    took_s = rows.table.of_kinds("recompute_s")[:, kind]
    return np.asarray(np.where(freed > 0.0, took_s / np.maximum(freed, 1.0), 0.0))


def _outer(of_kinds: Floats, of_chunks: Floats) -> Floats:
    """[variant, kind] times [chunk]."""
    return np.asarray(of_kinds[:, :, None] * of_chunks)
