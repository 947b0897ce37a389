"""Device groups of pipeline ranks: named, counted, refused with the reason."""

from __future__ import annotations

import pytest

from autoparallel.planner.strategy.legal import strategy_problems
from autoparallel.planner.strategy.types import Batch, Mesh, Pipeline, Strategy
from autoparallel.profiles.load import load_cluster
from tests.toy_graphs import toy_transformer


def found(mesh: Mesh) -> list[str]:
    strategy = Strategy(batch=Batch(global_=32, micro=1), mesh=mesh, pipeline=Pipeline(schedule="1f1b"))
    problems = strategy_problems(toy_transformer(layers=4), load_cluster("a100-v100"), strategy)
    return [line for line in problems if "mesh.groups" in line]


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (Mesh(pp=2, dp_replicate=16, groups=(0, 0, 1)), "pp = 2"),
        (Mesh(pp=2, dp_replicate=16, groups=(0, 5)), "groups 0 to 1"),
        (Mesh(pp=2, dp_replicate=16, groups=(0, 0)), "group 0, which has 16 devices"),
        (Mesh(pp=2, dp_replicate=16, groups=(0, 1), order=("dp_replicate", "pp", "dp_shard", "cp", "tp")), "outermost"),
    ],
)  # fmt: skip
def test_groups_name_one_device_group_for_each_pipeline_rank(mesh: Mesh, words: str) -> None:
    assert any(words in line for line in found(mesh)), found(mesh)


@pytest.mark.parametrize("groups", [(), (0, 1), (1, 0)])
def test_groups_that_are_there_and_large_enough_are_legal(groups: tuple[int, ...]) -> None:
    assert found(Mesh(pp=2, dp_replicate=16, groups=groups)) == []
