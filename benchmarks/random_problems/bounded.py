"""No variant's own bound is above what its partitions take: variants of the search's space, drawn at random."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import inf
from random import Random
from time import process_time

import numpy as np

from autoparallel.errors import UserError
from autoparallel.planner.embedding.options import tiers_matter, without_tables
from autoparallel.planner.heterogeneous.irregular import has_parts
from autoparallel.planner.local_updates import without_outer
from autoparallel.planner.problem import Problem
from autoparallel.planner.recovering import without_recovery
from autoparallel.planner.search.bounds.outer import Outer, bound_variants, outer_of
from autoparallel.planner.search.simulations import Simulations
from autoparallel.planner.search.space.build import Variants, variants
from autoparallel.planner.search.space.candidates import candidate
from benchmarks.random_problems.verdicts import EQUAL, Finding, Grade

MOST_ACTIONS = 4_000  # of a schedule; longer ones take seconds to lay out
SHARE = 0.3  # of the time that drawn strategies have


def against_bounds(
    problem: Problem, rng: Random, draws: int, most_cpu_s: float, tried: Counter[str]
) -> Iterator[Finding]:
    """Simulate an easily found partition of so many variants, where one fits; the one whose bound is furthest above it is told.
    Problems whose tables stand in tiers are left out, as another search has them."""
    outer = space_of(problem)
    if outer is None:
        return
    started, sims, worst, told = process_time(), Simulations(outer=outer), 1.0, ""
    for found in _drawn(outer, rng):
        if not draws or process_time() - started > most_cpu_s * SHARE:
            break
        chosen, bound_s = candidate(outer.space, found, 0), float(bound_variants(outer, found, inf).time_s[0])
        simulated = sims.try_quickly(chosen) if chosen.actions <= MOST_ACTIONS else None
        if simulated is None:
            continue
        draws, ratio = draws - 1, simulated.step_time_s / bound_s
        tried["bounded variants"] += 1
        if ratio < worst * (1 - EQUAL):
            worst, told = (
                ratio,
                f"takes {simulated.step_time_s:.6g} s, its bound says {bound_s:.6g} s: {chosen}",
            )
    if told:
        yield Finding(law="bound", grade=Grade.BROKEN, told=told, better=1 - worst)


def space_of(problem: Problem) -> Outer | None:
    """The bounds of a problem's own search; None where another search has it, or nothing can be shaped so."""
    bare = without_outer(without_recovery(problem))
    if tiers_matter(bare, alike=not has_parts(bare)):
        return None
    try:
        return outer_of(without_tables(bare))
    except UserError:
        return None


def _drawn(outer: Outer, rng: Random) -> Iterator[Variants]:
    """One variant after the other, of any shape that may fit."""
    shapes = list(range(len(outer.space.shapes)))
    for row in rng.sample(shapes, len(shapes)):
        rows = np.array([row])
        outer.ask(rows)
        if not np.isfinite(outer.bounds.time_s[row]) or outer.bounds.memory_bytes[row] > outer.capacity_bytes:
            continue
        every = variants(outer.space, rows)
        if len(every):
            yield every.take(np.array([rng.randrange(len(every))]))
