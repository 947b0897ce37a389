"""A plan that would now be better for a run: its record corrects the profile, the search plans again, and the switch must pay.

What the steps of the run tell about the device moves both predictions, that of the strategy that runs and that of the new plan. What
the correction leaves unexplained of the running one is taken to slow the other as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from autoparallel.costmodel.calibrate import calibrate, spread_of
from autoparallel.costmodel.parts import slopes
from autoparallel.errors import UserError
from autoparallel.labels import strategy_label
from autoparallel.planner.explain.choice import WITHIN
from autoparallel.planner.outcome import InfeasiblePlan, SearchTimeout
from autoparallel.planner.score import score
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles import Cluster, load_cluster
from autoparallel.profiles.hardware import Device, Failures
from autoparallel.runtime.monitor.differences import WARM_UP, step_time_s
from autoparallel.runtime.monitor.record import Record, read_record
from autoparallel.starts import Start, starts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Seconds a step, by the run as it is measured, and what is to be expected of the plan that would now be best; `unsure` is one
    standard deviation of their ratio, by what the steps leave unknown. `switch_s`: until the run goes on under another strategy."""

    step: int  # the run has come to
    rows: int  # starts of the run that corrected the profile
    measured_s: float
    predicted_s: float  # before the correction
    corrected_s: float
    expected_s: float
    unsure: float
    switch_s: float
    switch_measured: bool
    strategy: Strategy
    same: bool  # the plan is what runs already
    until: int | None = None  # the step that the run ends after

    @property
    def gain(self) -> float:
        """The share by which steps become shorter; negative: longer."""
        return 1 - self.expected_s / self.measured_s

    @property
    def pays_after(self) -> float:
        """Steps until the switch is made up for."""
        saved_s = self.measured_s - self.expected_s
        return self.switch_s / saved_s if saved_s > 0 else inf

    @property
    def better(self) -> bool:
        """Whether to switch: by more than predictions can tell, and than the switch costs in the steps that are left."""
        left = inf if self.until is None else self.until - self.step
        return not self.same and self.gain > max(WITHIN, self.unsure) and self.pays_after < left

    def __str__(self) -> str:
        begun = (
            f"step {self.step}: {self.measured_s:.4g} s a step, {self.predicted_s:.4g} s planned, {self.corrected_s:.4g} s by the profile "
            f"as {self.rows} start{'s' * (self.rows != 1)} of the run correct{'s' * (self.rows == 1)} it"
        )
        if self.same:
            return f"{begun}; the plan that runs is still the best one"
        word = "shorter" if self.gain > 0 else "longer"
        told = f"{begun}; {strategy_label(self.strategy)} would take {self.expected_s:.4g} s, {100 * abs(self.gain):.1f} % {word} (±{100 * self.unsure:.0f} %)"
        if self.gain <= max(WITHIN, self.unsure):
            return f"{told}, which is no more than can be told: stay"
        kind = "as this run's restarts took" if self.switch_measured else "as the cluster says"
        cost = f"the switch takes {self.switch_s:.3g} s ({kind}) and pays after {self.pays_after:.0f} steps"
        left = "" if self.until is None else f" of {max(self.until - self.step, 0)} that are left"
        return f"{told}; {cost}{left}: {'switch' if self.better else 'stay'}"

    def table(self) -> dict[str, Any]:
        """What `--json` prints."""
        plain = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "strategy"}
        pays = None if self.pays_after == inf else self.pays_after
        return {**plain, "gain": self.gain, "pays_after": pays, "better": self.better, "words": str(self)}


def _predicted_s(start: Start, base: Device, device: Device) -> float:
    """Seconds a step by the cost model, of the cluster corrected as `device` is against `base`."""
    return score(start.graph, _with(start.cluster, base, device), start.strategy).step_time_s


def propose(
    folder: Path, cluster: str | None, *, until: int | None = None, time_limit_s: float | None = None,
    say: Callable[[str], None],
) -> Proposal:  # fmt: skip
    """Plan again for the run in `folder`, as its record corrects the profile of the cluster that it is on, or of `cluster` where that
    has other figures of it; `say` is told what to be aware of. Raises UserError for a folder or cluster that do not serve, and where
    nothing is found within the time."""
    records = read_record(folder)
    starts = starts_of(folder, records, load_cluster(cluster) if cluster is not None else None, say)
    if not starts or step_time_s(records[-1]) is None:
        raise UserError(
            f"{folder}: fewer than {WARM_UP + 1} steps are recorded of its last start; let it run on"
        )
    now = starts[-1]
    base = now.cluster.groups[0].device
    device = calibrate(
        base, lambda changed: [_predicted_s(start, base, changed) for start in starts],
        [start.step_time_s for start in starts], source="corrected by the run",
    ).device  # fmt: skip
    try:
        result = now.planned_on(_with(now.cluster, base, device), time_limit_s, all_devices=True)
    except (InfeasiblePlan, SearchTimeout) as error:
        raise UserError(f"{folder}: no other plan was found: {error}") from None
    corrected_s, best_s = _predicted_s(now, base, device), result.prediction.step_time_s
    wait_s, measured = _switch_s(records, now.cluster.failures)
    return Proposal(
        step=int(records[-1].steps[-1]["step"]), rows=len(starts), measured_s=now.step_time_s, predicted_s=_predicted_s(now, base, base),
        corrected_s=corrected_s, expected_s=best_s * now.step_time_s / corrected_s,
        unsure=_unsure(replace(now, strategy=result.strategy), now, base, device), switch_s=wait_s, switch_measured=measured,
        strategy=result.strategy, same=result.strategy == now.strategy or best_s >= corrected_s, until=until,
    )  # fmt: skip


def _with(cluster: Cluster, base: Device, device: Device) -> Cluster:
    """The cluster, whose devices are corrected as `device` is against `base`."""
    factors = {
        key: value / base.constants[key] for key, value in device.constants.items() if base.constants[key]
    }

    def corrected(own: Device) -> Device:
        constants = {key: value * factors.get(key, 1.0) for key, value in own.constants.items()}
        return replace(own, constants=constants, posterior=device.posterior, residuals=device.residuals)

    groups = tuple(replace(group, device=corrected(group.device)) for group in cluster.groups)
    return replace(cluster, groups=groups)


def _unsure(one: Start, other: Start, base: Device, device: Device) -> float:
    """One standard deviation of the ratio of two runs' steps, by what is left unknown of the device, and noise."""

    def predicted(changed: Device) -> list[float]:
        return [_predicted_s(run, base, changed) for run in (one, other)]

    at = slopes(predicted, device, predicted(device))
    return spread_of(device.posterior, at[0] - at[1])


def _switch_s(records: Sequence[Record], failures: Failures | None) -> tuple[float, bool]:
    """The shortest time from the last step of a start to the first one of the next, and whether there was one."""
    waits = [
        float(after.steps[0]["time"]) - float(before.steps[-1]["time"]) - float(after.steps[0]["seconds"])
        for before, after in pairwise(records)
        if before.steps and after.steps and "time" in before.steps[-1] and "time" in after.steps[0]
    ]
    if waits:
        return max(min(waits), 0.0), True
    said = failures or Failures(mtbf_hours_per_device=inf, storage_bytes_per_s=inf)
    return said.restart_s, False
