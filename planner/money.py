"""What devices cost: prices of groups, of the devices in use, of a step and of a trillion tokens."""

from __future__ import annotations

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


def priced(cluster: Cluster) -> bool:
    """Whether every group has a price."""
    return all(group.price_per_device_hour is not None for group in cluster.groups)


def rate_per_s(cluster: Cluster, mesh: Mesh) -> float:
    """Price of one second of the devices in use; their number where not every group has a price.

    The devices are those of `mesh.groups` where the strategy names groups, else all of the cluster; of a part of
    a cluster that is not said, each may be one of the dearest.
    """
    if not priced(cluster):
        return float(mesh.devices)
    prices = [group.price_per_device_hour or 0.0 for group in cluster.groups]
    if mesh.groups:
        return sum(prices[g] for g in mesh.groups) * mesh.devices / len(mesh.groups) / HOUR_S
    if mesh.devices == cluster.devices:
        return sum(p * g.devices for p, g in zip(prices, cluster.groups, strict=True)) / HOUR_S
    return max(prices) * mesh.devices / HOUR_S


def cost_of(cluster: Cluster, mesh: Mesh, prediction: Prediction) -> Cost | None:
    """What a strategy costs to run; None where not every group of the cluster has a price."""
    if not priced(cluster):
        return None
    rate = rate_per_s(cluster, mesh)
    step = rate * prediction.step_time_s
    return Cost(
        per_hour=rate * HOUR_S, per_step=step, per_trillion_tokens=step / max(prediction.tokens, 1) * 1e12
    )
