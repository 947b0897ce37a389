from __future__ import annotations

from typing import Any

import pytest

from autoparallel.errors import UserError
from autoparallel.planner.strategy.types import EmbeddingRule
from autoparallel.runtime.limits import ON_DEVICES, limits


@pytest.mark.parametrize(
    ("asked", "fixed"),
    [
        ({}, {}),
        ({"pipeline.schedule": "1f1b"}, {}),
        ({"pipeline.schedule": "zb1p"}, {"mesh.dp_shard": 1, "mesh.cp": 1}),
        ({"pipeline.schedule": "zbv", "shard.zero": 1}, {"mesh.cp": 1}),
        ({"pipeline.schedule": "dualpipev", "shard.zero": 3}, {"mesh.dp_shard": 1, "mesh.cp": 1}),
        ({"grad_sync.algorithm": "hierarchical"}, {"mesh.dp_shard": 1, "mesh.cp": 1}),
        ({"execution.kernels": "compiled"}, {"mesh.tp": 1, "mesh.cp": 1}),
    ],
)
def test_what_is_asked_for_limits_the_meshes_that_run_it(
    asked: dict[str, Any], fixed: dict[str, Any]
) -> None:
    assert limits(asked) == {"embedding": ON_DEVICES, **fixed}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"embedding": (EmbeddingRule(module="tables.*", tier="sharded", hot_rows=0),)},
            r"tables\.\*.*on the devices",
        ),
        ({"grad_sync.algorithm": "parameter-server"}, "no parameter servers"),
    ],
)
def test_what_no_mesh_runs_is_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        limits(asked)
