"""What of `[grad_sync]` is not run is refused with key, value and remedy, before anything starts."""

from __future__ import annotations

import pytest

from autoparallel.errors import UserError
from autoparallel.planner.strategy.types import GradSync
from autoparallel.runtime.gradients.refusals import check_sync
from tests.runtime.test_replicas import BY_TWO, strategy_of


@pytest.mark.parametrize(
    ("sync", "levels", "mesh", "words"),
    [
        (GradSync(algorithm="nvls"), BY_TWO, {"dp_replicate": 2}, ("nvls", "not run", "one of auto")),
        (GradSync(algorithm="tree"), BY_TWO, {"dp_shard": 2}, ("tree", "write ring")),
        (GradSync(algorithm="ring", compression=("none", "int8")), BY_TWO, {"dp_replicate": 4}, ("int8", "write auto")),
        (GradSync(algorithm="parameter-server"), BY_TWO, {"dp_shard": 2}, ("parameter-server", "write hierarchical")),
        (GradSync(algorithm="hierarchical"), (), {"dp_replicate": 4}, ("hierarchical", "pass cluster=")),
        (GradSync(compression=("int3",)), BY_TWO, {"dp_replicate": 2}, ("int3", "one of")),
        (GradSync(compression=("topk:0",)), BY_TWO, {"dp_replicate": 2}, ("topk:0", "above 0")),
        (GradSync(compression=("topk:0.2-0.1",)), BY_TWO, {"dp_replicate": 2}, ("topk:0.2-0.1", "above 0")),
        (GradSync(compression=("powersgd:0",)), BY_TWO, {"dp_replicate": 2}, ("powersgd:0", "whole rank")),
        (GradSync(compression=("none", "none", "int8")), BY_TWO, {"dp_replicate": 2}, ("3 entries", "leave out")),
        (GradSync(compression=("powersgd:2", "int8")), BY_TWO, {"dp_replicate": 4}, ("powersgd:2", "outermost")),
        (
            GradSync(algorithm="hierarchical", compression=("powersgd:2",) * 2), BY_TWO, {"dp_replicate": 4},
            ("powersgd:2", "write auto"),
        ),
    ],
)  # fmt: skip
def test_what_is_not_run_is_refused(
    sync: GradSync, levels: tuple[int, ...], mesh: dict[str, int], words: tuple[str, str]
) -> None:
    with pytest.raises(UserError, match=r"grad_sync\.") as refusal:
        check_sync(strategy_of(sync, **mesh), levels)
    for word in words:
        assert word in str(refusal.value)


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_a_backend_that_chooses_by_itself_is_not_told(algorithm: str) -> None:
    strategy = strategy_of(GradSync(algorithm=algorithm), dp_replicate=4)
    check_sync(strategy, BY_TWO, "gloo")
    with pytest.raises(UserError, match="nccl chooses"):
        check_sync(strategy, BY_TWO, "nccl")


@pytest.mark.parametrize(
    "sync",
    [
        GradSync(algorithm="ring"),
        GradSync(compression=("int8", "topk:0.001-0.01")),
        GradSync(compression=("powersgd:4", "powersgd:4")),
    ],
)
def test_without_replicas_any_algorithm_will_do(sync: GradSync) -> None:
    check_sync(strategy_of(sync, tp=4), BY_TWO)
