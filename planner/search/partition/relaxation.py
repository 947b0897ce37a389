"""The linear relaxation of a stage problem: layers of each kind in each chunk, kept or recomputed, as real numbers, by GLOP.

    minimise T    every known path <= T;  0 <= k[c, i] <= n[c, i];  sum over c of n[c, i] = N[i];
                  optionally every moment of memory <= capacity

where n[c, i] layers of kind i stand in chunk c and k[c, i] of them are recomputed. The order of the layers is left out but for
messages that are not alike, and so is what only some partitions pay: no partition is below it. What is sent after a chunk
is that of a mean of cuts of the chain, before which as many layers of each kind stand as in the chunks so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from ortools.linear_solver import pywraplp

from autoparallel.planner.search.partition.forms import PS
from autoparallel.planner.search.partition.problem import Form, Row, StageProblem
from autoparallel.planner.search.space.meshes import Floats

GIB = 2.0**30
MOST_PLACES = 48  # cuts told apart; of chains of more all send as little as any. Kind: choice
# Rows are added one by one: the dual simplex goes on from where it was, which presolve would undo.
GOES_ON = "use_preprocessing: false use_dual_simplex: true"


@dataclass(slots=True)
class Relaxation:
    """The linear program of one stage problem; seconds, and GiB of memory."""

    problem: StageProblem
    solver: pywraplp.Solver
    kinds: tuple[int, ...]
    layers: list[list[pywraplp.Variable]]  # by chunk and kind
    recomputed: list[list[pywraplp.Variable]]  # likewise; empty where nothing may be
    step: pywraplp.Variable
    places: list[int]  # `corners` of the chain
    planes: dict[Row, pywraplp.Constraint] = field(default_factory=dict)
    moments: dict[Row, pywraplp.Constraint] = field(default_factory=dict)  # of memory
    _amounts: dict[tuple[int, int, float], pywraplp.Variable] = field(default_factory=dict)
    _cuts: dict[int, list[pywraplp.Variable]] = field(
        default_factory=dict
    )  # by chunk, one for each of `places`
    _slopes: dict[int, tuple[Floats, tuple[float, ...]]] = field(default_factory=dict)  # by `id` of a form

    @staticmethod
    def of(problem: StageProblem, *, memory: bool) -> Relaxation:
        """The relaxation without any path."""
        solver = pywraplp.Solver.CreateSolver("GLOP")
        solver.SetSolverSpecificParametersAsString(GOES_ON)
        kinds = tuple(dict.fromkeys(problem.kinds))
        counts = [float(problem.kinds.count(kind)) for kind in kinds]
        every = [solver.Constraint(count, count) for count in counts]
        again = memory and problem.recompute
        layers: list[list[pywraplp.Variable]] = []
        recomputed: list[list[pywraplp.Variable]] = []
        for chunk, (least, most) in enumerate(zip(problem.least, problem.most, strict=True)):
            here = [solver.NumVar(0.0, min(float(most), count), "") for count in counts]
            layers.append(here)
            recomputed.append([solver.NumVar(0.0, solver.infinity(), "") for _ in kinds] if again else [])
            in_chunk = solver.Constraint(float(least), float(most))
            for whole, variable in zip(every, here, strict=True):
                in_chunk.SetCoefficient(variable, 1.0)
                whole.SetCoefficient(variable, 1.0)
            for variable, kept in zip(recomputed[-1], here, strict=False):
                few = solver.Constraint(0.0, solver.infinity())
                few.SetCoefficient(kept, 1.0)
                few.SetCoefficient(variable, -1.0)
            if again and problem.recomputed is not None:
                fixed = solver.Constraint(*(float(problem.recomputed[chunk]),) * 2)
                for variable in recomputed[-1]:
                    fixed.SetCoefficient(variable, 1.0)
        step = solver.NumVar(0.0, solver.infinity(), "T")
        solver.Objective().SetCoefficient(step, 1.0)
        solver.Objective().SetMinimization()
        sent = [form.after for quantity in problem.quantities for form in quantity.forms if form.after]
        places = corners(problem.kinds, sent)
        found = Relaxation(problem, solver, kinds, layers, recomputed, step, places)
        if memory:
            for row in problem.memory:
                room = problem.room(row) / GIB
                found.moments[row] = solver.Constraint(-solver.infinity(), room)
                found._constrain(found.moments[row], row, GIB, 1.0)
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

    def solve(self) -> tuple[float, Floats] | None:
        """The least T, and with it the layers [kept and recomputed, chunk, kind]; None where nothing fits, or the solver gives
        up."""
        if self.solver.Solve() != pywraplp.Solver.OPTIMAL:
            return None
        every, again = _values(self.layers), np.zeros((len(self.layers), len(self.kinds)))
        if all(self.recomputed):
            again = _values(self.recomputed)
        return self.step.solution_value(), np.stack([every - again, again])

    @property
    def infeasible(self) -> bool:
        """Whether no partition fits; after `solve`."""
        return bool(self.solver.Solve() == pywraplp.Solver.INFEASIBLE)

    def _constrain(self, target: pywraplp.Constraint, row: Row, unit: float, sign: float) -> None:
        """Add a row's value, `sign` times, to a constraint whose constants stand in its bounds."""
        constant = row.constant / unit
        each: dict[
            int, Floats
        ] = {}  # by chunk: what a layer of each kind adds, and what its recomputation does
        more: list[tuple[pywraplp.Variable, float]] = []
        for q, c, n in row.terms:
            forms = self.problem.quantities[q].forms
            if len(forms) > 1 and n > 0:
                more.append((self._amount(q, c, unit), float(n)))
                continue
            if forms[0].after and n > 0:
                more += self._sent(forms[0].after, c, n / unit)
            rates, fixed = self._linear(forms[0], c)
            each[c] = each.get(c, 0.0) + rates * (n / unit)
            constant += n * fixed / unit
        for chunk, rates in each.items():
            self._add_layers(target, chunk, sign * rates)
        for variable, count in more:
            target.SetCoefficient(variable, sign * count + target.GetCoefficient(variable))
        if sign < 0:
            target.SetLb(target.lb() + constant)
        else:
            target.SetUb(target.ub() - constant)

    def _sent(self, after: Sequence[int], chunk: int, times: float) -> list[tuple[pywraplp.Variable, float]]:
        """What the cut after a chunk adds to a row that has so many `times` what is sent `after` each cut of the chain."""
        kinds, places = self.problem.kinds, self.places
        if len(places) > MOST_PLACES:
            return []
        if chunk not in self._cuts:
            cuts = self._cuts[chunk] = [self.solver.NumVar(0.0, 1.0, "") for _ in places]
            one = self.solver.Constraint(1.0, 1.0)
            for cut in cuts:
                one.SetCoefficient(cut, 1.0)
            for at, kind in enumerate(self.kinds):
                before = self.solver.Constraint(0.0, 0.0)
                for cut, place in zip(cuts, places, strict=True):
                    before.SetCoefficient(cut, float(kinds[:place].count(kind)))
                for layers in self.layers[: chunk + 1]:
                    before.SetCoefficient(layers[at], -1.0)
        return [(cut, times * after[p]) for cut, p in zip(self._cuts[chunk], places, strict=True) if after[p]]

    def _amount(self, quantity: int, chunk: int, unit: float) -> pywraplp.Variable:
        """A variable that is no less than any form of a quantity."""
        key = (quantity, chunk, unit)
        if key not in self._amounts:
            free = self.solver.infinity()
            amount = self._amounts[key] = self.solver.NumVar(-free, free, "")
            for form in self.problem.quantities[quantity].forms:
                rates, fixed = self._linear(form, chunk)
                least = self.solver.Constraint(fixed / unit, free)
                least.SetCoefficient(amount, 1.0)
                self._add_layers(least, chunk, rates / -unit)
        return self._amounts[key]

    def _add_layers(self, target: pywraplp.Constraint, chunk: int, rates: Floats) -> None:
        """`rates` [layer and its recomputation, kind] times the layers of a chunk."""
        for variables, some in zip((self.layers[chunk], self.recomputed[chunk]), rates.tolist(), strict=True):
            for variable, rate in zip(variables, some, strict=False):
                target.SetCoefficient(variable, rate)

    def _linear(self, form: Form, chunk: int) -> tuple[Floats, float]:
        """What a layer of each kind adds to a form and what its recomputation adds to that [2, kind], and what stands there
        without layers at least."""
        if id(form) not in self._slopes:  # the problem keeps its forms alive
            kept = np.array([form.kept[kind] for kind in self.kinds], dtype=np.float64)
            again = np.array([form.recomputed[kind] for kind in self.kinds], dtype=np.float64)
            besides = min(form.when_all, 0) + min(form.when_few, 0)
            none = form.when_none or (0,) * len(form.fixed)
            fixed = tuple(
                float(value + besides + (0 if least else min(less, 0)))
                for value, less, least in zip(form.fixed, none, self.problem.least, strict=True)
            )
            self._slopes[id(form)] = np.stack([kept, again - kept]), fixed
        rates, fixed = self._slopes[id(form)]
        return rates, fixed[chunk]


def corners(kinds: Sequence[int], sent: Sequence[Sequence[int]]) -> list[int]:
    """The cuts of a chain of which all others are means, what is sent after them, in each of these ways, included."""

    def between(cut: int) -> bool:
        alike = kinds[cut - 1] == kinds[cut]
        return alike and all(after[cut - 1] == after[cut] == after[cut + 1] for after in sent)

    return [cut for cut in range(len(kinds) + 1) if cut in (0, len(kinds)) or not between(cut)]


def _values(variables: Sequence[Sequence[pywraplp.Variable]]) -> Floats:
    return np.array([[one.solution_value() for one in here] for here in variables], dtype=np.float64)


def relaxed_bound_s(problem: StageProblem, rows: Sequence[Row]) -> float | None:
    """Seconds that no partition goes below; None where none fits, 0 where the solver gives up."""
    program = Relaxation.of(problem, memory=True)
    for row in rows:
        program.add(row)
    found = program.solve()
    if found is not None:
        return found[0]
    return None if program.infeasible else 0.0
