"""A second copy of ZeRO-3's parameters, which backward passes gather from (hpZ)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from autoparallel.costmodel.program import CollectiveOp
from autoparallel.planner.expand.axes import SECONDARY
from autoparallel.runtime.check.messages import Message
from autoparallel.runtime.check.traffic import TrafficRecorder, group_names
from autoparallel.runtime.start import parallelize
from tests.runtime.compare import build, compare, largest_difference, part, reference_step, strategy_of
from tests.runtime.harness import Processes
from tests.runtime.shared import no_program

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-5
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"dp_shard": 4, "micro_batches": 2}),
    ("gpt2", {"dp_shard": 4, "recompute": "full"}),
    ("vit", {"dp_shard": 4}),  # position embeddings of one sample: padding along the first dim
    ("mixtral", {"dp_shard": 4, "ep": 2}),  # experts have no second copy
]


def _compared(rank: int, world_size: int) -> list[float]:
    found = []
    for name, options in CASES:
        difference = compare(rank, world_size, name, {**options, "zero": 3, "secondary": 2})
        found.append(0.0 if difference is None else max(difference.loss, difference.gradient))
    return found


def test_every_kind_of_unit_equals_one_process(gloo: Processes) -> None:
    assert max(max(found) for found in gloo.run(4, _compared)) < TOLERANCE


def _encoded(rank: int, world_size: int) -> float:
    """How far gradients with a second copy are from those without, where parameters are gathered in eight bits."""
    found = []
    for secondary in (0, 2):
        example = build("llama", 8, torch.float32)  # whose every parameter is shared along the first dim
        strategy = strategy_of(example, micro=2, dp_shard=4, zero=3, secondary=secondary)
        strategy = replace(strategy, grad_sync=replace(strategy.grad_sync, weights="int8"))
        model: Any = parallelize(example.module, None, strategy, blocks=example.blocks, program=no_program)
        first = 2 * model.data_parallel_rank
        inputs, targets = part(example.inputs, first, first + 2), part(example.targets, first, first + 2)
        model.step(inputs, targets, loss_fn=example.loss_fn)
        found.append(model.full_gradients())
    return largest_difference(found[1], found[0])[0] if rank == 0 else 0.0


def test_what_was_decoded_forwards_is_what_backward_passes_compute_with(gloo: Processes) -> None:
    assert max(gloo.run(4, _encoded)) < TOLERANCE


def _after_a_forward(rank: int, world_size: int) -> tuple[float, Counter[Message], set[str]]:
    """The gradients of a step after a forward pass that no backward followed; what is gathered in it; what a checkpoint then has."""
    example = build("mlp", 8, torch.float64)
    strategy = strategy_of(example, micro=2, dp_shard=4, zero=3, secondary=2)
    original = build("mlp", 8, torch.float64).module
    model: Any = parallelize(example.module, None, strategy, blocks=example.blocks, program=no_program)
    first = 2 * model.data_parallel_rank
    inputs, targets = part(example.inputs, first, first + 2), part(example.targets, first, first + 2)
    with torch.no_grad():
        model(inputs)
    shapes = {str(tuple(p.to_local().shape)) for p in model.parameters() if p.dim()}
    with TrafficRecorder(group_names(model._run.mesh, strategy.shard)) as recorder:
        model.step(inputs, targets, loss_fn=example.loss_fn)
    found = model.full_gradients()
    reference_step(original, example, micro=2, pieces=4)
    expected = {n: p.grad for n, p in original.named_parameters() if p.grad is not None}
    gathered = Counter({m: c for m, c in recorder.found.items() if m.op is CollectiveOp.ALL_GATHER})
    return largest_difference(found, expected)[0] if rank == 0 else 0.0, gathered, shapes


def test_forward_passes_gather_from_all_and_backward_passes_from_the_copy(gloo: Processes) -> None:
    answers = gloo.run(4, _after_a_forward)
    difference, gathered, shapes = answers[0]
    assert difference < 1e-12
    of_axis = {
        axis: sum(c for m, c in gathered.items() if m.axis == axis) for axis in ("dp_shard", SECONDARY)
    }
    assert of_axis["dp_shard"] == of_axis[SECONDARY] > 1, gathered
    assert {"(8, 16)", "(4, 32)"} <= shapes, shapes  # shares of all four, also after a forward pass
    assert not {"(16, 16)", "(8, 32)"} & shapes, shapes
