"""Which devices a strategy uses, who stands where, and what is said of those that idle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoparallel.planner.strategy.machines import (
    idle_words,
    machines,
    nodes_in_use,
    placement_problems,
)
from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Strategy
from autoparallel.profiles import Cluster, load_cluster


def strategy(mesh: Mesh) -> Strategy:
    return Strategy(batch=Batch(global_=64, micro=1), mesh=mesh)


def test_a_regular_cluster_is_what_it_is() -> None:
    cluster, one = load_cluster("dgx-a100"), strategy(Mesh(dp_shard=32))
    assert machines(cluster, one) == (cluster, one)
    assert machines(cluster, one)[1] is one


def test_ranks_stand_on_nodes_short_of_no_device_where_there_are_enough() -> None:
    cluster = load_cluster("short-node")
    used = [machines(cluster, strategy(Mesh(dp_shard=n)))[0] for n in (24, 28, 31)]
    assert [one.devices for one in used] == [24, 28, 31]
    assert [len(one.groups) for one in used] == [1, 1, 2]


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        (Mesh(dp_shard=24, placement=(0, 1, 1)), "at most once"),
        (Mesh(dp_shard=24, placement=(0, 1, 4)), "nodes from 0 to 3"),
        (Mesh(dp_shard=24, placement=(2, 0, 1)), "all but the last must give as many"),
        (Mesh(dp_shard=24, placement=(0, 1, 3), per_node=9), "at most 8"),
        (Mesh(dp_shard=28, placement=(0, 1, 3), per_node=8), "24 devices for a mesh of 28"),
    ],
)
def test_a_placement_that_cannot_be_is_named(mesh: Mesh, said: str) -> None:
    (found,) = placement_problems(load_cluster("short-node"), strategy(mesh))
    assert said in found


def test_a_placement_that_can_be_is_left_alone() -> None:
    cluster = load_cluster("short-node")
    for mesh in (
        Mesh(dp_shard=24, placement=(3, 1, 0), per_node=8),
        Mesh(dp_shard=28, placement=(0, 1, 2, 3), per_node=7),
        Mesh(dp_shard=31, placement=(0, 1, 3, 2)),
    ):
        assert not list(placement_problems(cluster, strategy(mesh)))


def test_nodes_of_several_kinds_change_places_inside_their_group() -> None:
    cluster = load_cluster("a100-v100")
    mesh = Mesh(pp=4, dp_shard=8, groups=(0, 0, 1, 1), placement=(1, 0, 2, 3))
    assert not list(placement_problems(cluster, strategy(mesh)))
    (said,) = placement_problems(cluster, strategy(replace(mesh, placement=(2, 0, 1, 3))))
    assert "nodes may change places inside their group" in said


def test_hosts_start_in_the_order_of_the_placement_as_far_as_the_mesh_reaches() -> None:
    assert nodes_in_use(Mesh(dp_shard=4, tp=2, placement=(2, 0, 3), per_node=3)) == (2, 0, 3)
    assert nodes_in_use(Mesh(dp_shard=4, placement=(3, 1, 0), per_node=2)) == (3, 1)


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        (Mesh(dp_shard=24, placement=(0, 1, 3), per_node=8), "7 of 31 devices idle; node 2 has 7 of 8; node 2 left out"),
        (Mesh(dp_shard=28, placement=(0, 1, 2, 3), per_node=7), "3 of 31 devices idle; node 2 has 7 of 8; 7 of every"),
        (Mesh(dp_shard=30, placement=(0, 1, 3, 2), per_node=8), "divide among 30 devices"),
        (Mesh(dp_shard=31, placement=(0, 1, 3, 2), per_node=8), ""),
    ],
)  # fmt: skip
def test_idle_devices_are_named(mesh: Mesh, said: str) -> None:
    found = idle_words(load_cluster("short-node"), strategy(mesh))
    assert said in found
    assert bool(said) == bool(found)


def test_a_group_that_is_left_out_is_named_and_why_it_cannot_compute() -> None:
    cluster = load_cluster("a100-v100")
    alone = strategy(Mesh(dp_shard=16, groups=(0,)))
    said = idle_words(cluster, alone)
    assert said.startswith("16 of 32 devices idle: group 1 (16 v100-sxm2-32gb) left out")
    assert "does not compute in bf16" in said
    assert "--set execution.dtype=fp16" in said
    able = replace(alone, execution=Execution(dtype="fp16"))
    assert idle_words(cluster, able) == "16 of 32 devices idle: group 1 (16 v100-sxm2-32gb) left out"
    both = strategy(Mesh(pp=2, dp_shard=16, groups=(0, 1)))
    assert idle_words(cluster, both) == ""


def test_a_regular_cluster_says_nothing_of_idle_devices() -> None:
    cluster: Cluster = load_cluster("dgx-a100")
    assert not idle_words(cluster, strategy(Mesh(dp_shard=16)))
