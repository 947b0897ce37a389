"""Blocks that run twice in a step, and models that count their samples: gradients are those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoparallel import auto_parallelize
from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Pipeline, Recompute, Strategy
from tests.runtime.harness import Processes

SAMPLES = 4
EAGER = Execution(dtype="fp32", kernels="eager")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        heads = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.mixed(x).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Flipped(nn.Module):
    """What it says of a series less what it says of its mirror image, as forecasters do: each block runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()

    def forward(self, x: Tensor) -> Tensor:
        return (self.tower(x) - self.tower(-x)).square().mean()


class Contrastive(nn.Module):
    """Each sample is told from the others by its number, which code counts."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()

    def forward(self, x: Tensor) -> Tensor:
        found = self.tower(x)
        scores = found[:, 0] @ found[:, 1].t()
        return F.cross_entropy(scores, torch.arange(len(scores)))


def loss_of(output: Tensor, _: Any = None) -> Tensor:
    return output


def gradients(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    module = copy.deepcopy(module)
    module(x).backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["none", "selective", "full", "operators"])
def test_a_block_that_runs_twice_is_recomputed_by_one_checkpoint(mode: str) -> None:
    torch.manual_seed(0)
    module, x = Flipped(), torch.randn(SAMPLES, 6, 16)
    expected = gradients(module, x)
    strategy = Strategy(
        batch=Batch(global_=SAMPLES, micro=SAMPLES),
        pipeline=Pipeline(stage_blocks=(6,)),
        recompute=Recompute(mode=mode),
        execution=EAGER,
    )
    model: Any = auto_parallelize(module, x, strategy=strategy)
    model.step(x, None, loss_fn=loss_of)
    torch.testing.assert_close(model.full_gradients(), expected)


def on_rank(rank: int, world_size: int, examples: int) -> None:
    """A pipeline of two stages whose micro-batch has another size than the example inputs."""
    torch.manual_seed(0)
    module, x = Contrastive(), torch.randn(SAMPLES, 6, 16)
    expected = gradients(module, x)
    strategy = Strategy(
        batch=Batch(global_=SAMPLES, micro=SAMPLES),
        mesh=Mesh(pp=world_size),
        pipeline=Pipeline(schedule="1f1b", stage_blocks=(2, 1)),
        execution=EAGER,
    )
    model: Any = auto_parallelize(module, x[:examples], strategy=strategy, cluster="cpu-gloo:1x2", cache=None)
    model.step(x, None, loss_fn=loss_of)
    found = model.full_gradients()  # on the first rank
    if rank == 0:
        torch.testing.assert_close(found, expected)


@pytest.mark.distributed
def test_a_model_that_counts_its_samples_is_cut_as_it_is_run(gloo: Processes) -> None:
    gloo.run(2, on_rank, examples=2)
