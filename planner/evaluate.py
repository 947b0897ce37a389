"""Simulate complete strategies, many of the same schedule: seconds, bytes, and what decided them."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoparallel.costmodel.memory import LiveState, memory_by_rank
from autoparallel.costmodel.price import Pricer, price_program
from autoparallel.costmodel.simulate import Prepared, prepare_simulation
from autoparallel.costmodel.stage_cost import StageCost
from autoparallel.costmodel.timetable import PipelineTimes, pipeline_times
from autoparallel.planner.expand import Expander
from autoparallel.planner.paths import Path, critical_path
from autoparallel.planner.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What `score` says of a strategy, without the breakdown."""

    strategy: Strategy
    step_time_s: float
    peak_bytes: int
    prepared: Prepared
    costs: tuple[StageCost, ...]
    times: PipelineTimes

    def path(self) -> Path:
        """The critical path of the step."""
        return critical_path(self.prepared.timetable, self.costs, self.times)


@dataclass(frozen=True)
class Evaluator:
    """Evaluates strategies of one model on one cluster; timetables are kept per schedule."""

    expander: Expander
    pricer: Pricer
    _prepared: dict[object, Prepared] = field(default_factory=dict, repr=False)

    def prepared(self, strategy: Strategy) -> Prepared:
        """The timetable and memory states of the strategy's schedule."""
        pipeline, overlap = strategy.pipeline, strategy.grad_sync.overlap
        key = (
            pipeline.schedule, strategy.mesh.pp, pipeline.virtual_stages, strategy.micro_batches, overlap,
        )  # fmt: skip
        if key not in self._prepared:
            ranks = self.expander.schedule(strategy)
            self._prepared[key] = prepare_simulation(ranks, overlap=overlap)
        return self._prepared[key]

    def states(self, strategy: Strategy) -> tuple[tuple[LiveState, ...], ...]:
        """What each rank holds when its actions start."""
        return self.prepared(strategy).states

    def evaluate(self, strategy: Strategy) -> Evaluation:
        """Simulate a complete, legal strategy."""
        prepared = self.prepared(strategy)
        program = self.expander.program(strategy)
        costs = price_program(program, self.pricer.cluster, self.pricer)
        times = pipeline_times(prepared.timetable, costs)
        memory = memory_by_rank(
            prepared.states, program.stages, reduce_every_micro=program.reduce_every_micro
        )
        return Evaluation(
            strategy=strategy, step_time_s=times.step_time_s, peak_bytes=max(m.peak for m in memory),
            prepared=prepared, costs=costs, times=times,
        )  # fmt: skip
