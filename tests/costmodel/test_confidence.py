"""What a prediction rests on, and how wide its interval is."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import numpy as np
import pytest

from autoparallel.costmodel.confidence import (
    KNOWN,
    QUANTILE,
    QUANTILE_CALIBRATED,
    UNSEEN,
    confidence,
    fits,
    kinds_of,
    slowed,
)
from autoparallel.costmodel.parts import NOISE, PARTS
from autoparallel.costmodel.simulate import simulate
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.strategy.types import Batch, Mesh, Pipeline, Shard, Strategy
from autoparallel.profiles import load_cluster
from autoparallel.profiles.hardware import Cluster, Device, Posterior, Provenance, Residual, ValueKind
from tests.toy_graphs import toy_transformer

GRAPH = toy_transformer(layers=4, hidden=512, heads=8, seq=256)
STRATEGY = Strategy(
    batch=Batch(global_=16, micro=1),
    mesh=Mesh(dp_shard=4),
    shard=Shard(zero=1),
    pipeline=Pipeline(stage_blocks=(4,)),
)
CLUSTER = load_cluster("h100-sxm:1x4")
PROGRAM = Expander(graph=GRAPH, cluster=CLUSTER).program(STRATEGY)


def of_kind(cluster: Cluster, kind: ValueKind) -> Cluster:
    device = cluster.device
    known = dict.fromkeys(device.provenance, Provenance(kind=kind, source="test"))
    levels = dict.fromkeys(cluster.provenance, Provenance(kind=kind, source="test"))
    groups = (replace(cluster.groups[0], device=replace(device, provenance=known)),)
    return replace(cluster, groups=groups, provenance=levels)


def test_shares_sum_to_one_and_name_kinds_that_occur() -> None:
    found = confidence(PROGRAM, CLUSTER)
    assert sum(share for _, share in found.shares) == pytest.approx(1.0)
    assert {kind for kind, _ in found.shares} <= {str(kind) for kind in kinds_of(CLUSTER)}
    assert [share for _, share in found.shares] == sorted((s for _, s in found.shares), reverse=True)


@pytest.mark.parametrize("kind", [ValueKind.MEASURED, ValueKind.DATASHEET])
def test_what_is_all_of_one_kind_rests_on_it(kind: ValueKind) -> None:
    assert confidence(PROGRAM, of_kind(CLUSTER, kind)).shares == ((str(kind), pytest.approx(1.0)),)


@pytest.mark.parametrize("kind", list(ValueKind))
def test_slower_figures_never_make_a_step_faster(kind: ValueKind) -> None:
    before = simulate(PROGRAM, CLUSTER).step_time_s
    after = simulate(PROGRAM, slowed(CLUSTER, kind)).step_time_s
    assert after >= before * (1 - 1e-12)


def factor(cluster: Cluster) -> float:
    found = confidence(PROGRAM, cluster)
    step_s = simulate(PROGRAM, cluster).step_time_s
    assert found.low_s * found.high_s == pytest.approx(step_s**2)
    return found.high_s / step_s


def on(device: Device) -> Cluster:
    return replace(CLUSTER, groups=(replace(CLUSTER.groups[0], device=device),))


def test_intervals_belong_to_what_a_step_rests_on() -> None:
    """Wider on devices whose generation nobody has measured, and where links decide; narrow after steps of the machine itself."""
    known = factor(CLUSTER)
    assert exp(QUANTILE * KNOWN) <= known < exp(2 * QUANTILE * KNOWN)
    unseen = factor(on(replace(CLUSTER.device, publishers=0)))
    assert unseen > exp(QUANTILE * UNSEEN)
    slow = replace(CLUSTER, levels=tuple(replace(x, bytes_per_s=x.bytes_per_s / 500) for x in CLUSTER.levels))
    assert factor(slow) > known
    parts = tuple(part.name for part in PARTS)
    covariance = tuple(map(tuple, (1e-4 * np.eye(len(parts))).tolist()))
    learnt = Posterior(parts=parts, covariance=covariance, rows=5, noise=0.05)
    calibrated = on(replace(CLUSTER.device, posterior=learnt))
    assert factor(calibrated) < known
    assert confidence(PROGRAM, calibrated).basis == "5 measured steps"
    assert exp(QUANTILE_CALIBRATED * NOISE) <= factor(calibrated)


def test_an_older_calibration_s_residual_is_its_interval() -> None:
    close = Residual(samples=5, mean_absolute_error=0.01, p90_absolute_error=0.02, bias=0.0)
    found = on(replace(CLUSTER.device, residuals={"step": close}))
    assert factor(found) == pytest.approx(1.02)


def test_a_step_fits_the_more_probably_the_more_room_it_has() -> None:
    prediction = simulate(PROGRAM, CLUSTER)
    rooms = [0.5, 0.8, 0.95, 1.0, 1.1, 1.5]
    found = [
        fits(replace(prediction, capacities_bytes=(prediction.peak_bytes / share,) * len(prediction.memory)))
        for share in rooms
    ]
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.97
    assert found[-1] < 0.03
    assert found[3] > 0.5  # a step that is just said to fit
