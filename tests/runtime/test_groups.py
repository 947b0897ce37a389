"""The process groups of a strategy: derived from it alone, and the ones that are made."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.planner.strategy.types import AXES, GradSync
from autoparallel.runtime.gradients.groups import process_groups
from autoparallel.runtime.gradients.replicas import with_levels
from autoparallel.runtime.pipeline.groups import pipeline_group
from autoparallel.runtime.ranks.mesh import build_mesh, subgroup
from tests.runtime.harness import Processes
from tests.runtime.test_replicas import BY_TWO, strategy_of

sizes = st.sampled_from([1, 2, 3])


@given(sizes, sizes, sizes, sizes, sizes, st.permutations(AXES), st.sampled_from([0, 3]))
def test_every_rank_is_in_one_group_of_each_kind(
    pp: int, replicas: int, shards: int, cp: int, tp: int, order: list[str], zero: int
) -> None:
    mesh = {"pp": pp, "dp_replicate": replicas, "dp_shard": shards if zero else 1, "cp": cp, "tp": tp}
    strategy = strategy_of(GradSync(), **mesh)
    strategy = replace(
        strategy, mesh=replace(strategy.mesh, order=tuple(order)), shard=replace(strategy.shard, zero=zero)
    )
    kinds = process_groups(strategy)
    assert len({kind.name for kind in kinds}) == len(kinds)
    for kind in kinds:
        assert sorted(rank for group in kind.ranks for rank in group) == list(range(strategy.mesh.devices))
        assert len({len(group) for group in kind.ranks}) == 1
        assert len(kind.ranks[0]) > 1, "nobody talks to itself"


def _made(rank: int, world_size: int) -> None:
    for mesh in ({"dp_replicate": 4}, {"dp_shard": 4}, {"pp": 2, "dp_shard": 2}, {"dp_shard": 2, "cp": 2}):
        strategy = strategy_of(GradSync(algorithm="hierarchical"), **mesh)
        planned = {kind.name: kind.ranks for kind in process_groups(strategy, BY_TWO)}
        found = with_levels(build_mesh(strategy.mesh, BY_TWO), strategy)
        groups = {axis: found.group(axis) for axis in AXES if getattr(strategy.mesh, axis) > 1}
        for name, levels in (
            ("dp_replicate", found.levels),
            ("_".join(a for a in ("dp_shard", "cp") if a in mesh), found.shard_levels),
        ):
            if levels is not None:
                groups |= {f"{name}_inside": levels[0], f"{name}_across": levels[1]}
                assert levels[0].group_desc == f"{name}_inside"
        if "pp" in mesh:
            back = pipeline_group(found, range(2), "pp_back")
            assert back is not None
            groups["pp_back"] = back
        if "cp" in mesh:
            groups["dp_shard_cp"] = found.group("dp_shard", "cp")
        assert planned.keys() == groups.keys()
        for name, group in groups.items():
            assert tuple(sorted(dist.get_process_group_ranks(group))) in planned[name], (rank, name)
        again = with_levels(found, strategy)
        assert again.levels == found.levels, "made once"
        assert again.shard_levels == found.shard_levels
    assert subgroup([[n] for n in range(world_size)], "alone") is subgroup(
        [[n] for n in range(world_size)], "alone"
    )


@pytest.mark.distributed
def test_they_are_the_ones_that_are_made(gloo: Processes) -> None:
    gloo.run(4, _made)
