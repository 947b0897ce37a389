from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoparallel.planner.strategy.types import Batch, GradSync, Mesh, Shard, Strategy
from autoparallel.runtime.gradients.feedback import Memory
from autoparallel.runtime.gradients.replicas import replica_reducer, with_levels
from autoparallel.runtime.ranks.levels import two_levels
from autoparallel.runtime.ranks.mesh import build_mesh
from autoparallel.runtime.ranks.places import groups_along
from tests.runtime.harness import Processes

BY_TWO = (2, 4)  # four ranks, two below each port


def strategy_of(sync: GradSync, **mesh: int) -> Strategy:
    sizes = Mesh(**mesh)
    return Strategy(
        batch=Batch(global_=sizes.data_parallel, micro=1), mesh=sizes, shard=Shard(zero=3), grad_sync=sync
    )


HIERARCHICAL = GradSync(algorithm="hierarchical")


def test_a_group_is_divided_at_the_innermost_level_that_parts_it() -> None:
    assert two_levels([0, 1, 2, 3], BY_TWO) == ([[0, 1], [2, 3]], 0)
    assert two_levels([0, 2, 4, 6], (2, 4, 8)) == ([[0, 2], [4, 6]], 1)
    assert two_levels([0, 1], BY_TWO) is None
    assert two_levels([0, 2], BY_TWO) is None
    assert two_levels([0, 1, 2], BY_TWO) is None, "unequal numbers"


def test_groups_along_an_axis_follow_the_order_of_the_mesh() -> None:
    inner = Mesh(dp_replicate=2, tp=2)
    assert groups_along(inner, "dp_replicate") == [[0, 2], [1, 3]]
    outer = replace(inner, order=("tp", "pp", "cp", "dp_shard", "dp_replicate"))
    assert groups_along(outer, "dp_replicate") == [[0, 1], [2, 3]]


CASES: dict[str, tuple[GradSync, float]] = {
    "level by level": (HIERARCHICAL, 1e-6),
    "compressed across": (GradSync(compression=("none", "bf16")), 2**-7),
    "compressed on both": (GradSync(algorithm="hierarchical", compression=("bf16", "bf16")), 2**-6),
}


def _mean(
    rank: int, world_size: int, sync: GradSync, size: int
) -> tuple[torch.Tensor, float, dict[str, int]]:
    strategy = strategy_of(sync, dp_replicate=4)
    mesh = with_levels(build_mesh(strategy.mesh, BY_TWO), strategy)
    reducer = replica_reducer(strategy, mesh)
    assert reducer is not None
    buffer = torch.rand(size, generator=torch.Generator().manual_seed(rank))
    exact = buffer.clone()
    dist.all_reduce(exact)
    reducer.start(buffer, Memory()).wait()
    assert mesh.levels is not None
    sizes = {name: group.size() for name, group in zip(("inside", "across"), mesh.levels, strict=True)}
    return buffer, (buffer - exact / world_size).abs().max().item(), sizes


@pytest.mark.distributed
@pytest.mark.parametrize(("sync", "limit"), CASES.values(), ids=CASES)
def test_the_mean_is_taken_inside_and_then_across(gloo: Processes, sync: GradSync, limit: float) -> None:
    for size in (1, 33):
        results: list[Any] = gloo.run(4, _mean, sync=sync, size=size)
        for mean, error, sizes in results:
            assert sizes == {"inside": 2, "across": 2}
            assert torch.equal(mean, results[0][0]), "the same on every rank"
            assert error <= limit
