"""Variants whose stages are being decided."""

from __future__ import annotations

from dataclasses import dataclass

from autoparallel.planner.problem import Value
from autoparallel.planner.search.space.candidates import Candidate
from autoparallel.planner.search.stages.problem import (
    Deal,
    StageProblem,
    without_needless_recomputation,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A variant with its stage problem, the deals already simulated, and the one to simulate next; None where a first,
    short solve found none, and left open whether there is one. `fits`: all that were simulated did, as their rows say."""

    chosen: Candidate
    bound: Value
    problem: StageProblem
    excluded: tuple[Deal, ...] = ()
    deal: Deal | None = None
    fits: bool = True

    @property
    def to_solve(self) -> StageProblem:
        """The stage problem as it is solved: nothing is recomputed where all fits without it. Rows bound memory from below:
        after a deal that did not fit though they said so, that is not known."""
        return without_needless_recomputation(self.problem) if self.fits else self.problem
