"""Bounds of many variants by the paths of one schedule, without a stage problem for each.

With n[c] layers in chunk c and weights l[p] of the known paths that sum to one, for whatever partition

    T >= sum l[p] (const[p] + sum a[p, c] n[c]) >= const + sum least[c] A[c] + (N - sum least[c]) min A[c]

where A[c] = sum l[p] a[p, c]. Every choice of weights gives a true bound; the best ones are the dual values of the
linear program of one variant, and serve all others of the schedule, whose layers take other times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoparallel.costmodel.stage_cost import Phase, StageCost
from autoparallel.costmodel.timetable import pipeline_times
from autoparallel.planner.search.bounds.rows import Rows, passes
from autoparallel.planner.search.partition.forms import PS
from autoparallel.planner.search.partition.paths import SchedulePaths
from autoparallel.planner.search.partition.problem import Q, Row, StageProblem
from autoparallel.planner.search.partition.relaxation import Relaxation
from autoparallel.planner.search.space.meshes import Floats

MOST_PLANES = 60  # paths that are added for one schedule. Kind: formula
CLOSE = 1e-3  # share to which bound and timetable agree at the end
STEP = 0.4  # of the way from the best layers to those that the program proposes. Kind: measured
TIMES = tuple(q for q in Q if q < Q.STATE)  # the quantities that are seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PathWeights:
    """How often a weighted mean of a schedule's paths has each quantity of each chunk."""

    counts: Floats  # [quantity of `TIMES`, chunk]
    layers: tuple[float, ...]  # of each chunk, with which a walk took least

    def bounds_s(self, rows: Rows) -> Floats:
        """Seconds that no partition of any of these variants, all of this schedule, goes below."""
        u, nothing = rows.units, np.zeros(len(rows.zero))
        f, _, ended_s, b = passes(rows, 1.0)
        input_s, weight_s = np.minimum(u.unit_input_s, b), u.unit_weight_s
        hidden = rows.slow / rows.slow_comm  # of a reduction beside a second of computation
        every = rows.zero >= 2  # each backward ends with its reduction: nothing is left

        def left_s(compute_s: Floats) -> Floats:
            return np.where(every, 0.0, np.maximum(rows.unit_reduce_s - compute_s * hidden, 0.0))

        backward_s = {Q.BACKWARD: b, Q.LAST_BACKWARD: b, Q.END: np.maximum(ended_s, b)}
        weights_s = {Q.BACKWARD_WEIGHT: weight_s, Q.LAST_BACKWARD_WEIGHT: weight_s}
        weights_s[Q.END_WEIGHT] = rows.beside(weight_s, rows.unit_reduce_s)
        seconds = {
            Q.FORWARD: f, Q.BACKWARD_INPUT: input_s, **backward_s, **weights_s, Q.STEP: rows.unit_step_s,
            Q.REDUCE: left_s(u.unit_backward_s), Q.REDUCE_AFTER_WEIGHT: left_s(weight_s),
        }  # fmt: skip
        each = np.zeros((len(nothing), self.counts.shape[1]))
        for q, value in seconds.items():
            each += np.outer(value, self.counts[TIMES.index(q)])

        def end(forward_s: Floats, all_s: Floats, input_s: Floats, trainable: Floats) -> dict[Q, Floats]:
            back_s, reduce_s = all_s - forward_s, rows.reduce_s * trainable
            weight_s = back_s - input_s
            return {
                Q.FORWARD: forward_s, Q.BACKWARD_INPUT: input_s, Q.STEP: rows.step_s * trainable,
                Q.BACKWARD: back_s, Q.LAST_BACKWARD: back_s, Q.END: rows.beside(back_s, reduce_s),
                Q.BACKWARD_WEIGHT: weight_s, Q.LAST_BACKWARD_WEIGHT: weight_s,
                Q.END_WEIGHT: rows.beside(weight_s, reduce_s), Q.TIED: rows.tied_s,
            }  # fmt: skip

        fixed = rows.send_s * self.counts[TIMES.index(Q.SEND)].sum() + nothing
        head = end(u.head_forward_s, u.head_s, u.head_input_s, u.head_trainable)
        tail = end(u.tail_forward_s, u.tail_s, u.tail_input_s, u.tail_trainable)
        for at, values in ((0, head), (-1, tail)):
            for q, value in values.items():
                fixed = fixed + value * self.counts[TIMES.index(q)][at]
        least = np.ones(each.shape[1]) if not rows.others else np.zeros(each.shape[1])
        least[[0, -1]] = 0
        rest = max(rows.repeated - least.sum(), 0)
        return np.asarray(fixed + (each * least).sum(axis=1) + rest * each.min(axis=1))


