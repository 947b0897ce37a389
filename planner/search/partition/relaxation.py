"""The linear relaxation of a stage problem: layers and recomputed layers of each chunk as real numbers, by GLOP.

    minimise T    every known path <= T;  0 <= k[c] <= n[c];  sum n[c] = N;  optionally every moment of memory <= capacity

A layer takes the least of the kinds that there are, and what only some partitions pay is left out: no partition is below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from ortools.linear_solver import pywraplp

from autoparallel.planner.search.partition.forms import PS
from autoparallel.planner.search.partition.problem import Form, Row, StageProblem

GIB = 2.0**30


@dataclass(slots=True)
class Relaxation:
    """The linear program of one stage problem; seconds, and GiB of memory."""

    problem: StageProblem
    solver: pywraplp.Solver
    blocks: list[pywraplp.Variable]
    recomputed: list[pywraplp.Variable | None]
    step: pywraplp.Variable
    planes: dict[Row, pywraplp.Constraint] = field(default_factory=dict)
    _amounts: dict[tuple[int, int, float], pywraplp.Variable] = field(default_factory=dict)

    @staticmethod
    def of(problem: StageProblem, *, memory: bool) -> Relaxation:
        """The relaxation without any path."""
        solver = pywraplp.Solver.CreateSolver("GLOP")
        whole = solver.Constraint(float(len(problem.kinds)), float(len(problem.kinds)))
        blocks: list[pywraplp.Variable] = []
        recomputed: list[pywraplp.Variable | None] = []
        for least, most in zip(problem.least, problem.most, strict=True):
            blocks.append(solver.NumVar(float(least), float(most), ""))
            whole.SetCoefficient(blocks[-1], 1.0)
            recomputed.append(None)
            if memory and problem.recompute and problem.recomputed is None:
                recomputed[-1] = solver.NumVar(0.0, float(most), "")
                few = solver.Constraint(0.0, solver.infinity())
                few.SetCoefficient(blocks[-1], 1.0)
                few.SetCoefficient(recomputed[-1], -1.0)
        step = solver.NumVar(0.0, solver.infinity(), "T")
        solver.Objective().SetCoefficient(step, 1.0)
        solver.Objective().SetMinimization()
        found = Relaxation(problem, solver, blocks, recomputed, step)
        if memory:
            for row in problem.memory:
                room = problem.room(row) / GIB
                found._constrain(solver.Constraint(-solver.infinity(), room), row, GIB, 1.0)
        return found

    def add(self, row: Row) -> bool:
        """One more path; False where it is known."""
        if row in self.planes or not row.terms:
            return False
        plane = self.solver.Constraint(0.0, self.solver.infinity())
        plane.SetCoefficient(self.step, 1.0)
        self._constrain(plane, row, PS, -1.0)
        self.planes[row] = plane
        return True

    def solve(self) -> tuple[float, np.ndarray] | None:
        """The least T and the layers of each chunk with it; None where nothing fits, or the solver gives up."""
        if self.solver.Solve() != pywraplp.Solver.OPTIMAL:
            return None
        return self.step.solution_value(), np.array([block.solution_value() for block in self.blocks])

    @property
    def infeasible(self) -> bool:
        """Whether no partition fits; after `solve`."""
        return bool(self.solver.Solve() == pywraplp.Solver.INFEASIBLE)

    def _constrain(self, target: pywraplp.Constraint, row: Row, unit: float, sign: float) -> None:
        """Add a row's value, `sign` times, to a constraint whose constants stand in its bounds."""
        constant, each = row.constant / unit, dict[int, list[float]]()
        more: list[tuple[pywraplp.Variable, float]] = []
        for q, c, n in row.terms:
            forms = self.problem.quantities[q].forms
            if len(forms) > 1 and n > 0:
                more.append((self._amount(q, c, unit), float(n)))
                continue
            kept, extra, fixed = _linear(self.problem, forms[0], c)
            both = each.setdefault(c, [0.0, 0.0])
            both[0] += n * kept / unit
            both[1] += n * extra / unit
            constant += n * fixed / unit
        for chunk, (kept, extra) in each.items():
            target.SetCoefficient(self.blocks[chunk], sign * kept)
            if self.recomputed[chunk] is not None:
                target.SetCoefficient(self.recomputed[chunk], sign * extra)
        for variable, count in more:
            target.SetCoefficient(variable, sign * count)
        if sign < 0:
            target.SetLb(target.lb() + constant)
        else:
            target.SetUb(target.ub() - constant)

    def _amount(self, quantity: int, chunk: int, unit: float) -> pywraplp.Variable:
        """A variable that is no less than any form of a quantity."""
        key = (quantity, chunk, unit)
        if key not in self._amounts:
            amount = self._amounts[key] = self.solver.NumVar(
                -self.solver.infinity(), self.solver.infinity(), ""
            )
            for form in self.problem.quantities[quantity].forms:
                kept, extra, fixed = _linear(self.problem, form, chunk)
                least = self.solver.Constraint(fixed / unit, self.solver.infinity())
                least.SetCoefficient(amount, 1.0)
                least.SetCoefficient(self.blocks[chunk], -kept / unit)
                if self.recomputed[chunk] is not None:
                    least.SetCoefficient(self.recomputed[chunk], -extra / unit)
        return self._amounts[key]


def _linear(problem: StageProblem, form: Form, chunk: int) -> tuple[float, float, float]:
    """What a layer adds to a form at least, what its recomputation adds to that, and what stands there without layers."""
    kinds = dict.fromkeys(problem.kinds)
    kept = min((form.kept[kind] for kind in kinds), default=0)
    again = min((form.recomputed[kind] for kind in kinds), default=0)
    fixed: float = form.fixed[chunk] + min(form.when_all, 0) + min(form.when_few, 0)
    fixed += min(form.when_none[chunk], 0) if form.when_none else 0
    return float(kept), float(min(again - kept, 0) if len(kinds) > 1 else again - kept), float(fixed)


def relaxed_bound_s(problem: StageProblem, rows: Sequence[Row]) -> float | None:
    """Seconds that no partition goes below; None where none fits, 0 where the solver gives up."""
    program = Relaxation.of(problem, memory=True)
    for row in rows:
        program.add(row)
    found = program.solve()
    if found is not None:
        return found[0]
    return None if program.infeasible else 0.0
