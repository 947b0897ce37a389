"""A start of a run, read back from its folder: what ran where, how long its steps were, and what else could run in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from autoparallel.ran_on import as_many, cluster_of, recorded, same_devices
from autoparallel.runtime.limits import refuser
from autoparallel.runtime.monitor.differences import step_time_s
from autoparallel.runtime.monitor.record import Record
from autoparallel.stays import stays_of


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
        stays = stays_of(self.constraints, cluster, cluster.devices).constraints
        problem = Problem(
            graph=self.graph, cluster=cluster, global_batch=self.strategy.batch.global_, constraints=stays,
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
        cluster=as_many(cluster, record),
        strategy=strategy_from_constraints(constraints), constraints=constraints, step_time_s=seconds,
    )  # fmt: skip


def starts_of(
    folder: Path, records: Sequence[Record], named: Cluster | None, say: Callable[[str], None]
) -> list[Start]:
    """The starts of a run that tell of the devices that its last one was on, those of too few steps left out. `named` and `say`
    are `cluster_of`'s."""
    now = cluster_of(folder, records[-1], named, say)
    alike = [record for record in records if same_devices(record, records[-1])]
    if left_out := len(records) - len(alike):
        say(
            f"warning: {left_out} of {len(records)} starts of the run in {folder} were on other devices, and are left out"
        )
    found = (start_of(folder, record, named or recorded(folder, record) or now) for record in alike)
    return [start for start in found if start is not None]
