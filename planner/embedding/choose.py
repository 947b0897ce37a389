"""The tables' choices of one strategy by CP-SAT: least bound on the step that fits in memory.

Variables: `n[c, o]`, tables of class c with choice o; booleans for choices and tiers in use; `z`, the step in whole
units of a billionth of what it takes at least.

    each table chosen     sum over o of n[c, o] = tables of c
    alike                 at most one choice of hot rows for the tables of a class in one tier
    passes                z >= micro-batches * (forward + exchange + gathers that no link hides) + backwards + step,
                          where the reductions beside the last backward slow it down
    reduction             z >= forwards, the backwards before the last, of that one what has no table, the tables'
                          gathers and reductions, + step
    one bucket            z >= passes + all reductions, unless there are gradients for more than one
    devices               held + saved + fetched <= capacity, held + peak <= capacity, held + temp[o] <= capacity
    hosts                 sum of host bytes <= capacity of a host
    excluded              not one of the choices that were simulated already
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, inf
from typing import Any

from ortools.sat.python import cp_model

from autoparallel.planner.embedding.options import Counts, TableClass
from autoparallel.planner.embedding.terms import Line, Terms, Whole

Expr = Any  # a linear expression of the solver, or a number
UNITS = 2**30  # in the least step: solver's numbers are whole
MOST = 2**50  # units of a step, a million times the least
MOST_EACH = 2**44  # of what one table adds; more is as bad
SLACK_BYTES = 256  # for each table: what rounding to whole shares adds up to
EFFORT = 2.0  # deterministic seconds of the solver: far more than these problems take


@dataclass(frozen=True, slots=True, kw_only=True)
class TableProblem:
    """One strategy with its tables open."""

    classes: tuple[TableClass, ...]
    terms: tuple[tuple[Terms, ...], ...]  # by class and option
    whole: Whole
    capacity_bytes: float
    host_capacity_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TableAnswer:
    """The choices with the least bound, and a bound on all that are left."""

    counts: Counts | None  # None: the solver did not decide in its time
    bound_s: float
    held_bytes: float  # likewise of what a device holds


@dataclass(frozen=True, slots=True)
class _Row:
    """What the step is no shorter than, in units, where all of some booleans hold."""

    expression: Expr
    where: tuple[Expr, ...] = ()


def least_s(problem: TableProblem) -> float:
    """A bound on every choice, whether it fits or not: each table's own least."""
    whole, m = problem.whole, problem.whole.micro_batches
    own = 0.0
    for one, row in zip(problem.classes, problem.terms, strict=True):
        own += len(one.tables) * min(
            m * t.backward_s + t.hot * (whole.optimizer.slope + whole.gather_hot_s) + t.update_s for t in row
        )
    step_s = max(whole.optimizer.fixed + own, whole.optimizer.floor) + whole.gather_s
    return m * (whole.forward_s + whole.backward_s) + step_s


def without_reductions(problem: TableProblem) -> TableProblem:
    """The same where gradients are reduced and parameters gathered in no time: a bound whatever these travel as."""
    free = tuple(
        tuple(replace(t, reduce_s=0.0, gather_s=0.0, exposed_s=(0.0, 0.0)) for t in row)
        for row in problem.terms
    )
    return replace(problem, terms=free, whole=replace(problem.whole, reduce_s=0.0))


def of_any(problem: TableProblem, each_s: float, trainable: int) -> TableProblem:
    """What no strategy goes below that differs from this one, which shards most, in what it shards and how it reduces gradients
    alone: `each_s` for each number at least, of which the model without tables trains so many."""
    whole = problem.whole
    terms = tuple(
        tuple(
            replace(
                t, backward_s=0.0, exposed_s=(0.0, 0.0), gather_s=0.0, reduce_s=each_s * t.hot, temp_bytes=0
            )
            for t in row
        )
        for row in problem.terms
    )
    least = replace(
        whole, after_s=0.0, reduce_s=each_s * trainable, bucket_bytes=0, every_micro=False, gather_s=0.0, gather_hot_s=0.0,
        optimizer=Line(floor=0.0, fixed=0.0, slope=whole.optimizer.slope), saved_bytes=0, peak_bytes=0,
    )  # fmt: skip
    return replace(problem, terms=terms, whole=least)


