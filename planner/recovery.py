"""How a plan recovers from failures, where the cluster says how often it fails."""

from __future__ import annotations

from dataclasses import dataclass

from autoparallel.costmodel.kernels import host_copy_bytes_per_s
from autoparallel.costmodel.prediction import Prediction
from autoparallel.costmodel.recovery import Outages, Recovery, Saved, recoveries
from autoparallel.planner.expand.state import dtype_bytes, optimizer_bytes_per_parameter
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles.hardware import Cluster

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """Every way to recover, the best first, and what they were priced with."""

    ways: tuple[Recovery, ...]
    outages: Outages
    saved: Saved
    state_bytes: int

    @property
    def best(self) -> Recovery:
        return self.ways[0]


def plan_recovery(
    cluster: Cluster, strategy: Strategy, prediction: Prediction, parameters: int
) -> RecoveryPlan | None:
    """Price the ways to recover of a plan for `parameters` parameters; None where the cluster states no failures."""
    failures = cluster.failures
    if failures is None:
        return None
    execution, devices = strategy.execution, strategy.mesh.devices
    per_node = max(group.devices_per_node for group in cluster.groups)
    each = dtype_bytes(execution.param_dtype) + optimizer_bytes_per_parameter(execution)
    state_bytes = parameters * each
    share_bytes = state_bytes / devices
    device = cluster.device
    link_bytes_per_s = cluster.levels[-1].bytes_per_s if cluster.levels else host_copy_bytes_per_s(device)
    outages = Outages(
        mtbf_s=failures.mtbf_hours_per_device * HOUR_S / devices,
        detect_s=failures.detect_s, restart_s=failures.restart_s, replace_s=failures.replace_s,
    )  # fmt: skip
    saved = Saved(
        step_s=prediction.step_time_s,
        nodes=max(-(-devices // per_node), 1),
        replicas=strategy.mesh.dp_replicate,
        stall_s=share_bytes / host_copy_bytes_per_s(device),
        storage_s=state_bytes / failures.storage_bytes_per_s,
        neighbour_s=share_bytes / link_bytes_per_s,
    )
    return RecoveryPlan(
        ways=recoveries(outages, saved), outages=outages, saved=saved, state_bytes=state_bytes
    )
