"""What leaving a rank out of a run would give: its record says what the rank costs, a plan for the others what they could do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from autoparallel.errors import UserError
from autoparallel.labels import strategy_label
from autoparallel.planner.outcome import InfeasiblePlan, SearchTimeout
from autoparallel.planner.score import score
from autoparallel.profiles import load_cluster
from autoparallel.profiles.resize import resized
from autoparallel.ran_on import cluster_of, per_node_of
from autoparallel.report.numbers import times
from autoparallel.runtime.monitor.differences import WARM_UP
from autoparallel.runtime.monitor.record import Record, read_record
from autoparallel.starts import start_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Without:
    """Seconds a step: measured, what of them the rank costs, what is predicted with it, and what is to be expected of a plan
    without it: that plan's prediction, longer by as much as the run without the rank's slowness is than its own."""

    rank: int
    world: int
    measured_s: float
    costs_s: float
    predicted_s: float
    expected_s: float | None = None  # None: no plan fits
    label: str = ""

    @property
    def gain(self) -> float | None:
        """The share by which steps become shorter; negative: longer."""
        return None if self.expected_s is None else 1 - self.expected_s / self.measured_s

    def __str__(self) -> str:
        left = times(self.world - 1, "device")
        slow = f"rank {self.rank} costs {self.costs_s:.3g} s of a step of {self.measured_s:.4g} s"
        if self.expected_s is None:
            return f"{slow}; without it nothing fits on {left}"
        gain = self.gain or 0.0
        verdict = f"{100 * abs(gain):.1f} % {'shorter: leave it out' if gain > 0 else 'longer: keep it'}"
        return f"{slow}; without it {left} would take {self.expected_s:.4g} s ({self.label}), {verdict}"

    def table(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {**asdict(self), "gain": self.gain, "words": str(self)}


def without(
    folder: Path,
    rank: int,
    cluster: str | None,
    *,
    time_limit_s: float | None = None,
    say: Callable[[str], None],
) -> Without:
    """Leave `rank` out of the run in `folder`, on the cluster that it is on, or by the figures that `cluster` has of it; `say` is told
    what to be aware of. Raises UserError for a folder, rank or cluster that do not serve."""
    record = read_record(folder)[-1]
    world = int(record.start["world"])
    if not 0 <= rank < world:
        raise UserError(f"--without {rank}: the run in {folder} has the ranks 0 to {world - 1}")
    if world == 1:
        raise UserError(f"--without {rank}: the run in {folder} has no other rank")
    named = load_cluster(cluster) if cluster is not None else None
    start = start_of(folder, record, cluster_of(folder, record, named, say))
    if start is None:
        raise UserError(f"{folder}: fewer than {WARM_UP + 1} steps are recorded; let it run on")
    measured_s, predicted_s = start.step_time_s, score(start.graph, start.cluster, start.strategy).step_time_s
    found = Without(
        rank=rank, world=world, measured_s=measured_s, costs_s=_costs_s(record, rank), predicted_s=predicted_s
    )
    try:
        result = start.planned_on(resized(start.cluster, world - 1, per_node_of(record)), time_limit_s)
    except (InfeasiblePlan, SearchTimeout):
        return found
    slower = (measured_s - found.costs_s) / predicted_s
    return Without(
        rank=rank, world=world, measured_s=measured_s, costs_s=found.costs_s, predicted_s=predicted_s,
        expected_s=result.prediction.step_time_s * slower, label=strategy_label(result.strategy),
    )  # fmt: skip


def _costs_s(record: Record, rank: int) -> float:
    """By how much the rank computes longer than its peers do, the median over the steps; 0 where it has none."""
    stages: Sequence[int] = record.start["stages"]
    peers = [r for r, stage in enumerate(stages) if stage == stages[rank] and r != rank]
    steps = [step["computing_s"] for step in record.steps[WARM_UP:]]
    if not peers:
        return 0.0
    return max(float(median(step[rank] - median(step[r] for r in peers) for step in steps)), 0.0)
