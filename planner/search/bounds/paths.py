"""Bounds of many variants by the paths of one schedule, without a stage problem for each.

With n[c] layers in chunk c and weights l[p] of the known paths that sum to one, for whatever partition

    T >= sum l[p] (const[p] + sum a[p, c] n[c]) >= const + sum least[c] A[c] + (N - sum least[c]) min A[c]

where A[c] = sum l[p] a[p, c]. Every choice of weights gives a true bound; the best ones are the dual values of the
linear program of one variant, and serve all others of the schedule, whose layers take other times. Where memory is short,
its moments have weights, too (`held.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from autoparallel.costmodel.stage_cost import Phase, StageCost
from autoparallel.costmodel.timetable import pipeline_times
from autoparallel.planner.search.bounds.held import HeldWeights, held_weights, that_bind
from autoparallel.planner.search.bounds.ranks import Rates
from autoparallel.planner.search.bounds.rows import Rows
from autoparallel.planner.search.partition.forms import PS, Chain
from autoparallel.planner.search.partition.paths import SchedulePaths
from autoparallel.planner.search.partition.problem import Q, Row, StageProblem
from autoparallel.planner.search.partition.relaxation import Relaxation
from autoparallel.planner.search.space.meshes import Bools, Floats

MOST_PLANES = 24  # paths that are added for one schedule. Kind: formula
MOST_NUMBERS = (
    20_000_000  # that layer groups divided in order may take; more are divided in any order. Kind: formula
)
CLOSE = 4e-3  # share to which bound and timetable agree at the end
STEP = 0.4  # of the way from the best layers to those that the program proposes. Kind: measured
TIMES = tuple(q for q in Q if q < Q.STATE)  # the quantities that are seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PathWeights:
    """How often a weighted mean of a schedule's paths has each quantity of each chunk."""

    counts: Floats  # [quantity of `TIMES`, chunk]
    layers: tuple[float, ...]  # of each chunk, with which a walk took least
    held: HeldWeights | None = None  # where memory bound the variant that these weights are the best of

    def bounds_s(self, rows: Rows, chain: Chain, rates: tuple[Rates, Rates], capacity_bytes: float) -> Floats:
        """Seconds that no partition that fits goes below, of any of these variants, all of this schedule."""
        took = _Took(rows, chain.counts)
        times = [TIMES.index(q) for q in took.groups]
        each = np.stack(list(took.groups.values()), axis=2) @ self.counts[times]  # [variant, kind, chunk]
        fixed = np.zeros(len(each))
        for at, values in ((0, took.head), (-1, took.tail)):
            for q, value in values.items():
                fixed = fixed + value * self.counts[TIMES.index(q)][at]
        for q, value in took.chunks.items():
            fixed = fixed + value * self.counts[TIMES.index(q)][1:-1].sum()
        found = self._divided_s(rows, chain, each, fixed)
        if self.held is None:
            return found
        times = [TIMES.index(q) for q in took.again]
        again = np.stack(list(took.again.values()), axis=2) @ self.counts[times]
        each, more = self.held.with_memory(rows, chain, rates, capacity_bytes, each, again)
        return np.maximum(found, self._divided_s(rows, chain, each, fixed + more))

    def _divided_s(self, rows: Rows, chain: Chain, each: Floats, fixed: Floats) -> Floats:
        """The least that layer groups come to, which take `each` [variant, kind, chunk], with what is `fixed` [variant]."""
        sends = self.counts[TIMES.index(Q.SEND)]
        if len(set(chain.kinds)) > 1 and each.size * len(chain.kinds) <= MOST_NUMBERS:
            return fixed + _in_order(rows, chain, each, sends)
        groups, least = np.array(chain.counts, dtype=np.float64), each.min(axis=2)
        # A chunk that is not at an end of the model has a layer group, which takes there what it takes more than in the
        # best chunk.
        more = (each - least[:, :, None])[:, groups > 0, 1:-1].min(axis=1).sum(axis=1)
        more = more * (rows.least_per_chunk > 0) + rows.send_s * sends.sum()
        return np.asarray(fixed + least @ groups + more)


