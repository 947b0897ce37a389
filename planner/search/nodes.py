"""Variants whose stages are being decided."""

from __future__ import annotations

from dataclasses import dataclass

from autoparallel.planner.search.bounds.runs import Value
from autoparallel.planner.search.space.candidates import Candidate
from autoparallel.planner.search.stages.problem import Deal, StageProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A variant with its stage problem, the deals already simulated, and the one to simulate next; None where a first,
    short solve found none, and left open whether there is one."""

    chosen: Candidate
    bound: Value
    problem: StageProblem
    excluded: tuple[Deal, ...] = ()
    deal: Deal | None = None
