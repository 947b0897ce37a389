"""`Problem`: everything that a plan depends on, as frozen data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import inf
from typing import Protocol

from autoparallel.costmodel.compression import parse_method
from autoparallel.costmodel.graph import ModelGraph
from autoparallel.errors import UserError
from autoparallel.planner.money import rate_per_s
from autoparallel.planner.strategy.fixed import Fixed, fixed_of
from autoparallel.planner.strategy.stacks import Runs, runs_of
from autoparallel.planner.strategy.types import Execution, Strategy
from autoparallel.profiles.hardware import Cluster

Value = tuple[float, float]  # of the objective: what counts, and what counts among equals; less is better
NOTHING: Value = (inf, inf)


class Objective(StrEnum):
    """What the best strategy is best in."""

    TIME = "time"  # seconds per step; every device of the cluster works, unless the batch does not divide or a part of them is faster alone
    COST = "cost"  # price of a step; fewer devices may win
    MEMORY = "memory"  # peak bytes of the fullest device, then seconds


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What to plan. `constraints` is a partial strategy: dotted keys of the strategy file and their values."""

    graph: ModelGraph
    cluster: Cluster
    global_batch: int
    objective: Objective = Objective.TIME
    constraints: Mapping[str, object] = field(default_factory=dict)
    execution: Execution = field(default_factory=Execution)
    allow_lossy: bool = False
    lossy: tuple[
        str, ...
    ] = ()  # the methods of compression that it allows; empty: those of the search's own list
    all_devices: bool = False  # every one must work: processes that run already wait for a part in the plan
    # Kernels of which the better are chosen (`execution.kernels`), each with the constraints that it needs; empty: as `execution`
    # says. `steps` of the whole run, over which compiling counts; None where nobody said.
    kernels: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    steps: int | None = None
    # Why whoever runs the plan refuses a strategy, None where it does not: such strategies are left out of the search.
    refuses: Callable[[Strategy], str | None] | None = None

    @cached_property
    def fixed(self) -> Fixed:
        """The constraints, typed."""
        return fixed_of(self.constraints)

    @cached_property
    def step_flops(self) -> int:
        """FLOPs of a step's forward and backward, nothing recomputed."""
        return self.graph.model_flops(self.global_batch)

    @property
    def runs(self) -> Runs:
        """What the user's software has of what is searched for."""
        return runs_of(self.execution.stack)

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise UserError(f"batch.global = {self.global_batch}: at least one sequence per step is needed")
        for method in self.lossy:
            parse_method(method)
        fixed = self.constraints.get("batch.global", self.global_batch)
        if fixed != self.global_batch:
            raise UserError(
                f"batch.global = {fixed} contradicts the global batch of {self.global_batch}; give one of them"
            )

        groups, have = self.fixed.groups, len(self.cluster.groups)
        if any(not 0 <= g < have for g in groups):
            raise UserError(
                f"mesh.groups = {list(groups)}: {self.cluster.name} has the device groups 0 to {have - 1}"
            )
        pp = self.fixed.mesh.pp
        if groups and pp not in (None, len(groups)):
            raise UserError(
                f"mesh.groups = {list(groups)} names a device group for each of {len(groups)} pipeline ranks, but "
                f"mesh.pp = {pp}; change one of them"
            )

    def is_refused(self, strategy: Strategy) -> bool:
        """Whether whoever runs the plan refuses a strategy, or its software lacks it."""
        if self.runs.lacks(strategy, self.constraints) is not None:
            return True
        return self.refuses is not None and self.refuses(strategy) is not None

    def rate_per_s(self, devices: int) -> float:
        """Price of one second of that many devices, of the groups that `mesh.groups` names if it does; their
        number where not every group has a price, so that the cost of a step is then its device-seconds."""
        return rate_per_s(self.cluster, devices, self.fixed.groups)

    def value_of(self, time_s: float, memory_bytes: float, devices: int) -> Value:
        """What `plan` minimises, lexicographically: (seconds, 0), (price of a step, 0) or (bytes, seconds)."""
        match self.objective:
            case Objective.TIME:
                return (time_s, 0.0)
            case Objective.COST:
                return (time_s * self.rate_per_s(devices), 0.0)
            case Objective.MEMORY:
                return (float(memory_bytes), time_s)


class Simulated(Protocol):
    """A strategy's step: as `score` says, or as the search evaluates it."""

    @property
    def step_time_s(self) -> float: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def devices(self) -> int: ...


def objective_value(problem: Problem, found: Simulated) -> Value:
    """What a simulated strategy is worth."""
    return problem.value_of(found.step_time_s, found.peak_bytes, found.devices)
