"""What devices cost: prices of groups, of the devices in use, of a step and of a trillion tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoparallel.costmodel.prediction import Prediction
from autoparallel.planner.strategy.types import Mesh
from autoparallel.profiles.hardware import Cluster

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Prices in the cluster file's currency."""

    per_hour: float
    per_step: float
    per_trillion_tokens: float


def unpriced(cluster: Cluster) -> tuple[str, ...]:
    """Devices of the groups that have no price."""
    return tuple(group.device.name for group in cluster.groups if group.price_per_device_hour is None)


def priced(cluster: Cluster) -> bool:
    """Whether every group has a price."""
    return not unpriced(cluster)


def rate_per_s(cluster: Cluster, devices: int, groups: Sequence[int] = ()) -> float:
    """Price of one second of the devices in use; their number where not every group has a price.

    `groups` are those that a strategy names for its pipeline ranks, each with as many devices. Without them the
    devices are all of the cluster; of a part of it, each may be one of the dearest.
    """
    if not priced(cluster):
        return float(devices)
    prices = [group.price_per_device_hour or 0.0 for group in cluster.groups]
    if groups:
        return sum(prices[g] for g in groups) * devices / len(groups) / HOUR_S
    if devices == cluster.devices:
        return sum(p * g.devices for p, g in zip(prices, cluster.groups, strict=True)) / HOUR_S
    return max(prices) * devices / HOUR_S


def cost_of(cluster: Cluster, mesh: Mesh, prediction: Prediction) -> Cost | None:
    """What a strategy costs to run; None where not every group of the cluster has a price."""
    if not priced(cluster):
        return None
    rate = rate_per_s(cluster, mesh.devices, mesh.groups)
    step = rate * prediction.step_time_s
    return Cost(
        per_hour=rate * HOUR_S, per_step=step, per_trillion_tokens=step / max(prediction.tokens, 1) * 1e12
    )
