"""What a search that its work ended gives: no plan that a look at its own schedule or a single block would improve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from autoparallel.planner.problem import Problem
from autoparallel.planner.score import score
from autoparallel.planner.strategy.legal import strategy_problems
from autoparallel.planner.strategy.types import Execution, Recompute, Strategy
from autoparallel.profiles.load import load_cluster
from tests.planned import plan
from tests.toy_graphs import toy_transformer

# Links so slow that messages between stages take as long as computation, where bounds tell little.
GRAPH = toy_transformer(layers=24, hidden=2048, heads=16, seq=2048, vocab=32000)
LITTLE = 300.0  # work: the search is far from its end
ALIKE = ("gpipe", "1f1b", "zb1p")  # schedules of one chunk a rank
CLOSE = 0.01  # one block more or less may still tell less than this


def under_other_schedules(strategy: Strategy) -> Iterator[Strategy]:
    one_chunk = strategy.pipeline.schedule in ALIKE and strategy.pipeline.virtual_stages == 1
    for schedule in ALIKE if one_chunk else ():
        yield replace(strategy, pipeline=replace(strategy.pipeline, schedule=schedule))


def one_block_moved(strategy: Strategy) -> Iterator[Strategy]:
    blocks = strategy.pipeline.stage_blocks
    for off in range(len(blocks)):
        for to in range(len(blocks)):
            if off != to and blocks[off] > 1:
                moved = [n - (c == off) + (c == to) for c, n in enumerate(blocks)]
                yield replace(strategy, pipeline=replace(strategy.pipeline, stage_blocks=tuple(moved)))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("cluster", "batch"), [("v100-sxm2-16gb:4x4", 16), ("rtx4090:4x4", 16), ("a100-pcie-80gb:8x2", 16)]
)
def test_no_other_schedule_and_no_block_moved_is_better(cluster: str, batch: int) -> None:
    execution = Execution(dtype="fp16", param_dtype="fp16")
    problem = Problem(graph=GRAPH, cluster=load_cluster(cluster), global_batch=batch, execution=execution)
    found = plan(problem, advise=False, most_work=LITTLE)
    assert found.status == "feasible"
    for others, close in ((under_other_schedules, 1e-6), (one_block_moved, CLOSE)):
        for other in others(found.strategy):
            known = score(problem.graph, problem.cluster, other)
            assert not known.feasible or known.step_time_s >= found.prediction.step_time_s * (1 - close), (
                other
            )


def one_key_changed(strategy: Strategy) -> Iterator[Strategy]:
    shard, batch = strategy.shard, strategy.batch
    for mode in ("none", "selective", "full"):
        yield replace(strategy, recompute=Recompute(mode=mode))
    for zero in (1, 2, 3) if strategy.mesh.dp_shard > 1 else ():
        yield replace(strategy, shard=replace(shard, zero=zero))
    whole = strategy.batch.micro * strategy.micro_batches
    for micro in (batch.micro * 2, batch.micro // 2):
        if micro and whole % micro == 0:
            yield replace(strategy, batch=replace(batch, micro=micro))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("cluster", ["v100-sxm2-16gb:4x4", "a100-pcie-80gb:8x2"])
def test_no_key_changed_is_better(cluster: str) -> None:
    execution = Execution(dtype="fp16", param_dtype="fp16")
    problem = Problem(graph=GRAPH, cluster=load_cluster(cluster), global_batch=16, execution=execution)
    found = plan(problem, advise=False, most_work=700.0)
    tried = 0
    for other in one_key_changed(found.strategy):
        if not strategy_problems(problem.graph, problem.cluster, other):
            known, tried = score(problem.graph, problem.cluster, other), tried + 1
            assert not known.feasible or known.step_time_s >= found.prediction.step_time_s * (1 - 1e-6), other
    assert tried > 2
