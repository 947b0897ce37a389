"""Embedding tables larger than a device are sharded, and smaller ones where that is faster than replicas."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.planner.capture import capture
from autoparallel.planner.capture.load import load_model
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.problem import Problem
from autoparallel.planner.strategy.file import strategy_to_constraints
from autoparallel.planner.strategy.types import Batch, EmbeddingRule, Execution, Mesh, Pipeline, Strategy
from autoparallel.profiles.load import load_cluster
from tests.planned import plan

ON_DEVICES = (EmbeddingRule(module="*", tier="device"),)  # tests/planner/search/test_tiers.py has the others
CLUSTER = load_cluster("a100-sxm-80gb:1x8")


def recommender(rows: int) -> ModelGraph:
    loaded = load_model("examples/dlrm.py:dlrm", model_args={"rows": str(rows), "tables": "8"})
    return capture(loaded.module, loaded.example_inputs, name=loaded.name)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("rows", [1_000_000, 60_000_000])
def test_tables_are_sharded_where_replicas_are_slower_or_do_not_fit(rows: int) -> None:
    graph = recommender(rows)
    execution = Execution(kernels="eager", dtype="fp32", param_dtype="fp32", optimizer="sgd")
    problem = Problem(
        graph=graph, cluster=CLUSTER, global_batch=4096, execution=execution,
        constraints={"mesh.pp": 1, "recompute.mode": "none", "embedding": ON_DEVICES},
    )  # fmt: skip
    best = plan(problem)
    assert best.prediction.feasible
    tables = {n for block in graph.blocks for p in block.parameters for n in [p.name] if p.shape[0] == rows}
    placed = {
        place
        for block in Expander(graph, CLUSTER).tensor_plan(best.strategy).blocks
        for name, place in block.params
        if name in tables
    }
    assert best.strategy.mesh.tp > 1, best.strategy.mesh
    assert any(place.startswith("S") for place in placed)
    if rows == 1_000_000:
        # Whatever else replicas may do, which a proof of their best would take long to find.
        replicas = plan(replace(problem, constraints={**problem.constraints, "mesh.tp": 1}), most_work=1000.0)
        assert best.prediction.step_time_s < replicas.lower_bound_s / 2


def test_tables_are_sharded_across_nodes_where_their_gradients_would_take_longer() -> None:
    graph = recommender(20_000_000)
    cluster = load_cluster("a100-sxm-80gb:4x4")
    execution = Execution(kernels="eager", dtype="fp32", param_dtype="fp32", optimizer="sgd")
    fixed = {"mesh.pp": 1, "recompute.mode": "none", "embedding": ON_DEVICES}
    best = plan(
        Problem(graph=graph, cluster=cluster, global_batch=4096, execution=execution, constraints=fixed)
    )
    near = plan(
        Problem(
            graph=graph, cluster=cluster, global_batch=4096, execution=execution,
            constraints={**fixed, "mesh.tp": 8},
        ),
        most_work=400.0,
    )  # fmt: skip
    assert best.strategy.mesh.tp > 8, best.strategy.mesh
    assert best.prediction.step_time_s < near.lower_bound_s


def test_stages_of_equal_tables_send_what_was_looked_up_before_them_too() -> None:
    graph = recommender(10_000)
    execution = Execution(kernels="eager", dtype="fp32", param_dtype="fp32", optimizer="sgd")
    strategy = Strategy(
        batch=Batch(global_=64, micro=64), mesh=Mesh(pp=5), execution=execution,
        pipeline=Pipeline(schedule="gpipe", stage_blocks=(5, 2, 2, 2, 5)),
    )  # fmt: skip
    stages = Expander(graph, CLUSTER).stages(strategy)
    sent = [stage.send.size_bytes for stage in stages if stage.send is not None]
    each = 2 * 64 * 128 * 4  # of the two tables of a stage
    assert [after - before for before, after in pairwise(sent[:3])] == [each] * 2


def test_keys_fixed_at_the_plans_own_values_change_nothing_beyond_its_gap() -> None:
    execution = Execution(kernels="eager", dtype="fp32", param_dtype="fp32", optimizer="sgd")
    problem = Problem(
        graph=recommender(2_000_000), cluster=CLUSTER, global_batch=4096, execution=execution,
        constraints={"mesh.pp": 1, "recompute.mode": "none", "batch.micro": 512},
    )  # fmt: skip
    best = plan(problem)
    own = strategy_to_constraints(best.strategy)
    for section in ("grad_sync.", "offload.", "shard."):
        fixed = {key: value for key, value in own.items() if key.startswith(section)}
        found = plan(replace(problem, constraints={**problem.constraints, **fixed}))
        slack = 1 + max(best.gap, found.gap) + 1e-6
        assert 1 / slack <= found.prediction.step_time_s / best.prediction.step_time_s <= slack, fixed
