"""Strategies drawn from the planner's own space, run: whatever `plan` may emit gives one process's gradients."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.errors import UserError
from autoparallel.planner.capture import capture
from autoparallel.planner.capture.load import keyword_inputs
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.candidates import candidate, strategy_of
from autoparallel.planner.search.deals import even_deal
from autoparallel.planner.search.result import with_rules
from autoparallel.planner.search.space import build_space, variants
from autoparallel.planner.strategy.legal import strategy_problems
from autoparallel.planner.strategy.types import Execution, Strategy
from autoparallel.profiles import load_cluster
from tests.runtime.compare import TOLERANCE, run_strategy
from tests.runtime.harness import Processes
from tests.runtime.models import EXAMPLES
from tests.runtime.test_step import MODELS

pytestmark = pytest.mark.distributed

GLOBAL_BATCH = 8
SAMPLES = {1: 1, 2: 1, 4: 3}  # strategies per model by number of processes: what the time for tests allows


@cache
def _graph(name: str) -> ModelGraph:
    example = EXAMPLES[name](4)
    return capture(example.module, keyword_inputs(example.module, example.inputs), name=name)


def space_of(name: str, devices: int) -> list[Strategy]:
    """Every legal strategy of the space but for tensor rules, with blocks dealt evenly."""
    graph, cluster = _graph(name), load_cluster(f"cpu-gloo:1x{devices}")
    execution = Execution(dtype="fp32", param_dtype="fp32", master_weights=False, kernels="eager")
    problem = Problem(graph=graph, cluster=cluster, global_batch=GLOBAL_BATCH, execution=execution)
    space = build_space(problem)
    columns = variants(space, torch.arange(len(space.shapes.pp)).numpy())
    found = []
    for row in range(len(columns.shape)):
        chosen = candidate(space, columns, row)
        blocks = len(graph.repeated_positions)
        try:
            strategy = strategy_of(problem, chosen, even_deal(blocks, chosen.chunks))
        except UserError:
            continue
        if not strategy_problems(graph, cluster, strategy):
            found.append(strategy)
    return found


def complete(name: str, strategy: Strategy) -> Strategy | None:
    """The strategy with its tensor rules; None where the model has none for its degree."""
    cluster = load_cluster(f"cpu-gloo:1x{strategy.mesh.devices}")
    try:
        return with_rules(Expander(_graph(name), cluster), strategy)
    except UserError:
        return None


def drawn(name: str, devices: int, count: int) -> list[Strategy]:
    """`count` strategies, the same ones every time, of as many kinds as there are."""
    order = random.Random(f"{name} {devices}")
    pool = space_of(name, devices)
    order.shuffle(pool)
    kinds: set[object] = set()
    found = []
    for strategy in pool:
        mesh = strategy.mesh
        kind = (mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.tp, strategy.pipeline.schedule)
        if kind not in kinds and (whole := complete(name, strategy)) is not None:
            kinds.add(kind)
            found.append(whole)
        if len(found) == count:
            break
    return found


@pytest.mark.parametrize("devices", SAMPLES)
@pytest.mark.parametrize("model", MODELS)
def test_strategies_of_the_space_give_the_gradients_of_one_process(
    gloo: Processes, model: str, devices: int
) -> None:
    limit = TOLERANCE[getattr(torch, MODELS[model])]
    for strategy in drawn(model, devices, SAMPLES[devices]):
        found = gloo.run(devices, run_strategy, name=model, strategy=strategy, dtype=MODELS[model])[0]
        assert found.loss <= limit, (found, strategy)
        assert found.gradient <= limit, (found, strategy)
