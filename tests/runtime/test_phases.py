"""The next phase of training is entered in memory with the losses of a checkpoint and a restart."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

import pytest
import torch

from autoparallel.errors import UserError
from autoparallel.phases import enter_phase
from autoparallel.planner.strategy.phases import strategy_at
from autoparallel.planner.strategy.types import Phase, Strategy
from autoparallel.runtime.checkpoints.keeper import Checkpoints
from autoparallel.runtime.start import parallelize
from tests.runtime.compare import build, part, strategy_of
from tests.runtime.harness import Processes
from tests.runtime.shared import no_program

SAMPLES, STEPS = 8, 8
PHASES = (
    Phase(from_step=3, keys=(("grad_sync.compression", ("topk:0.25",)),)),
    Phase(from_step=5, keys=(("mesh.dp_replicate", 1), ("mesh.dp_shard", 2), ("shard.zero", 3), ("batch.micro", 1))),
    Phase(from_step=7, keys=(("mesh.dp_shard", 1), ("mesh.pp", 2), ("shard.zero", 0), ("pipeline.schedule", "1f1b"),
                             ("pipeline.stage_blocks", (1, 1)), ("batch.micro", 2))),
)  # fmt: skip


def _make(strategy: Strategy) -> tuple[Any, Any]:
    example = build("llama", SAMPLES, torch.float32)
    share = SAMPLES // strategy.mesh.data_parallel
    model = parallelize(
        example.module, part(example.inputs, 0, share), strategy, blocks=example.blocks, program=no_program
    )
    return model, model.optimizer(torch.optim.AdamW, lr=0.01, eps=1e-4)


def _step(model: Any, optimizer: Any) -> float:
    example = build("llama", SAMPLES, torch.float32)
    share = SAMPLES // model.data_parallel_size
    first = model.data_parallel_rank * share
    optimizer.zero_grad()
    inputs, targets = (part(batch, first, first + share) for batch in (example.inputs, example.targets))
    loss = model.step(inputs, targets, loss_fn=example.loss_fn).item()
    optimizer.step()
    return float(loss)


def _train(rank: int, world_size: int, folder: str) -> tuple[list[float], list[float]]:
    whole = replace(
        strategy_of(build("llama", 1, torch.float32), micro=2, micro_batches=2, dp_replicate=2), phases=PHASES
    )
    model, optimizer = _make(strategy_at(whole, 1))
    in_memory = []
    for step in range(1, STEPS + 1):
        before = model
        model, optimizer = enter_phase(model, optimizer, whole, step, _make)
        assert (model is before) == (step not in (5, 7)), "gradients alone change without a new model"
        in_memory.append(_step(model, optimizer))
    with pytest.raises(UserError, match="remake"):
        enter_phase(model, optimizer, whole, 1)
    restarted = []
    checkpoints = Checkpoints(folder)
    for first, stop in ((1, 3), (3, 5), (5, 7), (7, STEPS + 1)):
        model, optimizer = _make(strategy_at(whole, first))
        state = {"model": model, "optimizer": optimizer}
        assert (checkpoints.load(state) is None) == (first == 1)
        restarted += [_step(model, optimizer) for _ in range(first, stop)]
        checkpoints.save(stop, state)
    checkpoints.close()
    return in_memory, restarted


@pytest.mark.distributed
def test_phases_entered_in_memory_have_the_losses_of_checkpoints(gloo: Processes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for in_memory, restarted in gloo.run(2, _train, folder=folder):
            assert in_memory == pytest.approx(restarted, rel=1e-5)