def _in_order(rows: Rows, chain: Chain, each: Floats, sends: Floats) -> Floats:
    """The least that layer groups and messages come to, [variant], of all ways to divide the layer groups to the chunks
    in their order: a layer group of a kind takes `each` [variant, kind, chunk], the message after a chunk its seconds
    `sends` [chunk] times. By dynamic programming over the chunks, every number of layer groups divided so far at once.
    """
    message_s = rows.sends_s[:, list(chain.cuts)]  # [variant, layer groups before it]
    least = int(rows.least_per_chunk.min(initial=1))
    divided = _so_far(each[:, list(chain.kinds), 0])
    for chunk in range(1, each.shape[2]):
        before = _so_far(each[:, list(chain.kinds), chunk])
        best = np.minimum.accumulate(divided + sends[chunk - 1] * message_s - before, axis=1)
        fewest = least if chunk < each.shape[2] - 1 else 0
        divided = np.full_like(before, np.inf)
        divided[:, fewest:] = before[:, fewest:] + best[:, : best.shape[1] - fewest]
    return np.asarray(divided[:, -1])


def _so_far(seconds: Floats) -> Floats:
    """The sums of the first columns, from none to all of them."""
    return np.concatenate([np.zeros((len(seconds), 1)), np.cumsum(seconds, axis=1)], axis=1)


