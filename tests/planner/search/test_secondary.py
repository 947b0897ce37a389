"""A second copy of ZeRO-3's parameters (`shard.secondary`): priced, bounded, chosen where it pays, refused where it says nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoparallel.planner.expand.axes import SECONDARY
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.problem import Problem
from autoparallel.planner.score import score
from autoparallel.planner.search.bounds.outer import expand_shapes, outer_of
from autoparallel.planner.search.evaluate import evaluate
from autoparallel.planner.search.partition.quick import even_partition
from autoparallel.planner.search.space.build import build_space, variants
from autoparallel.planner.search.space.candidates import candidate, strategy_of
from autoparallel.planner.strategy.legal import constraint_problems, strategy_problems
from autoparallel.planner.strategy.types import Batch, Mesh, Pipeline, Shard, Strategy
from autoparallel.profiles.load import load_cluster
from tests.planned import plan
from tests.toy_graphs import toy_transformer

GRAPH = toy_transformer(layers=4, hidden=512, heads=4, seq=32)
CLUSTER = load_cluster("hgx-100g-ethernet")
ALONE = {"mesh.pp": 1, "mesh.tp": 1, "mesh.cp": 1, "mesh.dp_replicate": 1, "shard.zero": 3}
PROBLEM = Problem(graph=GRAPH, cluster=CLUSTER, global_batch=64, constraints=ALONE, all_devices=True)


def strategy(secondary: int, **mesh: int) -> Strategy:
    sizes = Mesh(**{"dp_shard": 32, **mesh})
    return Strategy(
        batch=Batch(global_=64, micro=1), mesh=sizes, shard=Shard(zero=3, secondary=secondary),
        pipeline=Pipeline(stage_blocks=(4,)),
    )  # fmt: skip


def test_backward_passes_gather_from_the_copy_which_is_held() -> None:
    expander = Expander(GRAPH, CLUSTER)
    bare, copied = (expander.program(strategy(n)).stages[0] for n in (0, 8))
    for without, block in zip((b for b, _ in bare.blocks), (b for b, _ in copied.blocks), strict=True):
        if not block.parameters:
            continue
        assert block.gathers == without.gathers == without.regathers
        (gather,), (regather,) = block.gathers, block.regathers
        assert (regather.axes, regather.size_bytes) == ((SECONDARY,), gather.size_bytes)
    parameters = sum(b.parameters * count for b, count in copied.blocks)
    more = copied.parameter_bytes - bare.parameter_bytes
    assert more == pytest.approx(2 * parameters / 8, rel=1e-3)
    plain, faster = (score(GRAPH, CLUSTER, strategy(n)) for n in (0, 8))
    assert faster.step_time_s < plain.step_time_s


def test_the_plan_has_a_copy_inside_a_node_where_that_pays() -> None:
    answer = plan(PROBLEM, within=0.0)
    free = {
        n: score(GRAPH, CLUSTER, replace(answer.strategy, shard=Shard(zero=3, secondary=n))) for n in (0, 8)
    }
    assert answer.strategy.shard.secondary == 8
    assert answer.prediction.step_time_s == min(one.step_time_s for one in free.values())
    fixed = plan(replace(PROBLEM, constraints={**ALONE, "shard.secondary": 4}), within=0.0)
    assert fixed.strategy.shard.secondary == 4
    assert (
        fixed.prediction.step_time_s
        < score(GRAPH, CLUSTER, replace(fixed.strategy, shard=Shard(zero=3))).step_time_s
    )
    none = plan(replace(PROBLEM, constraints={**ALONE, "shard.secondary": 0}), within=0.0)
    assert none.strategy.shard.secondary == 0
    assert none.prediction.step_time_s > answer.prediction.step_time_s


def test_the_space_has_copies_where_they_are_legal_and_counts_them() -> None:
    problem = replace(PROBLEM, constraints={})
    space = build_space(problem)
    every = variants(space, np.arange(len(space.shapes)))
    assert len(every) == space.counts().sum()
    copied = space.secondary(every)
    rows = np.flatnonzero(copied)
    assert set(copied[rows].tolist()) >= {8}
    shapes = space.shapes.take(every.shape[rows])
    assert ((shapes.pp * shapes.tp * shapes.cp == 1) & (every.zero[rows] == 3)).all()


def test_no_strategy_with_a_copy_is_faster_than_its_bound() -> None:
    outer = outer_of(PROBLEM)
    assert outer is not None
    every, bounds = expand_shapes(outer, np.arange(len(outer.space.shapes)), np.inf, memory=True)
    copied = np.flatnonzero(outer.space.secondary(every))
    assert len(copied)
    blocks = len(GRAPH.repeated_positions)
    for row in copied.tolist():
        chosen = candidate(outer.space, every, row)
        found = evaluate(
            outer.book.expander, strategy_of(PROBLEM, chosen, even_partition(blocks, chosen.chunks))
        )
        assert bounds.time_s[row] <= found.step_time_s * (1 + 1e-9), chosen
        assert bounds.memory_bytes[row] <= found.peak_bytes + 1, chosen
    assert (bounds.time_s[copied] > 0).all()


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (strategy(3), "divisor"), (strategy(32), "divisor"), (strategy(8, dp_shard=16, tp=2), "mesh.tp"),
        (strategy(1), "divisor"), (replace(strategy(8), shard=Shard(zero=2, secondary=8)), "shard.zero"),
    ],
)  # fmt: skip
def test_a_copy_that_says_nothing_is_refused(found: Strategy, word: str) -> None:
    (problem,) = strategy_problems(GRAPH, CLUSTER, found)
    assert problem.startswith("shard.secondary")
    assert word in problem


@pytest.mark.parametrize(
    ("beside", "word"),
    [
        ({"mesh.tp": 2}, "mesh.tp = 1, not 2"),
        ({"shard.zero": 2}, "shard.zero = 3"),
        ({"mesh.dp_shard": 12}, "divisor"),
    ],
)
def test_constraints_that_no_copy_meets_are_told_apart(beside: dict[str, object], word: str) -> None:
    (problem,) = constraint_problems(GRAPH, CLUSTER, {"shard.secondary": 8, **beside})
    assert word in problem
    assert not constraint_problems(GRAPH, CLUSTER, {"shard.secondary": 8})
