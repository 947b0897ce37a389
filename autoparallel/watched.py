"""What measures the steps of a run, beside what its plan says of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoparallel.answer import program_timeline
from autoparallel.costmodel.graph_json import graph_from_json
from autoparallel.costmodel.simulate import simulate
from autoparallel.costmodel.step_collectives import priced_collectives
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.score import at_home
from autoparallel.profiles import Cluster
from autoparallel.ran_on import said_of
from autoparallel.replan import kept_beside
from autoparallel.report.picture import draw_step
from autoparallel.runtime.monitor.clock import StepClock
from autoparallel.runtime.monitor.collectives import Meter
from autoparallel.runtime.monitor.monitor import Monitor, MonitorOptions
from autoparallel.runtime.ranks.agreement import Agreement


class Watched:
    """Makes the monitor of each model that a run in `folder` trains. `graph`: the file of what is computed; `cluster`: of what is
    planned for, if known."""

    def __init__(
        self, folder: Path, everyone: Agreement, clock: StepClock, *, graph: Path, cluster: Cluster | None,
        options: MonitorOptions, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._folder, self._all, self._clock, self._say = folder, everyone, clock, say
        self._graph, self._cluster, self._options = graph, cluster, options
        self.meter = Meter()

    def monitor(self, model: Any, stage: int, step: int) -> Monitor:
        """For the steps after `step`, of this rank's `stage`; the strategy that runs is written beside the record."""
        world, cluster = self._all.ranks, self._cluster
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
        predicted, timeline, priced, file = None, None, [], self._folder

        def known() -> None:
            nonlocal predicted, timeline, priced, file
            file = kept_beside(self._folder, model.strategy, world)
            if cluster is not None:
                predicted = simulate(model.program, cluster)
                priced = priced_collectives(model.program, cluster)
                expander = Expander(graph_from_json(self._graph.read_text(encoding="utf-8")), cluster)
                timeline = program_timeline(*at_home(expander, model.strategy))

        self._all.alike(known if self._all.rank == 0 else None)  # what rank 0 meets alone the others hear of
        shape = f"{max(world // per_node, 1)}x{per_node}"
        about = {"strategy": file.name, "graph": self._graph.name, "shape": shape, **said_of(cluster)}
        levels = tuple((level.name, level.size) for level in cluster.levels) if cluster is not None else ()
        return Monitor(
            self._folder, self._all, self._clock, stage, about=about, predicted=predicted, step=step,
            options=self._options, say=self._say, timeline=timeline, per_node=per_node, draw=draw_step,
            meter=self.meter, levels=levels, priced=priced,
        )  # fmt: skip
