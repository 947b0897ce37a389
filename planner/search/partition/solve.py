"""Blocks to chunks, and how many of each chunk's blocks are recomputed in full: an integer program for CP-SAT.

    least[c] <= n[c] <= most[c], sum = N  every repeated block stands in one chunk, in model order
    0 <= k[c] <= n[c]                     the first k[c] blocks of chunk c are recomputed in full
    A[q, c](n, k)                         what chunk c needs of quantity q (seconds, bytes): the largest of some sums
                                          over its blocks, with a surcharge where k[c] = n[c] > 0, n[c] <= 1 or 0
    sum a[q, c] A[q, c] + const <= T      for each path: no path through the schedule takes longer than the step
    sum a[q, c] A[q, c] + const <= cap    for each moment of each rank that can be its memory's peak
    minimise T

Everything is in integers, rounded down (`in_small_numbers`): what CP-SAT proves is a true lower bound. The
caller prepares all numbers (`planner/search/partition/inner.py`); nothing is computed here but the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from ortools.sat.python import cp_model

from autoparallel.planner.search.partition.enumeration import TooMany, best_of_all, can_be_cut
from autoparallel.planner.search.partition.problem import (
    Form,
    Partition,
    Row,
    StageAnswer,
    StageProblem,
    most_amounts,
    partition_fits,
    partition_value,
    starts_of,
    without_idle_rows,
)
from autoparallel.planner.search.partition.small_numbers import in_small_numbers

# Deterministic time that one solve may take before its bound is taken as it is (CP-SAT's own unit, several seconds).
# Kind: formula: most solves take a tenth of it.
EFFORT = 0.13
SHORT = 0.1  # of it, for a first look at a problem, and where a good partition is wanted and no proof
PER_EFFORT = 5500.0  # milliseconds on one core for one unit of it. Kind: measured
# Milliseconds to state a problem to CP-SAT and start it: alone, for each term of a row, and for each chunk of a partition that is
# excluded. Kind: measured
PER_MODEL, PER_TERM, PER_EXCLUDED = 2.5, 0.008, 0.01
PER_NUMBER = (
    1e-6  # and for each partition and term of a row, where all partitions are looked at. Kind: measured
)
FEW_CHUNKS = 4  # up to which presolving takes longer than the rest of the solve. Kind: measured
Linear = Any  # a linear expression of CP-SAT: its own alias admits every numpy scalar


def solve_stages(
    problem: StageProblem,
    *,
    excluded: Sequence[Partition] = (),
    below: int | None = None,
    effort: float = EFFORT,
    spend: Callable[[float], None] | None = None,
    hint: Partition | None = None,
    fitted: bool = False,
) -> StageAnswer | None:
    """The best partition with a value below `below` that is not excluded; None where there is none. Where all that is excluded `fitted`
    when it was simulated, partitions that are the same with more recomputed may be left out.

    Where few ways to cut the layers may be the best, by looking at all of them (`enumeration.py`), by CP-SAT otherwise.
    Deterministic: one worker, a fixed seed, and `effort` in deterministic time. `spend` is told how much work it was, about
    milliseconds, the same on every machine.
    """
    known = _Known(excluded=tuple(excluded), below=below, effort=effort, spend=spend)
    if not can_be_cut(problem):
        return _by_cp_sat(problem, known, hint)
    if spend is not None:
        spend(PER_MODEL + PER_NUMBER * (len(problem.kinds) + 1) ** 2 * problem.terms)

    def ask(blocks: tuple[int, ...]) -> StageAnswer | None:
        return _by_cp_sat(replace(problem, blocks=blocks), known)

    try:
        return best_of_all(problem, ask, excluded, _no_longer(problem, excluded, below, hint), fitted=fitted)
    except TooMany:
        return _by_cp_sat(problem, known, hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What is told of a problem beside itself: see `solve_stages`."""

    excluded: tuple[Partition, ...] = ()
    below: int | None = None
    effort: float
    spend: Callable[[float], None] | None


