"""Simulate complete strategies, many of the same schedule: seconds, bytes, and what decided them."""

from __future__ import annotations

from dataclasses import dataclass

from autoparallel.costmodel.held import held
from autoparallel.costmodel.prediction import Held
from autoparallel.costmodel.price import price_program
from autoparallel.costmodel.simulate import Prepared
from autoparallel.costmodel.stage_cost import StageCost
from autoparallel.costmodel.timetable import PipelineTimes, pipeline_times
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.search.stages.paths import Path, critical_path
from autoparallel.planner.strategy.types import Strategy

# Two plans closer than this are the same plan: below what rounding to picoseconds adds up to. Kind: formula.
TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(Held):
    """What `score` says of a strategy, without the breakdown."""

    strategy: Strategy
    step_time_s: float
    prepared: Prepared
    costs: tuple[StageCost, ...]
    times: PipelineTimes

    @property
    def devices(self) -> int:
        return self.strategy.mesh.devices

    def path(self) -> Path:
        """The critical path of the step."""
        return critical_path(self.prepared.timetable, self.costs, self.times)


def held_by(expander: Expander, strategy: Strategy) -> Held:
    """The memory of a complete, legal strategy, in a fraction of the time that simulating it takes."""
    return held(expander.program(strategy), expander.prepared(strategy).states, expander.cluster)


def evaluate(expander: Expander, strategy: Strategy) -> Evaluation:
    """Simulate a complete, legal strategy."""
    prepared = expander.prepared(strategy)
    program = expander.program(strategy)
    costs = price_program(program, expander.cluster, expander.pricer)
    times = pipeline_times(prepared.timetable, costs)
    memory = held(program, prepared.states, expander.cluster)
    return Evaluation(
        strategy=strategy, step_time_s=times.step_time_s, prepared=prepared, costs=costs, times=times,
        memory=memory.memory, capacities_bytes=memory.capacities_bytes, host_bytes=memory.host_bytes,
        host_capacity_bytes=memory.host_capacity_bytes,
    )  # fmt: skip
