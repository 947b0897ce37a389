"""What a prediction rests on, and how wide its interval is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoparallel.costmodel.confidence import PUBLISHED, confidence, kinds_of, slowed
from autoparallel.costmodel.simulate import simulate
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.strategy.types import Batch, Mesh, Pipeline, Shard, Strategy
from autoparallel.profiles import load_cluster
from autoparallel.profiles.hardware import Cluster, Provenance, Residual, ValueKind
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


def test_the_interval_is_that_of_the_calibration_else_of_published_runs() -> None:
    step_s = simulate(PROGRAM, CLUSTER).step_time_s
    shipped = confidence(PROGRAM, CLUSTER)
    assert shipped.high_s == pytest.approx(step_s * (1 + PUBLISHED.p90_absolute_error))
    close = Residual(samples=5, mean_absolute_error=0.01, p90_absolute_error=0.02, bias=0.0)
    device = replace(CLUSTER.device, residuals={"step": close})
    calibrated = replace(CLUSTER, groups=(replace(CLUSTER.groups[0], device=device),))
    found = confidence(PROGRAM, calibrated)
    assert found.low_s < step_s < found.high_s
    assert found.high_s == pytest.approx(step_s * 1.02)
    assert found.basis == "5 measured steps"
