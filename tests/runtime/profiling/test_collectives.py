"""Collectives are measured by all ranks together, and what is measured can be priced."""

from __future__ import annotations

import pytest

from autoparallel.costmodel.fit_collectives import CollectiveSample, OverlapSample
from autoparallel.profiles import load_cluster
from autoparallel.runtime.profiling import collectives
from autoparallel.runtime.profiling.overlap import measure_overlap
from tests.runtime.harness import Processes


def measure(rank: int, world_size: int) -> tuple[tuple[CollectiveSample, ...], OverlapSample]:
    found = collectives.measure_collectives(world_size, quick=True, sizes=(1 << 10, 1 << 16))
    return found, measure_overlap(quick=True)


@pytest.mark.distributed
def test_every_rank_measures_every_collective_alike(gloo: Processes) -> None:
    (first, overlap), second = gloo.run(2, measure)
    assert (first, overlap) == second
    assert {sample.op for sample in first} == set(collectives.OPS)
    cluster = load_cluster("cpu-gloo:1x2")
    for sample in first:
        assert sample.seconds >= sample.quickest_s > 0
        assert sample.predicted_s(cluster) > 0
    assert min(overlap.compute_s, overlap.collective_s) > 0
    assert overlap.both_s >= overlap.compute_beside_s
