"""Kinds of strategies that whoever runs the plan refuses, so that a search need not meet them one by one.

A refusal (`Problem.refuses`) is a matter of few keys: the schedule, the level of ZeRO, and whether dp_shard, cp and tp are above
one. One strategy of each such kind is asked about, which is plain in everything else: what is refused of it is refused of all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from autoparallel.planner.problem import Problem
from autoparallel.planner.search.space.meshes import Bools
from autoparallel.planner.search.space.shapes import Shapes
from autoparallel.planner.strategy.types import Batch, Mesh, Pipeline, Shard, Strategy

ALONE = ("none", "gpipe", "1f1b")  # schedules of one chunk per rank
ZEROS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """`kinds`: by schedule, level of ZeRO, and whether dp_shard, cp and tp are above one; `why` one of them is, in words."""

    kinds: NDArray[np.bool_]
    why: str | None

    def of(self, shapes: Shapes, schedule: int, zero: int) -> Bools:
        """Which shapes are refused with this schedule and level."""
        above = (np.asarray(axis > 1, dtype=np.int64) for axis in (shapes.dp_shard, shapes.cp, shapes.tp))
        return np.asarray(self.kinds[schedule, zero][tuple(above)])


def refused_kinds(problem: Problem, schedules: Sequence[str], tried: Collection[int]) -> Refused:
    """What is refused of the schedules that are `tried`, by their places among all; nothing where nobody said who runs the plan."""
    kinds, why = np.zeros((len(schedules), ZEROS, 2, 2, 2), dtype=np.bool_), None
    if problem.refuses is None:
        return Refused(kinds=kinds, why=why)
    for schedule, (zero, *above) in product(sorted(tried), np.ndindex(kinds.shape[1:])):
        said = problem.refuses(_plain(problem, schedules[schedule], zero, above))
        kinds[(schedule, zero, *above)], why = said is not None, why or said
    return Refused(kinds=kinds, why=why)


def _plain(problem: Problem, schedule: str, zero: int, above: Sequence[int]) -> Strategy:
    dp_shard, cp, tp = (1 + more for more in above)
    pp = 1 if schedule == "none" else 2
    return Strategy(
        batch=Batch(global_=4 * dp_shard, micro=1), mesh=Mesh(pp=pp, dp_shard=dp_shard, cp=cp, tp=tp), shard=Shard(zero=zero),
        pipeline=Pipeline(schedule=schedule, virtual_stages=1 if schedule in (*ALONE, "zb1p") else 2),
        execution=problem.execution,
    )  # fmt: skip
