"""Blocks to chunks, and how many of each chunk's blocks are recomputed in full: an integer program for CP-SAT.

    least[c] <= n[c] <= most[c], sum = N  every repeated block stands in one chunk, in model order
    0 <= k[c] <= n[c]                     the first k[c] blocks of chunk c are recomputed in full
    A[q, c](n, k)                         what chunk c needs of quantity q (seconds, bytes): the largest of some sums
                                          over its blocks, with a surcharge where k[c] = n[c] > 0 or n[c] = 0
    sum a[q, c] A[q, c] + const <= T      for each path: no path through the schedule takes longer than the step
    sum a[q, c] A[q, c] + const <= cap    for each moment of each rank that can be its memory's peak
    minimise T

Everything is in integer picoseconds and bytes, rounded down: what CP-SAT proves is a true lower bound. The
caller prepares all numbers (`planner/inner.py`); nothing is computed here but the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

# Deterministic time that one solve may take before its bound is taken as it is (CP-SAT's own unit, about a
# second). Kind: formula: far above what the largest chain here needs.
EFFORT = 0.5
Linear = Any  # a linear expression of CP-SAT: its own alias admits every numpy scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A sum over a chunk's blocks, in integers: per kind of block kept or recomputed, per chunk besides,
    `when_all` more where the chunk recomputes every block, `when_none[chunk]` more where it has none."""

    kept: tuple[int, ...]
    recomputed: tuple[int, ...]
    fixed: tuple[int, ...]
    when_all: int = 0
    when_none: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """What a chunk needs of one thing: the largest of its forms."""

    forms: tuple[Form, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A linear form: sum of coefficient * quantity of a chunk, plus a constant. Terms: (quantity, chunk, factor)."""

    terms: tuple[tuple[int, int, int], ...]
    constant: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """Blocks per chunk, and of these how many are recomputed in full."""

    blocks: tuple[int, ...]
    recomputed: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProblem:
    """Kinds of the repeated blocks in model order, quantities, and the rows over them."""

    kinds: tuple[int, ...]
    chunks: int
    quantities: tuple[Quantity, ...]
    paths: tuple[Row, ...]  # each <= T
    memory: tuple[Row, ...]  # each <= capacity_bytes
    capacity_bytes: int
    recompute: bool  # whether blocks may be recomputed one by one
    least: tuple[int, ...]  # blocks that each chunk must have
    most: tuple[int, ...]  # and may have
    blocks: tuple[int, ...] | None = None  # fixed by the user
    recomputed: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAnswer:
    """The best deal of a stage problem; no deal is below `bound` (equal to `value` when proved). Where the solver
    found none in its time there is only the bound."""

    deal: Deal | None
    value: int
    bound: int


def chunk_amount(problem: StageProblem, quantity: Quantity, deal: Deal, chunk: int) -> int:
    """What `chunk` needs of `quantity` under a deal."""
    start = sum(deal.blocks[:chunk])
    kinds = problem.kinds[start : start + deal.blocks[chunk]]
    k = deal.recomputed[chunk]
    return max(
        form.fixed[chunk]
        + sum(form.recomputed[kind] for kind in kinds[:k])
        + sum(form.kept[kind] for kind in kinds[k:])
        + (form.when_all if k == len(kinds) > 0 else 0)
        + (form.when_none[chunk] if form.when_none and not kinds else 0)
        for form in quantity.forms
    )


def row_value(problem: StageProblem, row: Row, deal: Deal) -> int:
    """A row's value under a deal, without a solver."""
    return row.constant + sum(
        factor * chunk_amount(problem, problem.quantities[q], deal, c) for q, c, factor in row.terms
    )


def deal_fits(problem: StageProblem, deal: Deal) -> bool:
    """Whether a deal respects every constraint of the model, without a solver."""
    return (
        len(deal.blocks) == problem.chunks
        and sum(deal.blocks) == len(problem.kinds)
        and all(a <= n <= b for a, n, b in zip(problem.least, deal.blocks, problem.most, strict=True))
        and all(0 <= k <= n for n, k in zip(deal.blocks, deal.recomputed, strict=True))
        and (problem.recompute or problem.recomputed is not None or not any(deal.recomputed))
        and problem.blocks in (None, deal.blocks)
        and problem.recomputed in (None, deal.recomputed)
        and all(row_value(problem, row, deal) <= problem.capacity_bytes for row in problem.memory)
    )


def deal_value(problem: StageProblem, deal: Deal) -> int:
    """The longest of the paths under a deal: what the model minimises."""
    return max((row_value(problem, row, deal) for row in problem.paths), default=0)


def solve_stages(
    problem: StageProblem,
    *,
    excluded: Sequence[Deal] = (),
    below: int | None = None,
    effort: float = EFFORT,
) -> StageAnswer | None:
    """The best deal with a value below `below` that is not excluded; None where there is none.

    Deterministic: one worker, a fixed seed, and `effort` in deterministic time.
    """
    if problem.chunks == 1:
        return _one_chunk(problem, excluded, below)
    few = _few_deals(problem)
    if few is not None:
        return _best_of(problem, [deal for deal in few if deal not in excluded], below)
    model = cp_model.CpModel()
    builder = _Builder(model, problem)
    builder.every_block_in_one_chunk()
    builder.as_fixed_by_the_user()
    builder.fits_memory()
    for deal in excluded:
        builder.differs_from(deal)
    step = builder.no_path_longer_than_the_step(below)
    model.minimize(step)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # Ctrl-C stays Python's, during the solve and after
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    assert status != cp_model.MODEL_INVALID, model.validate()
    bound = max(int(solver.best_objective_bound), 0)
    if status == cp_model.UNKNOWN:
        return StageAnswer(deal=None, value=bound, bound=bound)
    deal = Deal(
        blocks=tuple(solver.value(n) for n in builder.blocks),
        recomputed=tuple(solver.value(k) for k in builder.recomputed),
    )
    return StageAnswer(deal=deal, value=deal_value(problem, deal), bound=bound)


def _few_deals(problem: StageProblem) -> list[Deal] | None:
    """All deals of several chunks, where nothing is open; else None."""
    blocks, recomputed = problem.blocks, problem.recomputed
    if sum(problem.least) == len(problem.kinds):
        blocks = problem.least
    if recomputed is None and not problem.recompute:
        recomputed = (0,) * problem.chunks
    if blocks is None or recomputed is None:
        return None
    return [Deal(blocks=blocks, recomputed=recomputed)]


def _one_chunk(problem: StageProblem, excluded: Sequence[Deal], below: int | None) -> StageAnswer | None:
    """One chunk has only its number of recomputed blocks open: all are tried at once."""
    n = len(problem.kinds)
    numbers = np.arange(n + 1 if problem.recompute or problem.recomputed is not None else 1)
    amounts = [_amounts_by_number(problem, quantity)[: len(numbers)] for quantity in problem.quantities]

    def values(row: Row) -> NDArray[np.int64]:
        return np.asarray(row.constant + sum(factor * amounts[q] for q, _, factor in row.terms) + 0 * numbers)

    fits = np.ones(len(numbers), dtype=np.bool_)
    for row in problem.memory:
        fits &= values(row) <= problem.capacity_bytes
    for deal in excluded:
        fits[deal.recomputed[0]] = False
    if problem.recomputed is not None:
        fits &= numbers == problem.recomputed[0]
    value = np.max([values(row) for row in problem.paths] or [0 * numbers], axis=0)
    if below is not None:
        fits &= value < below
    if not fits.any():
        return None
    best = int(np.flatnonzero(fits)[np.argmin(value[fits])])
    found = int(value[best])
    return StageAnswer(deal=Deal(blocks=(n,), recomputed=(best,)), value=found, bound=found)


def _amounts_by_number(problem: StageProblem, quantity: Quantity) -> NDArray[np.int64]:
    """A quantity of the only chunk, for every number of its blocks that are recomputed."""
    kinds = np.array(problem.kinds, dtype=np.int64)
    forms = []
    for form in quantity.forms:
        kept, again = (np.array(side, dtype=np.int64)[kinds] for side in (form.kept, form.recomputed))
        amount = form.fixed[0] + kept.sum() + np.concatenate([[0], np.cumsum(again - kept)])
        if len(kinds):
            amount[-1] += form.when_all
        elif form.when_none:
            amount += form.when_none[0]
        forms.append(amount)
    return np.asarray(np.max(forms, axis=0), dtype=np.int64)


def _best_of(problem: StageProblem, deals: Sequence[Deal], below: int | None) -> StageAnswer | None:
    """The best of a few deals, the first of equals."""
    best: StageAnswer | None = None
    for deal in deals:
        limit = below if best is None else best.value
        if limit is not None and deal_value(problem, deal) >= limit:
            continue
        if deal_fits(problem, deal):
            value = deal_value(problem, deal)
            best = StageAnswer(deal=deal, value=value, bound=value)
    return best


class _Builder:
    """The variables of one model; each method adds one named constraint."""

    def __init__(self, model: cp_model.CpModel, problem: StageProblem) -> None:
        self.model, self.problem = model, problem
        spare = len(problem.kinds) - sum(problem.least)
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
        self.spreads: dict[int, list[int]] = {}
        self.all: dict[int, cp_model.IntVar] = {}
        self.none: dict[int, cp_model.IntVar] = {}
        if not self.uniform:
            self._positions()

    def _positions(self) -> None:
        """cuts[c]: where chunk c starts; turns[c]: where its recomputed blocks end."""
        model, n = self.model, len(self.problem.kinds)
        self.cuts = [model.new_int_var(0, n, f"s{c}") for c in range(self.problem.chunks + 1)]
        self.turns = [model.new_int_var(0, n, f"r{c}") for c in range(self.problem.chunks)]
        model.add(self.cuts[0] == 0)
        for c, (blocks, recomputed) in enumerate(zip(self.blocks, self.recomputed, strict=True)):
            model.add(self.cuts[c + 1] == self.cuts[c] + blocks)
            model.add(self.turns[c] == self.cuts[c] + recomputed)

    def amounts(self, index: int) -> list[Linear]:
        """Per chunk, how much of a quantity it needs: A[q, c], or a variable that is at least that."""
        if index not in self.sums:
            quantity = self.problem.quantities[index]
            forms = [self._form(form) for form in quantity.forms]
            self.sums[index] = [
                self._at_least([form[c] for form in forms], self._most_of(index, c))
                for c in range(self.problem.chunks)
            ]
        return self.sums[index]

    def _form(self, form: Form) -> list[Linear]:
        amounts = self._counted(form) if self.uniform else self._prefixed(form)
        if form.when_all:
            amounts = [amount + form.when_all * self._all_recomputed(c) for c, amount in enumerate(amounts)]
        return [
            amount + form.when_none[c] * self._no_blocks(c)
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
        """1 where the chunk has blocks and recomputes every one of them."""
        if chunk not in self.all:
            self.all[chunk] = self.model.new_bool_var(f"all{chunk}")
            left = self.blocks[chunk] - self.recomputed[chunk]
            self.model.add(left >= 1).only_enforce_if(~self.all[chunk], ~self._no_blocks(chunk))
        return self.all[chunk]

    def _no_blocks(self, chunk: int) -> cp_model.IntVar:
        """1 where, and only where, the chunk has no blocks."""
        if chunk not in self.none:
            self.none[chunk] = self.model.new_bool_var(f"none{chunk}")
            if self.problem.least[chunk]:
                self.model.add(self.none[chunk] == 0)
            else:
                self.model.add(self.blocks[chunk] >= 1).only_enforce_if(~self.none[chunk])
                self.model.add(self.blocks[chunk] == 0).only_enforce_if(self.none[chunk])
        return self.none[chunk]

    def _counted(self, form: Form) -> list[Linear]:
        kind = self.problem.kinds[0]
        kept, extra = form.kept[kind], form.recomputed[kind] - form.kept[kind]
        return [
            fixed + kept * n + extra * k
            for fixed, n, k in zip(form.fixed, self.blocks, self.recomputed, strict=True)
        ]

    def _prefixed(self, form: Form) -> list[Linear]:
        kinds = self.problem.kinds
        kept = list(accumulate((form.kept[k] for k in kinds), initial=0))
        extra = list(accumulate((form.recomputed[k] - form.kept[k] for k in kinds), initial=0))
        at_cut = [self._looked_up(cut, kept) for cut in self.cuts]
        found: list[Linear] = []
        for c, fixed in enumerate(form.fixed):
            amount = fixed + at_cut[c + 1] - at_cut[c]
            if self.problem.recompute and any(extra):
                amount += self._looked_up(self.turns[c], extra) - self._looked_up(self.cuts[c], extra)
            found.append(amount)
        return found

    def _looked_up(self, position: cp_model.IntVar, table: list[int]) -> Linear:
        value = self.model.new_int_var(min(table), max(table), "")
        self.model.add_element(position, table, value)
        return value

    def row(self, row: Row) -> Linear:
        return row.constant + sum(factor * self.amounts(q)[c] for q, c, factor in row.terms)

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
            self.model.add(self.row(row) <= self.problem.capacity_bytes)

    def no_path_longer_than_the_step(self, below: int | None) -> cp_model.IntVar:
        """T >= every path; T < below."""
        most = max(map(self._most_of_row, self.problem.paths), default=0)
        if below is not None:
            most = max(min(most, below - 1), 0)
        step = self.model.new_int_var(0, most, "T")
        for row in self.problem.paths:
            self.model.add(self.row(row) <= step)
        return step

    def _most_of(self, index: int, chunk: int) -> int:
        """More than any deal makes of a quantity in a chunk."""
        if index not in self.spreads:
            self.spreads[index] = [
                form.when_all
                + max((0, *form.when_none))
                + sum(
                    map(
                        max,
                        (form.kept[k] for k in self.problem.kinds),
                        (form.recomputed[k] for k in self.problem.kinds),
                    )
                )
                for form in self.problem.quantities[index].forms
            ]
        forms = self.problem.quantities[index].forms
        return max(abs(f.fixed[chunk]) + s for f, s in zip(forms, self.spreads[index], strict=True))

    def _most_of_row(self, row: Row) -> int:
        return max(0, row.constant) + sum(n * self._most_of(q, c) for q, c, n in row.terms)

    def differs_from(self, deal: Deal) -> None:
        """At least one n[c] or k[c] is another than in `deal`."""
        others = []
        pairs = [
            *zip(self.blocks, deal.blocks, strict=True),
            *zip(self.recomputed, deal.recomputed, strict=True),
        ]
        for variable, value in pairs:
            other = self.model.new_bool_var("")
            self.model.add(variable != value).only_enforce_if(other)
            others.append(other)
        self.model.add_bool_or(others)
