"""Strategies drawn from the planner's own space, run: whatever `plan` may emit gives one process's gradients."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.errors import UserError
from autoparallel.planner.capture import capture
from autoparallel.planner.capture.load import keyword_inputs
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.problem import Problem
from autoparallel.planner.score import completed
from autoparallel.planner.search.partition.problem import Partition
from autoparallel.planner.search.space.build import build_space, variants
from autoparallel.planner.search.space.candidates import Candidate, candidate, strategy_of
from autoparallel.planner.strategy.legal import least_blocks, strategy_problems
from autoparallel.planner.strategy.types import Execution, Strategy
from autoparallel.profiles import load_cluster
from autoparallel.runtime.capabilities.grad_sync import ALGORITHMS
from autoparallel.runtime.capabilities.rows import Case
from autoparallel.runtime.capabilities.table import limits, refusals
from autoparallel.runtime.limits import refuser
from tests.runtime.compare import TOLERANCE, run_strategy
from tests.runtime.expert_models import EXPERT_EXAMPLES
from tests.runtime.harness import Processes
from tests.runtime.models import EXAMPLES
from tests.runtime.test_step import MODELS

pytestmark = pytest.mark.distributed

GLOBAL_BATCH = 8
SAMPLES = {1: 1, 2: 1, 4: 1}  # strategies per model by number of processes: what the time for tests allows
SPLIT_BACKWARD = ("zb1p", "zbv", "dualpipev")  # planned only when asked for


@cache
def _graph(name: str) -> ModelGraph:
    example = (EXAMPLES | EXPERT_EXAMPLES)[name](4)
    return capture(example.module, keyword_inputs(example.module, example.inputs), name=name)


def _divided(order: random.Random, graph: ModelGraph, chosen: Candidate) -> Partition | None:
    """Blocks divided to the chunks by chance, some of them recomputed; None where there are too few."""
    divided = list(least_blocks(graph, chosen.chunks))
    if sum(divided) > len(graph.repeated_positions):
        return None
    for _ in range(len(graph.repeated_positions) - sum(divided)):
        divided[order.randrange(chosen.chunks)] += 1
    full = (0 if chosen.mode == "full" else order.randint(0, count) for count in divided)
    return Partition(blocks=tuple(divided), recomputed=tuple(full))


def space_of(
    order: random.Random, name: str, devices: int, asked: Mapping[str, object] | None = None
) -> Iterator[Strategy]:
    """Every legal strategy of what is searched for a run, but for tensor rules, in an order and with blocks divided by chance."""
    graph, cluster = _graph(name), load_cluster(f"cpu-gloo:1x{devices}")
    execution = Execution(dtype="fp32", param_dtype="fp32", master_weights=False, kernels="eager")
    problem = Problem(
        graph=graph,
        cluster=cluster,
        global_batch=GLOBAL_BATCH,
        execution=execution,
        constraints={**limits(asked or {}), **(asked or {})},
    )
    space, refused = build_space(problem), refuser(graph, cluster)
    columns = variants(space, torch.arange(len(space.shapes.pp)).numpy())
    rows = list(range(len(columns.shape)))
    order.shuffle(rows)
    for row in rows:
        chosen = candidate(space, columns, row)
        partition = _divided(order, graph, chosen)
        if partition is None:
            continue
        strategy = strategy_of(problem, chosen, partition)
        if not strategy_problems(graph, cluster, strategy) and refused(strategy) is None:
            yield strategy


def complete(name: str, strategy: Strategy) -> Strategy | None:
    """The strategy with its tensor rules; None where the model has none for its degree."""
    cluster = load_cluster(f"cpu-gloo:1x{strategy.mesh.devices}")
    try:
        return completed(Expander(_graph(name), cluster), strategy)
    except UserError:
        return None


def _synchronised(order: random.Random, strategy: Strategy) -> Strategy:
    """The strategy with an algorithm of gradients that the table allows, by chance."""
    every = (replace(strategy, grad_sync=replace(strategy.grad_sync, algorithm=name)) for name in ALGORITHMS)
    return order.choice([one for one in every if not list(refusals(Case(strategy=one, level_sizes=())))])


def drawn(name: str, devices: int, count: int, asked: Mapping[str, object] | None = None) -> list[Strategy]:
    """`count` strategies, the same ones every time, of as many kinds as there are."""
    order = random.Random(f"{name} {devices}")
    kinds: set[object] = set()
    found = []
    for strategy in space_of(order, name, devices, asked):
        mesh = strategy.mesh
        kind = (mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp, strategy.pipeline.schedule)
        if kind not in kinds and (whole := complete(name, strategy)) is not None:
            kinds.add(kind)
            found.append(_synchronised(order, whole))
        if len(found) == count:
            break
    return found


@pytest.mark.sweep(8)
@pytest.mark.parametrize("devices", SAMPLES)
@pytest.mark.parametrize("model", MODELS)
def test_strategies_of_the_space_give_the_gradients_of_one_process(
    gloo: Processes, model: str, devices: int
) -> None:
    for strategy in drawn(model, devices, SAMPLES[devices]):
        _compare(gloo, model, strategy)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("model", "schedule"), zip(MODELS, itertools.cycle(SPLIT_BACKWARD), strict=False))
def test_schedules_that_are_asked_for_are_planned_as_they_can_run(
    gloo: Processes, model: str, schedule: str
) -> None:
    (strategy,) = drawn(model, 4, 1, {"pipeline.schedule": schedule})
    assert strategy.pipeline.schedule == schedule
    _compare(gloo, model, strategy)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("model", "mesh"),
    [("mixtral", {"ep": 1, "tp": 2}), ("mixtral", {"ep": 2, "pp": 2, "dp_shard": 2}), ("deepseek", {"ep": 2, "tp": 2})],
)  # fmt: skip
def test_strategies_that_share_experts_give_the_gradients_of_one_process(
    gloo: Processes, model: str, mesh: dict[str, int]
) -> None:
    (strategy,) = drawn(model, 4, 1, {f"mesh.{axis}": size for axis, size in mesh.items()})
    assert {axis: getattr(strategy.mesh, axis) for axis in mesh} == mesh
    _compare(gloo, model, strategy)


def test_shares_of_a_sequence_that_are_asked_for_are_planned_as_they_can_run(gloo: Processes) -> None:
    """Sequences as short as these are not cut of the search's own accord."""
    (strategy,) = drawn("gpt2", 4, 1, {"mesh.cp": 2, "mesh.pp": 2})
    assert strategy.mesh.cp == 2
    _compare(gloo, "gpt2", strategy)


def _compare(gloo: Processes, model: str, strategy: Strategy) -> None:
    dtype, devices = MODELS.get(model, "float32"), strategy.mesh.devices
    found = gloo.run(devices, run_strategy, name=model, strategy=strategy, dtype=dtype)[0]
    limit = TOLERANCE[getattr(torch, dtype)]
    assert found.loss <= limit, (found, strategy)
    assert found.gradient <= limit, (found, strategy)
