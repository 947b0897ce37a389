"""Plans that `auto_parallelize` makes itself."""

from __future__ import annotations

import pytest

from autoparallel.plan_cache import StrategySource, find_strategy
from autoparallel.planner.strategy.types import Execution
from autoparallel.profiles import load_cluster
from tests.toy_graphs import toy_transformer


@pytest.mark.parametrize("batch", [1, 6])
def test_every_process_that_runs_has_a_part_in_the_plan(batch: int) -> None:
    found = find_strategy(
        toy_transformer(layers=4, hidden=64, heads=4), load_cluster("h100-sxm:1x4"), StrategySource(),
        global_batch=batch, execution=Execution(kernels="eager"), cache=None, allow_lossy=False, time_limit_s=None,
    )  # fmt: skip
    assert found.mesh.devices == 4, found.mesh