def _by_cp_sat(problem: StageProblem, known: _Known, hint: Partition | None = None) -> StageAnswer | None:
    """`solve_stages`, by CP-SAT."""
    excluded, below, spend = known.excluded, known.below, known.spend
    if not sum(problem.least) <= len(problem.kinds) <= sum(problem.most):
        return None
    small, unit = in_small_numbers(without_idle_rows(problem), below)
    model = cp_model.CpModel()
    builder = _Builder(model, small)
    builder.every_block_in_one_chunk()
    builder.as_fixed_by_the_user()
    builder.fits_memory()
    for partition in excluded:
        builder.differs_from(partition)
    step = builder.no_path_longer_than_the_step(None if below is None else -(-below // unit))
    model.minimize(step)
    if hint is not None:
        for variable, value in zip(
            (*builder.blocks, *builder.recomputed), (*hint.blocks, *hint.recomputed), strict=True
        ):
            model.add_hint(variable, value)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # Ctrl-C stays Python's, during the solve and after
    solver.parameters.random_seed = 0
    solver.parameters.cp_model_presolve = problem.chunks > FEW_CHUNKS
    solver.parameters.cp_model_probing_level = 0  # takes longer than the rest of the solve. Kind: measured
    solver.parameters.max_deterministic_time = known.effort
    status = solver.solve(model)
    if spend is not None:
        stated = PER_MODEL + PER_TERM * small.terms + PER_EXCLUDED * small.chunks * len(excluded)
        spend(stated + PER_EFFORT * solver.response_proto.deterministic_time)
    if status == cp_model.INFEASIBLE:
        return None
    assert status != cp_model.MODEL_INVALID, model.validate()
    bound = max(int(solver.best_objective_bound), 0) * unit
    if status == cp_model.UNKNOWN:
        return StageAnswer(partition=None, value=bound, bound=bound)
    partition = Partition(
        blocks=tuple(solver.value(n) for n in builder.blocks),
        recomputed=tuple(solver.value(k) for k in builder.recomputed),
    )
    return StageAnswer(partition=partition, value=partition_value(problem, partition), bound=bound)


def _no_longer(
    problem: StageProblem, excluded: Sequence[Partition], below: int | None, hint: Partition | None
) -> int | None:
    """What the best partition surely stays below: `below`, and just above what is known of a `hint`."""
    if hint is None or hint in excluded or not partition_fits(problem, hint):
        return below
    value = partition_value(problem, hint) + 1
    return value if below is None else min(value, below)


def solve_for_memory(
    problem: StageProblem,
    excluded: Sequence[Partition],
    below_bytes: int,
    effort: float,
    spend: Callable[[float], None],
) -> StageAnswer | None:
    """The partition with the least peak, the fastest of these; its value and bound are bytes."""
    peaks = tuple(row for row in problem.memory if row.capacity_bytes is None)
    others = tuple(row for row in problem.memory if row.capacity_bytes is not None)
    by_bytes = replace(problem, paths=peaks, memory=others)
    known = _Known(excluded=tuple(excluded), below=below_bytes, effort=effort, spend=spend)
    least = _by_cp_sat(by_bytes, known)  # of which nearly all cuts have to be asked for what is recomputed
    if least is None or least.partition is None:
        return least
    tight = replace(problem, capacity_bytes=least.value)
    fastest = _by_cp_sat(tight, replace(known, below=None))
    partition = fastest.partition if fastest is not None else None
    return least if partition is None else replace(least, partition=partition)


class _Builder:
    """The variables of one model; each method adds one named constraint."""

    def __init__(self, model: cp_model.CpModel, problem: StageProblem) -> None:
        self.model, self.problem = model, problem
        spare = len(problem.kinds) - sum(problem.least)
        self.most = most_amounts(problem)
        self.blocks = [
            model.new_int_var(least, min(least + max(spare, 0), most), f"n{c}")
            for c, (least, most) in enumerate(zip(problem.least, problem.most, strict=True))
        ]
        self.recomputed = [
            model.new_int_var(0, least + max(spare, 0) if problem.recompute else 0, f"k{c}")
            for c, least in enumerate(problem.least)
        ]
        self.uniform = len(set(problem.kinds)) <= 1
        self.sums: dict[int, list[Linear]] = {}
        self.all: dict[int, cp_model.IntVar] = {}
        self.few: dict[tuple[int, int], cp_model.IntVar] = {}
        self.last: dict[tuple[int, tuple[int, ...]], Linear] = {}
        self.after: dict[tuple[int, tuple[int, ...]], Linear] = {}
        self.cuts = list[cp_model.IntVar]()
        # Where each chunk may start, and the last one end. Presolving finds that too, one chunk further at each look at all
        # constraints, which it does not count as work.
        self.starts = starts_of(len(problem.kinds), problem.least, problem.most)
        if not self.uniform:
            self._positions()

    def _positions(self) -> None:
        """cuts[c]: where chunk c starts; turns[c]: where its recomputed blocks end. And of each kind, how many blocks
        stand before these."""
        self._cut()
        self.before_cuts = list(map(self._of_each_kind, self.cuts, self.starts))
        self.before_turns: list[dict[int, Linear]] = []
        for c, (cut, recomputed) in enumerate(zip(self.cuts, self.recomputed, strict=False)):
            places = range(self.starts[c].start, self.starts[c + 1].stop)
            turn = self.model.new_int_var(places[0], places[-1], f"r{c}")
            self.model.add(turn == cut + recomputed)
            if self.problem.recompute:
                self.before_turns.append(self._of_each_kind(turn, places))

    def _cut(self) -> None:
        """cuts[c], unless it is there."""
        if not self.cuts:
            self.cuts = [
                self.model.new_int_var(places[0], places[-1], f"s{c}") for c, places in enumerate(self.starts)
            ]
            for start, end, blocks in zip(self.cuts, self.cuts[1:], self.blocks, strict=False):
                self.model.add(end == start + blocks)

    def _of_each_kind(self, position: cp_model.IntVar, places: range) -> dict[int, Linear]:
        """By kind, how many of the blocks before a position among these `places` are of it; what is not of the others is of the last."""
        *kinds, last = sorted(set(self.problem.kinds))
        found: dict[int, Linear] = {}
        for kind in kinds:
            table = list(accumulate((int(k == kind) for k in self.problem.kinds), initial=0))
            found[kind] = self.model.new_int_var(table[places[0]], table[places[-1]], "")
            self.model.add_element(position, table, found[kind])
        return {**found, last: position - sum(found.values())}

    def amounts(self, index: int) -> list[Linear]:
        """Per chunk, how much of a quantity it needs: A[q, c], or a variable that is at least that."""
        if index not in self.sums:
            quantity = self.problem.quantities[index]
            forms = [self._form(form) for form in quantity.forms]
            self.sums[index] = [
                self._at_least([form[c] for form in forms], self.most[index][c])
                for c in range(self.problem.chunks)
            ]
        return self.sums[index]

    def _form(self, form: Form) -> list[Linear]:
        amounts = self._counted(form) if self.uniform else self._prefixed(form)
        if form.when_all:
            amounts = [amount + form.when_all * self._all_recomputed(c) for c, amount in enumerate(amounts)]
        if form.last:
            amounts = [amount + self._of_last(c, form.last) for c, amount in enumerate(amounts)]
        if form.after:
            amounts = [amount + self._at_cut(c, form.after) for c, amount in enumerate(amounts)]
        if form.when_few:
            amounts = [amount + form.when_few * self._at_most(c, 1) for c, amount in enumerate(amounts)]
        return [
            amount + form.when_none[c] * self._at_most(c, 0)
            if form.when_none and form.when_none[c]
            else amount
            for c, amount in enumerate(amounts)
        ]

    def _at_least(self, forms: list[Linear], most: int) -> Linear:
        if len(forms) == 1:
            return forms[0]
        largest = self.model.new_int_var(-most, most, "")
        for form in forms:
            self.model.add(largest >= form)
        return largest

    def _all_recomputed(self, chunk: int) -> cp_model.IntVar:
        """1 where, and only where, the chunk has blocks and recomputes every one of them."""
        if chunk not in self.all:
            every = self.all[chunk] = self.model.new_bool_var(f"all{chunk}")
            left = self.blocks[chunk] - self.recomputed[chunk]
            self.model.add(left >= 1).only_enforce_if(~every, ~self._at_most(chunk, 0))
            self.model.add(left <= 0).only_enforce_if(every)
            self.model.add_implication(every, ~self._at_most(chunk, 0))
        return self.all[chunk]

    def _at_most(self, chunk: int, number: int) -> cp_model.IntVar:
        """1 where, and only where, the chunk has at most so many blocks."""
        if (chunk, number) not in self.few:
            few = self.few[chunk, number] = self.model.new_bool_var(f"few{number}_{chunk}")
            self.model.add(self.blocks[chunk] > number).only_enforce_if(~few)
            self.model.add(self.blocks[chunk] <= number).only_enforce_if(few)
        return self.few[chunk, number]

    def _of_last(self, chunk: int, of_kind: tuple[int, ...]) -> Linear:
        """No less than `of_kind` has for the kind of the chunk's last block; 0 where it has none."""
        if (chunk, of_kind) not in self.last:
            most = max(of_kind)
            here: Linear = of_kind[self.problem.kinds[0]]
            if not self.uniform:
                here = self.model.new_int_var(0, most, "")
                self.model.add_element(
                    self.cuts[chunk + 1], [0, *(of_kind[k] for k in self.problem.kinds)], here
                )
            if self.problem.least[chunk] == 0:
                some = self.model.new_int_var(0, most, "")
                self.model.add(some >= here).only_enforce_if(~self._at_most(chunk, 0))
                here = some
            self.last[chunk, of_kind] = here
        return self.last[chunk, of_kind]

    def _at_cut(self, chunk: int, table: tuple[int, ...]) -> Linear:
        """What a table has where the chunk ends."""
        if (chunk, table) not in self.after:
            self._cut()
            here = self.after[chunk, table] = self.model.new_int_var(0, max(table), "")
            self.model.add_element(self.cuts[chunk + 1], list(table), here)
        return self.after[chunk, table]

    def _counted(self, form: Form) -> list[Linear]:
        kind = self.problem.kinds[0]
        kept, extra = form.kept[kind], form.recomputed[kind] - form.kept[kind]
        return [
            fixed + kept * n + extra * k
            for fixed, n, k in zip(form.fixed, self.blocks, self.recomputed, strict=True)
        ]

    def _prefixed(self, form: Form) -> list[Linear]:
        found: list[Linear] = []
        extra = {kind: form.recomputed[kind] - form.kept[kind] for kind in dict.fromkeys(self.problem.kinds)}
        for c, fixed in enumerate(form.fixed):
            before, after = self.before_cuts[c], self.before_cuts[c + 1]
            amount = fixed + sum(form.kept[kind] * (after[kind] - before[kind]) for kind in before)
            if self.before_turns and any(extra.values()):
                turned = self.before_turns[c]
                amount += sum(extra[kind] * (turned[kind] - before[kind]) for kind in before)
            found.append(amount)
        return found

    def row(self, row: Row) -> Linear:
        amounts = [self.amounts(q)[c] for q, c, _ in row.terms]
        return row.constant + cp_model.LinearExpr.weighted_sum(
            amounts, [factor for _, _, factor in row.terms]
        )

    def every_block_in_one_chunk(self) -> None:
        """sum n[c] = N and k[c] <= n[c]."""
        self.model.add(sum(self.blocks) == len(self.problem.kinds))
        for n, k in zip(self.blocks, self.recomputed, strict=True):
            self.model.add(k <= n)

    def as_fixed_by_the_user(self) -> None:
        """n = pipeline.stage_blocks and k = recompute.per_stage where these are given."""
        for variables, fixed in (
            (self.blocks, self.problem.blocks),
            (self.recomputed, self.problem.recomputed),
        ):
            for variable, value in zip(variables, fixed or (), strict=False):
                self.model.add(variable == value)

    def fits_memory(self) -> None:
        """Every moment's bytes <= capacity."""
        for row in self.problem.memory:
            self.model.add(self.row(row) <= self.problem.room(row))

    def no_path_longer_than_the_step(self, below: int | None) -> cp_model.IntVar:
        """T >= every path; T < below."""
        most = max(map(self._most_of_row, self.problem.paths), default=0)
        if below is not None:
            most = max(min(most, below - 1), 0)
        step = self.model.new_int_var(0, most, "T")
        for row in self.problem.paths:
            self.model.add(self.row(row) <= step)
        return step

    def _most_of_row(self, row: Row) -> int:
        return max(0, row.constant) + sum(n * self.most[q][c] for q, c, n in row.terms)

    def differs_from(self, partition: Partition) -> None:
        """At least one n[c] or k[c] is another than in `partition`."""
        others = []
        pairs = [
            *zip(self.blocks, partition.blocks, strict=True),
            *zip(self.recomputed, partition.recomputed, strict=True),
        ]
        for variable, value in pairs:
            other = self.model.new_bool_var("")
            self.model.add(variable != value).only_enforce_if(other)
            others.append(other)
        self.model.add_bool_or(others)