class _Took:
    """Seconds of each quantity by variant: of a layer group of each kind, of the ends of the model, and what any chunk
    that is not at an end takes besides.

    Computation beside communication takes no less than either of two linear forms (`Rows.beside`). All layer groups and
    ends of a variant are given the same one, which is the larger one for the whole model: one layer group may hide what
    another exchanges.
    """

    def __init__(self, rows: Rows, of_kind: Sequence[int]) -> None:
        self._rows = rows
        self._of_kind = np.array(of_kind, dtype=np.float64)
        gain = max(1.0 / rows.slow + 1.0 / rows.slow_comm - 1.0, 0.0)
        self._more = max(
            1.0 - rows.slow_comm * gain, 0.0
        )  # of a second of communication, if computation leads
        self._less = max(1.0 - rows.slow * gain, 0.0)  # of a second of computation, if communication leads
        u, every = rows.table, rows.zero >= 2  # each backward ends with its reduction: nothing is left
        trainable = (u.head_trainable, u.tail_trainable + rows.copied())
        gathers = (
            rows.kind_gather_s, rows.gather_each_s * u.head_parameters, rows.gather_each_s * u.tail_parameters
        )  # fmt: skip
        regathers = (
            rows.kind_regather_s, rows.regather_each_s * u.head_parameters, rows.regather_each_s * u.tail_parameters
        )  # fmt: skip
        reduces = (rows.kind_reduce_s, *(rows.reduce_s * numbers for numbers in trainable))
        both = tuple(a + b for a, b in zip(regathers, reduces, strict=True))
        nothing = tuple(0.0 * seconds for seconds in gathers)
        forward = (u.of_kinds("forward_s"), u.head_forward_s, u.tail_forward_s)
        backward = (u.of_kinds("backward_s"), u.head_s - u.head_forward_s, u.tail_s - u.tail_forward_s)
        inputs = (u.of_kinds("input_s"), u.head_input_s, u.tail_input_s)
        weight = (u.of_kinds("weight_s"), *(a - b for a, b in zip(backward[1:], inputs[1:], strict=True)))
        each = tuple(np.where(_column(every, a), a, b) for a, b in zip(both, regathers, strict=True))
        each_weight = tuple(np.where(_column(every, a), a, b) for a, b in zip(reduces, nothing, strict=True))
        self._recompute_s = u.of_kinds("recompute_s")
        self.groups: dict[Q, Floats] = {}
        self.again: dict[Q, Floats] = {}  # what a layer group takes more that is recomputed
        self.chunks: dict[Q, Floats] = {}
        self.head: dict[Q, Floats] = {Q.TIED: rows.tied_s}
        self.tail: dict[Q, Floats] = {Q.TIED: rows.tied_s}
        self._take(Q.FORWARD, forward, gathers, ends_computing=True)
        self._take(Q.BACKWARD_INPUT, inputs, regathers, ends_computing=True, recomputes=True)
        for q in (Q.BACKWARD, Q.LAST_BACKWARD):
            self._take(q, backward, each, waits_for=regathers[0], recomputes=True)
        self._take(Q.END, backward, both, waits_for=regathers[0], recomputes=True)
        for q in (Q.BACKWARD_WEIGHT, Q.LAST_BACKWARD_WEIGHT):
            self._take(q, weight, each_weight)
        self._take(Q.END_WEIGHT, weight, reduces)
        self._await(
            forward,
            (rows.kind_updated_s, *(rows.updated_s * n for n in (u.head_parameters, u.tail_parameters))),
        )
        self._add(Q.STEP, rows.kind_step_s, *(rows.step_s * numbers for numbers in trainable))
        some = self._leave(Q.REDUCE, backward, reduces, every)
        self.again[Q.REDUCE] = np.where(some[:, None], -self._recompute_s * (rows.slow / rows.slow_comm), 0.0)
        self._leave(Q.REDUCE_AFTER_WEIGHT, weight, reduces, every)

    def _add(self, q: Q, groups: Floats, head: Floats, tail: Floats) -> None:
        self.groups[q], self.head[q], self.tail[q] = groups, head, tail

    def _take(
        self,
        q: Q,
        computed: _Parts,
        exchanged: _Parts,
        *,
        ends_computing: bool = False,
        waits_for: Floats | None = None,
        recomputes: bool = False,
    ) -> None:
        """A quantity of so much computation (layer groups, head, tail) beside so much communication. The gather of a
        chunk's first layer group is waited for (all of what is `exchanged` if nothing else is said), and where a pass
        `ends_computing` the last layer group has nothing beside it."""
        compute, comm = (part[0] @ self._of_kind + part[1] + part[2] for part in (computed, exchanged))
        led = compute + self._more * comm >= comm + self._less * compute
        self._add(q, *(
            np.where(_column(led, a), a + self._more * b, b + self._less * a)
            for a, b in zip(computed, exchanged, strict=True)
        ))  # fmt: skip
        if recomputes:
            self.again[q] = self._recompute_s * np.where(led, 1.0, self._less)[:, None]
        gathered = (exchanged[0] if waits_for is None else waits_for)[:, self._of_kind > 0]
        if not gathered.shape[1] or not (ends_computing or waits_for is not None):
            return
        first_s = (1.0 - self._more) * gathered.min(axis=1)
        last_s = (1.0 - self._less) * computed[0][:, self._of_kind > 0].min(axis=1) if ends_computing else 0.0
        self.chunks[q] = np.where(led, first_s, last_s) * (self._rows.least_per_chunk > 0)

    def _await(self, computed: _Parts, gathered: _Parts) -> None:
        """What first forwards are longer for updated parameters that are gathered beside them."""
        compute, comm = (part[0] @ self._of_kind + part[1] + part[2] for part in (computed, gathered))
        some = comm > (1.0 - self._less) * compute
        self._add(Q.UPDATED, *(
            np.where(_column(some, a), b - (1.0 - self._less) * a, 0.0) for a, b in zip(computed, gathered, strict=True)
        ))  # fmt: skip

    def _leave(self, q: Q, computed: _Parts, reduced: _Parts, every: Bools) -> Bools:
        """What computation leaves of a reduction beside it; nothing where layer groups may hide what others leave. Which
        variants have something left."""
        hidden = self._rows.slow / self._rows.slow_comm
        groups, head, tail = (b - a * hidden for a, b in zip(computed, reduced, strict=True))
        some = (groups > 0.0)[:, self._of_kind > 0].all(axis=1) & ~every
        # What the tail computes comes before the layer groups, whose reductions it cannot hide.
        self._add(q, *(np.where(_column(some, x), x, 0.0) for x in (groups, head, np.maximum(tail, 0.0))))
        return np.asarray(some)


_Parts = tuple[Floats, ...]  # of the layer groups [variant, kind], of the head, of the tail


def _column(rows: Bools, like: Floats) -> Bools:
    """A truth by variant, as a column where there is one by kind."""
    return rows[:, None] if like.ndim == 2 else rows


def weigh(problem: StageProblem, paths: SchedulePaths, below_s: float) -> tuple[PathWeights | None, int]:
    """The weights that bound one variant best, layers divided at will, and how many planes that took: Kelley's method.

    A linear program over the known paths proposes layers per chunk; walked through the timetable between these and the best
    ones so far, they show the path that the program lacked. Ends where the two agree, or the bound reaches `below_s`. What
    paths carried weight at the end are from then on among those of the schedule. None where devices are unlike.
    """
    if problem.device_of or problem.chunks == 1 or not problem.kinds:
        return None, 0
    binding = that_bind(problem)
    found, planes = _weighed(problem, paths, below_s, binding) if binding else (None, 0)
    if found is not None:
        return found, planes
    found, more = _weighed(problem, paths, below_s, ())
    return found, planes + more


