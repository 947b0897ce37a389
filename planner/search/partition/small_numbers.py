"""Stage problems in numbers that a solver multiplies without running over.

CP-SAT's presolve multiplies coefficients; with picoseconds and bytes as they are (a row of 2^50, OR-tools 9.15) it
was seen to call optimal what another partition beats. Fewer digits are enough, and rounding down keeps every bound true.
"""

from __future__ import annotations

from dataclasses import replace

from autoparallel.planner.search.partition.problem import Form, Quantity, Row, StageProblem, most_amounts

# Largest value of a row of paths, and of memory. A row adds up at most some ten thousand rounded numbers, so that a
# millionth of it is lost. Kind: formula.
LARGEST = 2**34


def in_small_numbers(problem: StageProblem, below: int | None = None) -> tuple[StageProblem, int]:
    """The problem in multiples of a unit of time and a unit of bytes, rounded down, and the unit of time. Partitions that
    were feasible stay so, and none is worth more than before."""
    most = most_amounts(problem)
    longest = max(
        (row.constant + sum(n * most[q][c] for q, c, n in row.terms) for row in problem.paths), default=0
    )
    if below is not None:
        longest = min(longest, below)
    unit = max(1, -(-longest // LARGEST))
    unit_bytes = max(1, -(-problem.capacity_bytes // LARGEST))
    timed = {q for row in problem.paths for q, _, _ in row.terms}
    kept = {q for row in problem.memory for q, _, _ in row.terms}
    if timed & kept:  # bytes are what is minimised
        unit = unit_bytes = max(unit, unit_bytes)
    units = [unit if q in timed else unit_bytes if q in kept else 1 for q in range(len(problem.quantities))]
    small = replace(
        problem,
        quantities=tuple(
            Quantity(forms=tuple(_divided(form, by) for form in quantity.forms))
            for quantity, by in zip(problem.quantities, units, strict=True)
        ),
        paths=tuple(_smaller(row, unit) for row in problem.paths),
        memory=tuple(_smaller(row, unit_bytes) for row in problem.memory),
        capacity_bytes=problem.capacity_bytes // unit_bytes,
    )
    return small, unit


def _smaller(row: Row, unit: int) -> Row:
    room = row.capacity_bytes
    return replace(row, constant=row.constant // unit, capacity_bytes=None if room is None else room // unit)


def _divided(form: Form, unit: int) -> Form:
    return Form(
        kept=tuple(a // unit for a in form.kept), recomputed=tuple(a // unit for a in form.recomputed),
        fixed=tuple(a // unit for a in form.fixed), when_all=form.when_all // unit, when_few=form.when_few // unit,
        when_none=tuple(a // unit for a in form.when_none), last=tuple(a // unit for a in form.last),
        after=tuple(a // unit for a in form.after),
    )  # fmt: skip
