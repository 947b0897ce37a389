"""The tensor rules that the planner finds, run: what it can choose is what the runtime can do."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.planner.capture import capture
from autoparallel.planner.capture.load import keyword_inputs
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.sharding.pareto import FASTEST, LEANEST
from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Shard, Strategy, TensorRule
from autoparallel.profiles import load_cluster
from tests.runtime.compare import TOLERANCE, compare
from tests.runtime.harness import Processes
from tests.runtime.models import EXAMPLES
from tests.runtime.test_step import MODELS

pytestmark = pytest.mark.distributed


@cache
def _graph(name: str) -> ModelGraph:
    example = EXAMPLES[name](4)
    return capture(example.module, keyword_inputs(example.module, example.inputs), name=name)


def planned_rules(
    name: str, tp: int, sequence_parallel: bool, memory_price: float | None = None
) -> tuple[TensorRule, ...]:
    """The entries of a model's tensor plan, or of the point that is best at a price of memory."""
    strategy = Strategy(
        batch=Batch(global_=4, micro=4),
        mesh=Mesh(tp=tp),
        shard=Shard(sequence_parallel=sequence_parallel),
        execution=Execution(dtype="fp32", param_dtype="fp32", master_weights=False, kernels="eager"),
    )
    expander = Expander(_graph(name), load_cluster(f"cpu-gloo:1x{tp}"))
    if memory_price is None:
        return expander.tensor_plan(strategy).rules
    point = expander.works.pareto_plan(strategy, memory_price)
    assert point is not None
    return point.rules


CASES: list[tuple[int, str, bool, float | None]] = [
    (tp, model, sequence_parallel, None)
    for tp, models in ((2, MODELS), (4, ("llama", "gpt2")))
    for model in models
    for sequence_parallel in (False, True)
    if not (model == "resnet" and sequence_parallel)  # images are no sequences
]


CASES += [
    (4, "by_hand", False, None),
    (2, "by_hand", True, None),
    (4, "torchs_attention", False, None),
    (2, "torchs_attention", True, None),
    (2, "llama", False, LEANEST),
    (2, "gpt2", True, FASTEST),
]


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("tp", "model", "sequence_parallel", "memory_price"), CASES)
def test_planned_rules_give_the_gradients_of_one_process(
    gloo: Processes, tp: int, model: str, sequence_parallel: bool, memory_price: float | None
) -> None:
    dtype = MODELS.get(model, "float64")
    rules = planned_rules(model, tp, sequence_parallel, memory_price)
    options = {"tp": tp, "tensor": rules, "micro_batches": 2}
    found = gloo.run(tp, compare, name=model, options=options, dtype=dtype)[0]
    limit = TOLERANCE[getattr(torch, dtype)]
    assert found.loss <= limit, (found, rules)
    assert found.gradient <= limit, (found, rules)