def _weighed(
    problem: StageProblem, paths: SchedulePaths, below_s: float, binding: tuple[Row, ...]
) -> tuple[PathWeights | None, int]:
    """`weigh`, with these moments of memory."""
    program = Relaxation.of(replace(problem, memory=binding), memory=bool(binding))
    for row in paths.rows:
        program.add(row)
    walk, best_s = _Walk(problem, paths), inf
    best = np.zeros((2, problem.chunks, len(program.kinds)))
    if not binding:  # divided evenly, all fits
        best[0] = np.array([problem.kinds.count(kind) for kind in program.kinds]) / problem.chunks
        best_s, row = walk(best)
        program.add(row)
    for _ in range(MOST_PLANES):
        solved = program.solve()
        if solved is None:
            return None, len(program.planes)
        step_s, layers = solved
        if step_s >= min(below_s, best_s * (1 - CLOSE)):
            best = best if best_s < inf else layers
            break
        between = best + STEP * (layers - best) if best_s < inf else layers
        length_s, row = walk(between)
        if length_s < best_s:
            best, best_s = between, length_s
        if not program.add(row):
            length_s, row = walk(layers)
            if length_s < best_s:
                best, best_s = layers, length_s
            if not program.add(row):
                break
    weights = _weights(program, paths, best) if program.solve() is not None else None
    return weights, len(program.planes)


class _Walk:
    """A schedule's timetable walked with layers divided at will."""

    def __init__(self, problem: StageProblem, paths: SchedulePaths) -> None:
        self._paths = paths
        quantities = problem.quantities[: len(TIMES)]
        forms = [form for quantity in quantities for form in quantity.forms]
        kinds = list(dict.fromkeys(problem.kinds))
        each = [[form.kept, form.recomputed] for form in forms]
        self._each = np.array(each, dtype=np.float64)[:, :, kinds] / PS  # [form, kept or recomputed, kind]
        self._fixed = np.array([form.fixed for form in forms], dtype=np.float64) / PS  # [form, chunk]
        self._first = np.cumsum([0, *(len(quantity.forms) for quantity in quantities[:-1])])
        self._after = np.array(quantities[Q.SEND].forms[0].after, dtype=np.float64) / PS  # [cut]

    def __call__(self, layers: Floats) -> tuple[float, Row]:
        """Seconds with so many layers [kept and recomputed, chunk, kind], and the critical path."""
        taken = np.tensordot(self._each, layers, axes=([1, 2], [0, 2]))  # [form, chunk]
        every = np.maximum.reduceat(self._fixed + taken, self._first, axis=0)
        every = np.maximum(every, 0.0)
        if len(self._after):  # of the nearest cut
            cuts = np.cumsum(layers.sum(axis=(0, 2))).round().astype(np.int64)
            every[Q.SEND] += self._after[np.minimum(cuts, len(self._after) - 1)]
        costs = []
        for s in every.T.tolist():
            costs.append(
                StageCost(
                    forward=Phase(total_s=s[Q.FORWARD]), backward=Phase(total_s=s[Q.BACKWARD]),
                    backward_input=Phase(total_s=s[Q.BACKWARD_INPUT]),
                    backward_weight=Phase(total_s=s[Q.BACKWARD_WEIGHT]),
                    last_backward=Phase(total_s=s[Q.LAST_BACKWARD]),
                    last_backward_weight=Phase(total_s=s[Q.LAST_BACKWARD_WEIGHT]),
                    step=Phase(total_s=s[Q.STEP]), reduce_s=s[Q.REDUCE],
                    reduce_after_weight_s=s[Q.REDUCE_AFTER_WEIGHT],
                    send_s=s[Q.SEND], tied_s=s[Q.TIED], updated_s=s[Q.UPDATED],
                )
            )  # fmt: skip
        times = pipeline_times(self._paths.timetable, costs)
        return times.step_time_s, self._paths.critical(costs, times)


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
    held = held_weights(program, total) if program.moments else None
    return PathWeights(counts=counts, layers=tuple(best.sum(axis=(0, 2)).tolist()), held=held)
