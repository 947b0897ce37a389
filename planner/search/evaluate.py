"""Simulate complete strategies, many of the same schedule: seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from autoparallel.costmodel.held import held
from autoparallel.costmodel.prediction import Held
from autoparallel.costmodel.price import price_program
from autoparallel.costmodel.timetable import pipeline_times
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.search.partition.paths import SchedulePaths
from autoparallel.planner.search.partition.problem import Row
from autoparallel.planner.strategy.types import Strategy

# Two plans closer than this are the same plan: below what rounding to picoseconds adds up to. Kind: formula.
TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(Held):
    """What `score` says of a strategy, without the breakdown; and its critical path where that was asked for."""

    strategy: Strategy
    step_time_s: float
    path: Row | None = None

    @property
    def devices(self) -> int:
        return self.strategy.mesh.devices


def held_by(expander: Expander, strategy: Strategy) -> Held:
    """The memory of a complete, legal strategy, in a fraction of the time that simulating it takes."""
    return held(expander.program(strategy), expander.prepared(strategy).states, expander.cluster)


def evaluate(expander: Expander, strategy: Strategy, paths: SchedulePaths | None = None) -> Evaluation:
    """Simulate a complete, legal strategy; its critical path becomes one of `paths`."""
    prepared = expander.prepared(strategy)
    program = expander.program(strategy)
    costs = price_program(program, expander.cluster, expander.pricer)
    times = pipeline_times(prepared.timetable, costs)
    memory = held(program, prepared.states, expander.cluster)
    return Evaluation(
        strategy=strategy, step_time_s=times.step_time_s,
        path=paths.learn(costs, times) if paths is not None else None,
        memory=memory.memory, capacities_bytes=memory.capacities_bytes, host_bytes=memory.host_bytes,
        host_capacity_bytes=memory.host_capacity_bytes,
    )  # fmt: skip
