"""Blocks of which one makes a bias for the next one too, as T5's first block does, beside one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoparallel.runtime.lowering.lower import module_dtypes
from autoparallel.runtime.start import parallelize
from tests.runtime.compare import largest_difference, reference_step
from tests.runtime.models import CLASSES, Example, class_loss
from tests.runtime.pipelines import pipeline_strategy
from tests.runtime.shared import no_program

WIDTH, DEPTH = 16, 4


class _Block(nn.Module):
    """Of no linear layers, which would put the gradients of their weights off; every other one has a table."""

    def __init__(self, *, makes: bool) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 4)
        self.gain = nn.Parameter(torch.rand(WIDTH))
        self.table = nn.Parameter(torch.randn(WIDTH)) if makes else None

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        made = bias if self.table is None else self.table.exp()
        assert made is not None
        own, handed = 2 * made, 3 * made  # neither way back leads through the other
        return x + self.gain * (F.gelu(x @ self.up) @ self.down + own), handed


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(makes=index % 2 == 0) for index in range(DEPTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        bias = None
        for index, block in enumerate(self.blocks):
            x, bias = block(x) if index % 2 == 0 else block(x, bias)
        return self.head(x)


def run_cast(rank: int, world_size: int, schedule: str, options: dict[str, Any]) -> tuple[float, str] | None:
    """The largest difference of a step's gradients from one process that computes in float64 too: here the parameters are
    cast to float32."""
    torch.manual_seed(0)
    example = Example(
        module=_Model().double(), blocks=tuple(f"blocks.{index}" for index in range(DEPTH)),
        inputs=torch.randn(8, WIDTH, dtype=torch.float64), targets=torch.randint(0, CLASSES, (8,)),
        loss_fn=class_loss, rules=lambda _: (),
    )  # fmt: skip
    strategy = pipeline_strategy(example, {"schedule": schedule, "stage_blocks": (2, 2)}, options)
    reference = copy.deepcopy(example.module)
    dtypes = module_dtypes(example.module, "fp32", "fp64", "fp64")
    share = strategy.batch.micro * strategy.micro_batches
    model = parallelize(
        example.module, example.inputs[:share], strategy, blocks=example.blocks, program=no_program, dtypes=dtypes
    )  # fmt: skip
    first = model.data_parallel_rank * share
    inputs, targets = (whole[first : first + share] for whole in (example.inputs, example.targets))
    model.step(inputs, targets, loss_fn=example.loss_fn)
    pieces = strategy.micro_batches * strategy.mesh.data_parallel
    reference_step(reference, example, strategy.batch.micro, pieces)
    gradients = model.full_gradients()
    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    return largest_difference(gradients, expected) if rank == 0 else None
