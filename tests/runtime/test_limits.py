from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoparallel.planner.strategy.types import (
    Batch,
    EmbeddingRule,
    GradSync,
    Mesh,
    Offload,
    Pipeline,
    Shard,
    Strategy,
)
from autoparallel.profiles import load_cluster
from autoparallel.runtime.limits import limits, on_devices, refused
from tests.toy_graphs import toy_transformer


@pytest.mark.parametrize(
    ("asked", "fixed"),
    [
        ({}, {}),
        ({"pipeline.schedule": "1f1b"}, {}),
        ({"pipeline.schedule": "zb1p"}, {"shard.zero": 1, "mesh.cp": 1}),
        ({"pipeline.schedule": "zb1p", "mesh.dp_shard": 1}, {"mesh.cp": 1}),
        ({"pipeline.schedule": "zbv", "shard.zero": 2}, {"mesh.cp": 1}),
        ({"pipeline.schedule": "dualpipev", "shard.zero": 3}, {"mesh.dp_shard": 1, "mesh.cp": 1}),
        ({"execution.kernels": "compiled"}, {"mesh.tp": 1, "mesh.cp": 1}),
    ],
)
def test_what_is_asked_for_limits_the_meshes_that_run_it(
    asked: dict[str, Any], fixed: dict[str, Any]
) -> None:
    assert limits(asked) == fixed


def test_tables_in_tiers_stand_beside_data_parallelism_alone() -> None:
    rules = (EmbeddingRule(module="tables.*", tier="sharded", hot_rows=0),)
    assert limits({"embedding": rules}) == {f"mesh.{axis}": 1 for axis in ("pp", "tp", "cp", "ep")}
    assert on_devices({"embedding": rules}) == {}
    assert on_devices({})["embedding"] == (EmbeddingRule(module="*", tier="device"),)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"offload": Offload(activations=1.0)}, None),
        ({"offload": Offload(optimizer=1.0)}, None),
        (
            {"mesh": Mesh(pp=2, dp_shard=2), "shard": Shard(zero=3), "pipeline": Pipeline(schedule="zb1p")},
            "mesh.dp_shard = 2",
        ),
    ],
)
def test_what_of_a_strategy_is_not_run_is_told(changes: dict[str, Any], words: str | None) -> None:
    strategy = replace(Strategy(batch=Batch(global_=4, micro=1), mesh=Mesh(dp_replicate=4)), **changes)
    why = refused(toy_transformer(layers=2), None, strategy)
    assert (why is None) if words is None else words in (why or "")


@pytest.mark.parametrize(("cluster", "runs"), [("cpu-gloo:1x4", True), ("h100-sxm:1x4", False)])
def test_algorithms_of_our_own_messages_are_run_on_gloo_alone(cluster: str, runs: bool) -> None:
    ring = Strategy(
        batch=Batch(global_=4, micro=1), mesh=Mesh(dp_replicate=4), grad_sync=GradSync(algorithm="ring")
    )
    assert (refused(toy_transformer(layers=2), load_cluster(cluster), ring) is None) == runs
