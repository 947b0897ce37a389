"""A start of a run, read back from its folder: what ran where, how long its steps were, and what else could run in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.inputs import read_saved_graph
from autoparallel.planner.explain.choice import WITHIN
from autoparallel.planner.outcome import PlanResult
from autoparallel.planner.plan import plan
from autoparallel.planner.problem import Problem
from autoparallel.planner.strategy.file import read_strategy_file, strategy_from_constraints
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles import Cluster
from autoparallel.profiles.resize import resized
from autoparallel.replan import stays_of
from autoparallel.runtime.limits import refuser
from autoparallel.runtime.monitor.differences import step_time_s
from autoparallel.runtime.monitor.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What ran on which devices, and its seconds a step."""

    graph: ModelGraph
    cluster: Cluster
    strategy: Strategy
    constraints: Mapping[str, object]
    step_time_s: float

    def planned_on(
        self, cluster: Cluster, time_limit_s: float | None, *, all_devices: bool = False
    ) -> PlanResult:
        """Plan the same training for other devices. Raises InfeasiblePlan, SearchTimeout."""
        problem = Problem(
            graph=self.graph, cluster=cluster, global_batch=self.strategy.batch.global_, constraints=stays_of(self.constraints),
            execution=self.strategy.execution, refuses=refuser(self.graph, cluster), all_devices=all_devices,
        )  # fmt: skip
        return plan(problem, time_limit_s=time_limit_s, within=WITHIN, advise=False)


def start_of(folder: Path, record: Record, cluster: Cluster) -> Start | None:
    """The start that a record of the run in `folder` is about, on as much of `cluster` as it had; None: too few steps."""
    seconds, start = step_time_s(record), record.start
    if seconds is None:
        return None
    constraints = read_strategy_file(folder / start["strategy"]).constraints
    return Start(
        graph=read_saved_graph(str(folder / start["graph"])),
        cluster=resized(cluster, int(start["world"]), per_node_of(record)),
        strategy=strategy_from_constraints(constraints), constraints=constraints, step_time_s=seconds,
    )  # fmt: skip


def per_node_of(record: Record) -> int:
    """Ranks of a node."""
    return int(str(record.start["shape"]).partition("x")[2])