@dataclass(frozen=True, slots=True)
class _Scale:
    """Seconds in whole units, rounded down, of what a step does so many times."""

    per_s: float
    times: int = 1

    def __call__(self, seconds: float) -> int:
        return floor(min(seconds * self.per_s, MOST_EACH / self.times))

    def at_least(self, model: cp_model.CpModel, parts: Sequence[Expr]) -> cp_model.IntVar:
        """A variable no less than each of some expressions."""
        found = model.new_int_var(0, MOST // self.times, "")
        for part in parts:
            model.add(found >= part)
        return found


def choose(
    problem: TableProblem, *, below_s: float = inf, excluded: Sequence[Counts] = (), by_memory: bool = False
) -> TableAnswer | None:
    """The choices with the least bound (or, `by_memory`, that hold least) below `below_s`; None where there are none."""
    model = cp_model.CpModel()
    n = [
        [model.new_int_var(0, len(one.tables), f"n{c}_{o}") for o in range(len(one.options))]
        for c, one in enumerate(problem.classes)
    ]
    for one, row in zip(problem.classes, n, strict=True):
        model.add(sum(row) == len(one.tables))
        _alike(model, one, row)
    flat = [(n[c][o], t) for c, row in enumerate(problem.terms) for o, t in enumerate(row)]
    units = _Scale(UNITS / max(least_s(problem), 1e-12))
    below = MOST if below_s * units.per_s > MOST else max(ceil(below_s * units.per_s) - 1, 0)
    z = model.new_int_var(0, below, "z")
    for bound in _times(model, problem, n, flat, units):
        model.add(z >= bound.expression).only_enforce_if(*bound.where)
    held = problem.whole.held_bytes + sum(x * t.held_bytes for x, t in flat)
    _fits(model, problem, flat, held)
    _exclude(model, n, excluded)
    model.minimize(held if by_memory else z)
    return _solved(model, n, units, by_memory=by_memory)


def _alike(model: cp_model.CpModel, one: TableClass, row: Sequence[cp_model.IntVar]) -> None:
    for tier in dict.fromkeys(option.tier for option in one.options):
        own = [x for x, option in zip(row, one.options, strict=True) if option.tier == tier]
        if len(own) > 1:
            used = [model.new_bool_var("") for _ in own]
            model.add_at_most_one(used)
            for x, here in zip(own, used, strict=True):
                model.add(x <= len(one.tables) * here)


def _times(
    model: cp_model.CpModel,
    problem: TableProblem,
    n: Sequence[Sequence[cp_model.IntVar]],
    flat: Sequence[tuple[cp_model.IntVar, Terms]],
    units: _Scale,
) -> list[_Row]:
    """The rows that the step is no shorter than."""
    whole, m = problem.whole, problem.whole.micro_batches
    each = _Scale(units.per_s, m)
    there, back, updates = _tiers(model, problem, n, units)
    forward = each(whole.forward_s)
    backward = each(whole.backward_s) + sum(x * each(t.backward_s) for x, t in flat) + back
    hot_s = whole.optimizer.slope
    optimizer = units(whole.optimizer.fixed) + sum(x * units(t.hot * hot_s) for x, t in flat)
    step = units.at_least(model, [optimizer, units(whole.optimizer.floor)])
    step += updates + units(whole.gather_s) + sum(x * units(t.hot * whole.gather_hot_s) for x, t in flat)
    hot_reduce: Expr = sum(x * each(t.reduce_s) for x, t in flat)
    times = m if whole.every_micro else 1
    if not whole.overlap:
        reduce = hot_reduce + each(whole.reduce_s)
        return [_Row(m * (forward + there) + m * backward + times * reduce + step)]
    # Beside r seconds of reductions, computation takes r * slow_comm * (slow - 1) / slow longer; what of reductions
    # ends after it, more.
    beside = whole.slow_comm * (whole.slow - 1.0) / whole.slow
    slowed = sum(x * each(t.reduce_s * beside) for x, t in flat) + each(whole.reduce_s * beside)
    first, last = _an_end(model, problem, n, min), _an_end(model, problem, n, max)
    there += sum(x * each(t.exposed_s[0]) for x, t in flat) - sum(y * each(t.exposed_s[0]) for y, t in first)
    shown = sum(x * each(t.exposed_s[1]) for x, t in flat) - sum(y * each(t.exposed_s[1]) for y, t in last)
    gathers = sum(x * each(t.gather_s) for x, t in flat) - sum(y * each(t.gather_s) for y, t in last)
    before = m * (forward + there) + (m - times) * (backward + shown) + step
    several = model.new_bool_var("several")
    sent = whole.reduced_bytes + sum(x * (t.hot * whole.grad_bytes) for x, t in flat)
    model.add(sent >= whole.bucket_bytes).only_enforce_if(several)
    return [
        _Row(before + times * (backward + shown + slowed)),
        _Row(before + times * (each(whole.after_s) + hot_reduce + gathers)),
        _Row(before + times * (backward + shown + hot_reduce + each(whole.reduce_s)), (several.negated(),)),
    ]


def _an_end(
    model: cp_model.CpModel,
    problem: TableProblem,
    n: Sequence[Sequence[cp_model.IntVar]],
    end: Callable[..., int],
) -> list[tuple[cp_model.IntVar, Terms]]:
    """The choice of the model's first (`min`) or last table, one that its class has: the gather of the first may hide
    behind the exchange before it, that of the last, on the way back, behind what has no table."""
    positions = [end(table.position for table in one.tables) for one in problem.classes]
    which = positions.index(end(positions))
    chosen = [model.new_bool_var("") for _ in n[which]]
    model.add_exactly_one(chosen)
    for y, x in zip(chosen, n[which], strict=True):
        model.add(x >= y)
    return list(zip(chosen, problem.terms[which], strict=True))


def _tiers(
    model: cp_model.CpModel,
    problem: TableProblem,
    n: Sequence[Sequence[cp_model.IntVar]],
    units: _Scale,
) -> tuple[Expr, Expr, Expr]:
    """Exchanges there and back of one micro-batch, and the updates of cold rows once."""
    each = _Scale(units.per_s, problem.whole.micro_batches)
    lines: list[list[tuple[Line, Expr, Expr]]] = [[], [], []]
    for tier, (go, come) in problem.whole.exchange.items():
        cold = [
            (n[c][o], problem.terms[c][o])
            for c, one in enumerate(problem.classes)
            for o, option in enumerate(one.options)
            if option.tier == tier and problem.terms[c][o].fetched
        ]
        used = model.new_bool_var(f"used_{tier}")
        for x, _ in cold:
            model.add(x == 0).only_enforce_if(used.negated())
        for found, line in zip(lines, (go, come), strict=False):
            found.append((line, used, sum(x * each(line.slope * t.fetched) for x, t in cold)))
        lines[2].append((problem.whole.update[tier], used, sum(x * units(t.update_s) for x, t in cold)))
    there, back = (
        each.at_least(
            model,
            [
                sum(used * each(line.fixed) + more for line, used, more in found),
                sum(used * each(line.floor) for line, used, _ in found),
            ],
        )
        for found in lines[:2]
    )
    updates = [
        units.at_least(model, [used * units(line.fixed) + more, used * units(line.floor)])
        for line, used, more in lines[2]
    ]
    return there, back, sum(updates)


def _fits(
    model: cp_model.CpModel,
    problem: TableProblem,
    flat: Sequence[tuple[cp_model.IntVar, Terms]],
    held: Expr,
) -> None:
    """Devices and hosts have room."""
    whole = problem.whole
    room = floor(problem.capacity_bytes) + SLACK_BYTES * sum(len(one.tables) for one in problem.classes)
    fetched = sum(x * (t.fetched * whole.param_bytes) for x, t in flat)
    model.add(held + whole.saved_bytes + fetched <= room)
    model.add(held + whole.peak_bytes <= room)
    for x, t in flat:
        if t.temp_bytes > whole.peak_bytes:
            taken = model.new_bool_var("")
            model.add(x == 0).only_enforce_if(taken.negated())
            model.add(held + t.temp_bytes <= room).only_enforce_if(taken)
    if any(t.host_bytes for _, t in flat):
        host_room = floor(problem.host_capacity_bytes) + SLACK_BYTES * len(flat)
        model.add(sum(x * t.host_bytes for x, t in flat) <= host_room)


def _exclude(
    model: cp_model.CpModel, n: Sequence[Sequence[cp_model.IntVar]], excluded: Sequence[Counts]
) -> None:
    if excluded:
        every = [x for row in n for x in row]
        model.add_forbidden_assignments(every, [[v for row in counts for v in row] for counts in excluded])


def _solved(
    model: cp_model.CpModel, n: Sequence[Sequence[cp_model.IntVar]], units: _Scale, *, by_memory: bool
) -> TableAnswer | None:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.symmetry_level = 0
    solver.parameters.max_deterministic_time = EFFORT
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    assert status != cp_model.MODEL_INVALID, model.validate()
    known = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    counts = tuple(tuple(solver.value(x) for x in row) for row in n) if known else None
    bound = solver.best_objective_bound
    return TableAnswer(
        counts=counts,
        bound_s=0.0 if by_memory else max(bound, 0.0) / units.per_s,
        held_bytes=max(bound, 0.0) if by_memory else 0.0,
    )
