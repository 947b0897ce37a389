from __future__ import annotations

from dataclasses import replace

import pytest

from autoparallel.costmodel.prediction import Prediction
from autoparallel.planner.money import cost_of, rate_per_s
from autoparallel.planner.strategy.types import Mesh
from autoparallel.profiles import Cluster, load_cluster


def priced_cluster(*prices: float | None) -> Cluster:
    cluster = load_cluster("a100-v100")
    groups = tuple(replace(g, price_per_device_hour=p) for g, p in zip(cluster.groups, prices, strict=True))
    return replace(cluster, groups=groups)


def prediction_of(*, step_time_s: float, tokens: int = 1) -> Prediction:
    return Prediction(
        step_time_s=step_time_s, breakdown_s=(("forward", step_time_s),), memory=(), capacities_bytes=(),
        model_flops=1, hardware_flops=1, tokens=tokens, devices=1, peak_flops_per_s=1.0,
    )  # fmt: skip


def hourly(cluster: Cluster, mesh: Mesh) -> float:
    return rate_per_s(cluster, mesh.devices, mesh.groups) * 3600


def test_the_whole_cluster_costs_the_sum_of_its_groups() -> None:
    cluster = priced_cluster(3.6, 1.8)
    assert hourly(cluster, Mesh(pp=2, dp_shard=16)) == pytest.approx(16 * 3.6 + 16 * 1.8)


def test_named_groups_cost_what_their_devices_cost() -> None:
    cluster = priced_cluster(3.6, 1.8)
    assert hourly(cluster, Mesh(pp=2, dp_shard=4, groups=(1, 1))) == pytest.approx(8 * 1.8)
    assert hourly(cluster, Mesh(pp=2, dp_shard=4, groups=(0, 1))) == pytest.approx(4 * 3.6 + 4 * 1.8)


def test_a_part_of_the_cluster_that_is_not_named_may_be_the_dearest() -> None:
    assert hourly(priced_cluster(3.6, 1.8), Mesh(dp_shard=8)) == pytest.approx(8 * 3.6)


def test_without_a_price_there_is_no_cost() -> None:
    assert cost_of(priced_cluster(3.6, None), Mesh(dp_shard=8), prediction_of(step_time_s=2.0)) is None


def test_a_trillion_tokens_cost_as_many_steps_as_they_take() -> None:
    cost = cost_of(priced_cluster(3.6, 3.6), Mesh(dp_shard=32), prediction_of(step_time_s=2.0, tokens=10**6))
    assert cost is not None
    assert cost.per_step == pytest.approx(32 * 3.6 * 2 / 3600)
    assert cost.per_trillion_tokens == pytest.approx(cost.per_step * 1e6)
