from __future__ import annotations

from typing import Any

import pytest

from autoparallel.runtime.limits import limits


@pytest.mark.parametrize(
    ("asked", "fixed"),
    [
        ({}, {}),
        ({"pipeline.schedule": "1f1b"}, {}),
        ({"pipeline.schedule": "zb1p"}, {"mesh.dp_shard": 1}),
        ({"pipeline.schedule": "dualpipev"}, {"mesh.dp_shard": 1}),
        ({"grad_sync.algorithm": "hierarchical"}, {"mesh.dp_shard": 1}),
        ({"execution.kernels": "compiled"}, {"mesh.tp": 1}),
    ],
)
def test_what_is_asked_for_limits_the_meshes_that_run_it(
    asked: dict[str, Any], fixed: dict[str, Any]
) -> None:
    assert limits(asked) == {"mesh.cp": 1, "mesh.ep": 1, **fixed}
