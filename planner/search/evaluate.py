"""Simulate complete strategies, many of the same schedule: seconds, bytes, and what decided them."""

from __future__ import annotations

from dataclasses import dataclass

from autoparallel.costmodel.host_memory import fullest_host_bytes, host_bytes_by_rank, host_capacity_bytes
from autoparallel.costmodel.memory import memory_by_rank
from autoparallel.costmodel.price import price_program
from autoparallel.costmodel.program import Program
from autoparallel.costmodel.simulate import Prepared, capacities_bytes
from autoparallel.costmodel.stage_cost import StageCost
from autoparallel.costmodel.timetable import PipelineTimes, pipeline_times
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.search.stages.paths import Path, critical_path
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles.hardware import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a strategy needs of the devices' memory, and of their hosts'."""

    peaks: tuple[int, ...]  # bytes on the devices of each pipeline rank
    capacities: tuple[float, ...]  # and what these can hold
    host_bytes: int  # in the fullest host's memory
    host_capacity_bytes: float  # 0: not stated

    @property
    def peak_bytes(self) -> int:
        """Bytes on the fullest device."""
        return max(self.peaks)

    @property
    def excess_bytes(self) -> float:
        """Bytes too many on the pipeline rank with the least room."""
        return max(peak - capacity for peak, capacity in zip(self.peaks, self.capacities, strict=True))

    @property
    def host_excess_bytes(self) -> float:
        """Bytes too many in the fullest host's memory; 0 where nobody knows its size."""
        return self.host_bytes - self.host_capacity_bytes if self.host_capacity_bytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(Held):
    """What `score` says of a strategy, without the breakdown."""

    strategy: Strategy
    step_time_s: float
    prepared: Prepared
    costs: tuple[StageCost, ...]
    times: PipelineTimes

    def path(self) -> Path:
        """The critical path of the step."""
        return critical_path(self.prepared.timetable, self.costs, self.times)


def held(expander: Expander, strategy: Strategy) -> Held:
    """The memory of a complete, legal strategy, in a fraction of the time that simulating it takes."""
    return _held(expander.program(strategy), expander.prepared(strategy), expander.cluster)


def evaluate(expander: Expander, strategy: Strategy) -> Evaluation:
    """Simulate a complete, legal strategy."""
    prepared = expander.prepared(strategy)
    program = expander.program(strategy)
    costs = price_program(program, expander.cluster, expander.pricer)
    times = pipeline_times(prepared.timetable, costs)
    memory = _held(program, prepared, expander.cluster)
    return Evaluation(
        strategy=strategy, step_time_s=times.step_time_s, prepared=prepared, costs=costs, times=times,
        peaks=memory.peaks, capacities=memory.capacities, host_bytes=memory.host_bytes,
        host_capacity_bytes=memory.host_capacity_bytes,
    )  # fmt: skip


def _held(program: Program, prepared: Prepared, cluster: Cluster) -> Held:
    stages = program.stages
    memory = memory_by_rank(prepared.states, stages, reduce_every_micro=program.reduce_every_micro)
    return Held(
        peaks=tuple(m.peak for m in memory),
        capacities=tuple(capacities_bytes(program, cluster)),
        host_bytes=fullest_host_bytes(program, host_bytes_by_rank(prepared.states, stages), cluster),
        host_capacity_bytes=host_capacity_bytes(cluster),
    )
