"""torch.distributed.checkpoint keeps a model and its optimizer, and gives them back under another strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from autoparallel.runtime.start import parallelize
from tests.runtime.compare import build, part, strategy_of
from tests.runtime.harness import Processes
from tests.runtime.shared import no_program

pytestmark = pytest.mark.distributed

SAMPLES = 4


def _made(options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model under a strategy, its optimizer, and what takes one step of both."""
    ranks = options.get("dp_shard", 1)
    example = build("mlp", SAMPLES, torch.float64)
    strategy = strategy_of(example, micro=SAMPLES // ranks, **options)
    model = parallelize(example.module, None, strategy, blocks=example.blocks, program=no_program)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first = model.data_parallel_rank * (SAMPLES // ranks)
    batch = [part(b, first, first + SAMPLES // ranks) for b in (example.inputs, example.targets)]

    def step() -> float:
        optimizer.zero_grad()
        loss: float = model.step(*batch, loss_fn=example.loss_fn).item()
        optimizer.step()
        return loss

    return model, optimizer, step


def _kept_and_given_back(rank: int, world_size: int, folder: str) -> list[list[float]]:
    """Losses of two steps after a checkpoint: without a break, then resumed under each strategy."""
    model, optimizer, step = _made({"dp_shard": 2, "zero": 3})
    step()
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
    losses = [[step(), step()]]
    for options in ({"dp_shard": 2, "zero": 1}, {"tp": 2}):
        other, fresh, again = _made(options)
        state, optimizer_state = get_state_dict(other, fresh)
        kept = {"model": state, "optimizer": optimizer_state}
        dcp.load(kept, checkpoint_id=folder)
        set_state_dict(other, fresh, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])
        losses.append([again(), again()])
    return losses


def test_a_checkpoint_is_resumed_under_another_strategy(gloo: Processes, tmp_path: Path) -> None:
    for straight, *resumed in gloo.run(2, _kept_and_given_back, folder=str(tmp_path)):
        for losses in resumed:
            assert losses == pytest.approx(straight, rel=1e-9)
