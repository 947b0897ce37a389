"""How far easily found strategies of the least bounds are above these: where it is far, bounds miss something of such problems.

Where communication goes far it has no price yet here; only variants whose blocks communicate with neighbours are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from time import process_time

import numpy as np

from autoparallel.planner.problem import Problem
from autoparallel.planner.search.bounds.outer import Outer, bound_variants, expand_quickly
from autoparallel.planner.search.simulations import Simulations
from autoparallel.planner.search.space.build import Variants
from autoparallel.planner.search.space.candidates import Candidate, candidate
from benchmarks.random_problems.bounded import MOST_ACTIONS, space_of

SHAPES, VARIANTS = 96, 3_000  # of the least bounds, that are looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Weak:
    """A variant whose bound is far below what it takes."""

    bound_s: float
    step_time_s: float
    candidate: Candidate

    @property
    def times(self) -> float:
        """The simulation against the bound."""
        return self.step_time_s / self.bound_s

    def told(self) -> str:
        one = self.candidate
        return (
            f"{self.times:6.2f} x {self.bound_s:.4g} s: pp {one.mesh.pp} dp {one.mesh.dp_replicate} x {one.mesh.dp_shard} "
            f"tp {one.mesh.tp} cp {one.mesh.cp} ep {one.mesh.ep}, {one.micro_batches} x {one.micro}, ZeRO-{one.zero}, "
            f"{one.schedule} {one.virtual_stages}, recompute {one.mode}"
        )


def least_bounds(problem: Problem, most: int = 6, most_cpu_s: float = 12.0) -> list[Weak]:
    """Of the variants with the least bounds, one of each size, schedule, ZeRO level and recomputation, those that an easily found
    partition fits; the least bound first."""
    outer = space_of(problem)
    if outer is None:
        return []
    started, sims, found = process_time(), Simulations(outer=outer), list[Weak]()
    seen = set[tuple[object, ...]]()
    for chosen, bound_s in _in_order(outer):
        key = (chosen.size, chosen.schedule, chosen.zero, chosen.mode)
        if key in seen or chosen.actions > MOST_ACTIONS:
            continue
        seen.add(key)
        if (simulated := sims.try_quickly(chosen)) is not None:
            found.append(Weak(bound_s=bound_s, step_time_s=simulated.step_time_s, candidate=chosen))
        if len(found) == most or process_time() - started > most_cpu_s:
            break
    return found


def _in_order(outer: Outer) -> Iterator[tuple[Candidate, float]]:
    rows = outer.best_first(np.arange(len(outer.space.shapes)), SHAPES)
    outer.ask(rows)
    fits = np.isfinite(outer.bounds.time_s[rows]) & (outer.bounds.memory_bytes[rows] <= outer.capacity_bytes)
    every, quick = expand_quickly(outer, rows[fits])
    near = np.flatnonzero(outer.communication.inner_placements(every) == 0)
    some: Variants = every.take(near[np.argsort(quick.time_s[near], kind="stable")][:VARIANTS])
    bounds_s = bound_variants(outer, some, inf).time_s
    for at in np.argsort(bounds_s, kind="stable").tolist():
        if np.isfinite(bounds_s[at]):
            yield candidate(outer.space, some, at), float(bounds_s[at])