def weigh(problem: StageProblem, paths: SchedulePaths, below_s: float) -> PathWeights | None:
    """The weights that bound one variant best, layers divided at will: Kelley's cutting planes.

    A linear program over the known paths proposes layers per chunk; walked through the timetable between these and the best
    ones so far, they show the path that the program lacked. Ends where the two agree, or the bound reaches `below_s`. What
    paths carried weight at the end are from then on among those of the schedule. None where devices are unlike.
    """
    if problem.device_of or problem.chunks == 1 or not problem.kinds:
        return None
    program = Relaxation.of(problem, memory=False)
    for row in paths.rows:
        program.add(row)
    best = np.full(problem.chunks, len(problem.kinds) / problem.chunks)
    best_s, row = _walk(problem, paths, best)
    program.add(row)
    for _ in range(MOST_PLANES):
        solved = program.solve()
        if solved is None:
            return None
        step_s, blocks = solved
        if step_s >= min(below_s, best_s * (1 - CLOSE)):
            break
        between = best + STEP * (blocks - best)
        length_s, row = _walk(problem, paths, between)
        if length_s < best_s:
            best, best_s = between, length_s
        if not program.add(row):
            length_s, row = _walk(problem, paths, blocks)
            if length_s < best_s:
                best, best_s = blocks, length_s
            if not program.add(row):
                break
    return _weights(program, paths, best) if program.solve() is not None else None


def _walk(problem: StageProblem, paths: SchedulePaths, blocks: Floats) -> tuple[float, Row]:
    """Seconds of the timetable with so many layers in each chunk, none recomputed, and its critical path."""
    kinds, costs = tuple(dict.fromkeys(problem.kinds)), []
    for chunk, n in enumerate(blocks.tolist()):
        s = [
            max(
                0.0,
                *(form.fixed[chunk] + n * min(form.kept[kind] for kind in kinds) for form in quantity.forms),
            )
            / PS
            for quantity in problem.quantities[: len(TIMES)]
        ]
        costs.append(
            StageCost(
                forward=Phase(total_s=s[Q.FORWARD]), backward=Phase(total_s=s[Q.BACKWARD]),
                backward_input=Phase(total_s=s[Q.BACKWARD_INPUT]),
                backward_weight=Phase(total_s=s[Q.BACKWARD_WEIGHT]),
                last_backward=Phase(total_s=s[Q.LAST_BACKWARD]),
                last_backward_weight=Phase(total_s=s[Q.LAST_BACKWARD_WEIGHT]),
                step=Phase(total_s=s[Q.STEP]), reduce_s=s[Q.REDUCE], reduce_after_weight_s=s[Q.REDUCE_AFTER_WEIGHT],
                send_s=s[Q.SEND], tied_s=s[Q.TIED], updated_s=s[Q.UPDATED],
            )
        )  # fmt: skip
    times = pipeline_times(paths.timetable, costs)
    return times.step_time_s, paths.critical(costs, times)


def _weights(program: Relaxation, paths: SchedulePaths, best: Floats) -> PathWeights | None:
    """The dual values of the paths, which sum to one."""
    dual = {row: max(plane.dual_value(), 0.0) for row, plane in program.planes.items()}
    total = sum(dual.values())
    if not total > 0.0:
        return None
    counts = np.zeros((len(TIMES), program.problem.chunks))
    for row, weight in dual.items():
        if weight > 0.0:
            if row not in paths.rows:
                paths.rows.append(row)
            for q, c, n in row.terms:
                counts[q, c] += weight / total * n
    return PathWeights(counts=counts, layers=tuple(best.tolist()))
