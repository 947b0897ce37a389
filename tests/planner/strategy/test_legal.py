"""What cannot run is refused with the key, its value, and what to try."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoparallel.costmodel.compression import highest_rank, matrix_shape
from autoparallel.errors import UserError
from autoparallel.planner.score import score
from autoparallel.planner.strategy.legal import constraint_problems, strategy_problems
from autoparallel.planner.strategy.types import (
    Batch,
    Execution,
    Mesh,
    Offload,
    Phase,
    Pipeline,
    Recompute,
    Shard,
    Strategy,
)
from autoparallel.profiles.load import load_cluster
from tests.toy_graphs import toy_mlp, toy_transformer

CLUSTER = load_cluster("h100-sxm:1x8")
GRAPH = toy_transformer(layers=4)
GOOD = Strategy(batch=Batch(global_=16, micro=1), mesh=Mesh(dp_replicate=2, tp=2))
PIPED = replace(GOOD, mesh=Mesh(pp=2), pipeline=Pipeline(schedule="1f1b", stage_blocks=(2, 2)))


@pytest.mark.parametrize("strategy", [GOOD, PIPED, replace(GOOD, shard=Shard(sequence_parallel=True))])
def test_a_legal_strategy_has_no_problems(strategy: Strategy) -> None:
    assert strategy_problems(GRAPH, CLUSTER, strategy) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mesh": Mesh(dp_replicate=16)}, ["16 devices", "h100-sxm:1x8", "8"]),
        ({"mesh": Mesh(tp=0)}, ["mesh.tp = 0"]),
        ({"mesh": Mesh(order=("pp", "tp"))}, ["mesh.order", "dp_shard"]),
        ({"batch": Batch(global_=15, micro=2)}, ["batch.global = 15", "batch.micro 2", "12"]),
        ({"batch": Batch(global_=4, micro=0)}, ["batch.micro = 0"]),
        ({"mesh": Mesh(tp=8)}, ["mesh.tp = 8", "heads", "try mesh.tp = 4"]),
        ({"mesh": Mesh(), "shard": Shard(sequence_parallel=True)}, ["shard.sequence_parallel", "mesh.tp"]),
        ({"mesh": Mesh(dp_shard=2)}, ["shard.zero = 0", "mesh.dp_shard", "dp_replicate"]),
        ({"shard": Shard(zero=4)}, ["shard.zero = 4"]),
        ({"mesh": Mesh(pp=2)}, ["pipeline.schedule", "1f1b"]),
        ({"mesh": Mesh(pp=8), "pipeline": Pipeline(schedule="1f1b")}, ["8 chunks", "4 repeated"]),
        (
            {"mesh": Mesh(pp=2), "pipeline": Pipeline(schedule="1f1b", stage_blocks=(1, 2))},
            ["pipeline.stage_blocks", "sums to 3", "4"],
        ),
        (
            {"mesh": Mesh(pp=2), "pipeline": Pipeline(schedule="1f1b", stage_blocks=(4,))},
            ["pipeline.stage_blocks", "1 entries", "2 chunks"],
        ),
        (
            {"mesh": Mesh(pp=3), "pipeline": Pipeline(schedule="1f1b", stage_blocks=(2, 0, 2))},
            ["pipeline.stage_blocks", "needs a block"],
        ),
        ({"pipeline": Pipeline(schedule="program")}, ["pipeline.schedule"]),
        ({"recompute": Recompute(per_stage=(1, 1))}, ["recompute.per_stage", "2 entries"]),
        (
            {"pipeline": Pipeline(stage_blocks=(4,)), "recompute": Recompute(per_stage=(5,))},
            ["recompute.per_stage", "[5]"],
        ),
        ({"mesh": Mesh(ep=2)}, ["mesh.ep = 2"]),
        ({"mesh": Mesh(cp=3)}, ["mesh.cp = 3", "32"]),
        ({"offload": Offload(optimizer=1.5)}, ["offload.optimizer"]),
        ({"execution": Execution(optimizer="lion")}, ["execution.optimizer", "lion", "adamw"]),
    ],
)
def test_what_cannot_run_is_named(change: dict[str, object], words: list[str]) -> None:
    found = strategy_problems(GRAPH, CLUSTER, replace(GOOD, **change))
    assert any(all(word in message for word in words) for message in found), found


def test_a_chain_that_cannot_be_cut_takes_no_pipeline() -> None:
    uncuttable = replace(GRAPH, pipeline_cuts=False)
    (message,) = strategy_problems(uncuttable, CLUSTER, PIPED)
    assert "mesh.pp = 2" in message
    assert "mesh.pp = 1" in message
    assert constraint_problems(uncuttable, CLUSTER, {"mesh.pp": 2}) == [message]
    assert not constraint_problems(uncuttable, CLUSTER, {"mesh.pp": 1, "mesh.tp": 2})


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"grad_sync.compression": ("none", "none")}, "has 2 entries"),
        ({"grad_sync.compression": ("powersgd:9999",)}, "write a rank of "),
        ({"grad_sync.weights": "int8", "shard.zero": 1}, "set shard.zero to 3"),
        ({"servers.staleness": 2}, "leave out servers.staleness"),
    ],
)
def test_a_value_that_nothing_would_read_is_named_at_the_step_from_which_it_is_said(
    said: dict[str, object], words: str
) -> None:
    (message,) = constraint_problems(GRAPH, CLUSTER, said)
    assert words in message
    assert message.startswith(f"{next(iter(said))} = ")
    usual: dict[str, object] = {
        "grad_sync.compression": ("powersgd:2",), "grad_sync.weights": "int8", "shard.zero": 3, "servers.staleness": 1,
    }  # fmt: skip
    assert not constraint_problems(GRAPH, CLUSTER, usual)
    later = Phase(from_step=9, keys=tuple(said.items()))
    assert constraint_problems(GRAPH, CLUSTER, {**usual, "phase": (later,)}) == [f"from step 9: {message}"]


def test_a_rank_that_no_matrix_has_room_for_is_no_method_to_allow() -> None:
    (message,) = constraint_problems(GRAPH, CLUSTER, {}, ("int8", "powersgd:9999"))
    assert message.startswith("lossy methods ['int8', 'powersgd:9999']: powersgd:9999")
    numbers = GRAPH.parameter_count
    most = highest_rank(numbers)
    assert f"a rank of {most} or less" in message
    assert most * sum(matrix_shape(numbers)) < numbers <= (most + 1) * sum(matrix_shape(numbers))
    assert not constraint_problems(GRAPH, CLUSTER, {}, (f"powersgd:{most}",))


def test_a_degree_that_divides_no_parameter_names_those_that_do() -> None:
    found = strategy_problems(toy_mlp(width=12), CLUSTER, replace(GOOD, mesh=Mesh(tp=8)))
    assert any("mesh.tp = 8" in m and "2, 3, 4, 6, 12" in m for m in found), found


def test_scoring_says_every_problem_at_once() -> None:
    bad = replace(GOOD, shard=Shard(zero=7), execution=Execution(optimizer="lion"))
    with pytest.raises(UserError, match=r"shard\.zero = 7[\s\S]*lion"):
        score(GRAPH, CLUSTER, bad)
