"""Clusters of unlike devices: stages in proportion, each rank's own memory, bounds that stay true."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from autoparallel.planner.heterogeneous.mixed import is_mixed, parts
from autoparallel.planner.problem import Objective, Problem
from autoparallel.planner.score import score
from autoparallel.planner.search.bounds.outer import expand_shapes, outer_of
from autoparallel.planner.search.evaluate import evaluate
from autoparallel.planner.search.partition.problem import Partition
from autoparallel.planner.search.partition.quick import proportional
from autoparallel.planner.search.space.candidates import candidate, strategy_of
from autoparallel.planner.strategy.types import Execution
from autoparallel.profiles import Cluster, load_cluster
from tests.planned import plan
from tests.toy_graphs import toy_transformer

# Large enough that a block's products, which the devices differ in, outweigh launches and messages.
GRAPH = toy_transformer(layers=8, hidden=4096, heads=32, seq=2048, vocab=1024)


def mixed(a100s: int = 1, v100s: int = 1, prices: tuple[float, float] | None = None) -> Cluster:
    usual = load_cluster("a100-v100")
    fast, slow = usual.groups
    groups = (replace(fast, nodes=1, devices_per_node=a100s), replace(slow, nodes=1, devices_per_node=v100s))
    if prices:
        groups = tuple(replace(g, price_per_device_hour=p) for g, p in zip(groups, prices, strict=True))  # type: ignore[assignment]
    inner, outer = usual.levels
    levels = (replace(inner, size=max(a100s, v100s)), replace(outer, size=2 * max(a100s, v100s)))
    return replace(usual, groups=groups, levels=levels)


def problem_of(cluster: Cluster, **constraints: object) -> Problem:
    execution = Execution(dtype="fp16", param_dtype="fp16")
    fixed = {key.replace("__", "."): value for key, value in constraints.items()}
    return Problem(graph=GRAPH, cluster=cluster, global_batch=16, constraints=fixed, execution=execution)


def test_the_faster_device_gets_more_blocks() -> None:
    blocks = plan(
        problem_of(mixed(), mesh__groups=(0, 1), pipeline__schedule="1f1b")
    ).strategy.pipeline.stage_blocks
    assert blocks[0] > blocks[1]
    blocks = plan(
        problem_of(mixed(), mesh__groups=(1, 0), pipeline__schedule="1f1b")
    ).strategy.pipeline.stage_blocks
    assert blocks[0] < blocks[1]


def test_a_plan_of_all_parts_is_no_worse_than_any_of_them() -> None:
    problem = problem_of(mixed(), recompute__mode="none", batch__micro=1)
    found = plan(problem)
    assert is_mixed(problem)
    each = [plan(part.problem).prediction.step_time_s for part in parts(problem)]
    assert found.prediction.step_time_s <= min(each) * (1 + 1e-5)
    assert found.lower_bound_s <= min(each) * (1 + 1e-9)
    assert found.strategy.mesh.groups in ((0, 1), (1, 0)), found.strategy.mesh
    names = "; ".join(a.kind for a in found.alternatives)
    assert "only the 1 a100-sxm-40gb" in names


def test_no_partition_of_blocks_beats_an_optimal_plan_of_named_groups() -> None:
    problem = problem_of(mixed(), mesh__groups=(0, 1), pipeline__schedule="1f1b", recompute__mode="none")
    found = plan(problem)
    assert found.status == "optimal"
    for first in range(1, 8):
        pipeline = replace(found.strategy.pipeline, stage_blocks=(first, 8 - first))
        for micro in (1, 2, 4):
            batch = replace(found.strategy.batch, micro=micro)
            other = replace(found.strategy, pipeline=pipeline, batch=batch,
                            recompute=replace(found.strategy.recompute, per_stage=()))  # fmt: skip
            prediction = score(GRAPH, problem.cluster, other)
            if prediction.feasible:
                assert prediction.step_time_s >= found.prediction.step_time_s * (1 - 2e-6), (first, micro)


def test_bounds_over_unlike_devices_are_true() -> None:
    problem = problem_of(mixed(2, 2), mesh__groups=(0, 1))
    outer = outer_of(problem)
    assert outer is not None
    assert outer.pace is not None
    assert (outer.pace[0] == 1.0).all()
    assert (outer.pace[1] < 1.0).all()
    found, bounds = expand_shapes(outer, np.arange(len(outer.space.shapes)), float("inf"))
    rng = np.random.default_rng(0)
    for row in rng.permutation(len(found))[:40]:
        chosen = candidate(outer.space, found, int(row))
        if chosen.virtual_stages > 1:
            continue
        first = int(rng.integers(1, 8))
        simulated = evaluate(
            outer.book.expander,
            strategy_of(problem, chosen, Partition(blocks=(first, 8 - first), recomputed=(0, 0))),
        )
        if outer.excess_bytes(simulated) <= 0:
            assert bounds.time_s[row] <= simulated.step_time_s * (1 + 1e-9), chosen


def test_the_cheaper_devices_win_where_cost_is_asked_for() -> None:
    dear = replace(problem_of(mixed(1, 1, (100.0, 1.0))), objective=Objective.COST)
    assert set(plan(dear).strategy.mesh.groups) == {1}
    cheap = replace(problem_of(mixed(1, 1, (1.0, 100.0))), objective=Objective.COST)
    assert set(plan(cheap).strategy.mesh.groups) == {0}


@pytest.mark.parametrize(
    ("shares", "found"), [((5.6, 2.4), (6, 2)), ((2.5, 2.5, 3.0), (2, 3, 3)), ((7.9, 0.1), (7, 1))]
)
def test_proportional_blocks_sum_to_all_and_keep_their_limits(
    shares: tuple[float, ...], found: tuple[int, ...]
) -> None:
    blocks = proportional(shares, (1,) * len(shares), (8,) * len(shares))
    assert sum(blocks) == round(sum(shares))
    assert sorted(blocks) == sorted(found)


def test_of_interleaved_stages_no_single_block_stands_better_elsewhere() -> None:
    problem = problem_of(
        mixed(2, 2), mesh__groups=(1, 0), pipeline__schedule="interleaved-1f1b", batch__micro=1, mesh__cp=1
    )
    outer, found = outer_of(problem), plan(problem, advise=False)
    assert outer is not None
    blocks, strategy = found.strategy.pipeline.stage_blocks, found.strategy
    for off, to in permutations(range(len(blocks)), 2):
        moved = tuple(n - (c == off) + (c == to) for c, n in enumerate(blocks))
        if min(moved) < 1 or any(strategy.recompute.per_stage):
            continue
        other = evaluate(
            outer.book.expander, replace(strategy, pipeline=replace(strategy.pipeline, stage_blocks=moved))
        )
        assert not outer.fits(other) or other.step_time_s >= found.prediction.step_time_s * (1 - 1e-6), moved
