"""Collectives are measured by all ranks together, and what is measured can be priced."""

from __future__ import annotations

import pytest

from autoparallel.costmodel.fit_collectives import CollectiveSample
from autoparallel.profiles import load_cluster
from autoparallel.runtime.profiling import collectives
from tests.runtime.harness import Processes


def measure(rank: int, world_size: int) -> tuple[CollectiveSample, ...]:
    return collectives.measure_collectives(world_size, quick=True, sizes=(1 << 10, 1 << 16))


@pytest.mark.distributed
def test_every_rank_measures_every_collective_alike(gloo: Processes) -> None:
    first, second = gloo.run(2, measure)
    assert first == second
    assert {sample.op for sample in first} == set(collectives.OPS)
    cluster = load_cluster("cpu-gloo:1x2")
    for sample in first:
        assert sample.seconds > 0
        assert sample.predicted_s(cluster) > 0
