"""Dry runs of what people write beside transformers: a teacher without gradients, inputs that need none, blocks that end in what they
keep, recurrent layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoparallel.dryrun import dry_run_of
from autoparallel.planner.capture import capture
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.problem import Problem
from autoparallel.planner.score import program_of
from autoparallel.planner.strategy.types import (
    Batch,
    Execution,
    Mesh,
    Pipeline,
    Recompute,
    Shard,
    Strategy,
)
from autoparallel.profiles import load_cluster
from autoparallel.runtime.lowering.lower import hold_in
from tests.planned import plan

WIDTH, SAMPLES, DEPTH = 256, 8, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Student(nn.Module):
    """Learns what a teacher says of the same samples, whose parts have no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (nn.ModuleList(Block() for _ in range(DEPTH)) for _ in range(2))
        self.teacher.requires_grad_(False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        with torch.no_grad():
            for block in self.teacher:
                y = block(y)
        for block in self.student:
            x = block(x)
        return (self.out(x) - y).square().mean()


class Ended(nn.Module):
    """Layers whose last operator keeps its result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Waves(nn.Module):
    """Mixes the lowest frequencies by complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.modes = nn.Parameter(torch.randn(WIDTH, WIDTH, 4, dtype=torch.complex64))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        low = torch.fft.rfft(x, dim=1)[:, :4]
        mixed = torch.einsum("bki,iok->bko", low, self.modes)
        return (self.out(torch.fft.irfft(mixed, n=x.shape[1], dim=1)) - x).square().mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.layers = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(self.first(x))[0]).square().mean()


EXECUTION = Execution(
    stack="autoparallel", dtensor=True, fsdp2=True, master_weights=False, kernels="eager", dtype="fp32", param_dtype="fp32",
    grad_dtype="fp32",
)  # fmt: skip
FLAT, SEQUENCE = (SAMPLES, WIDTH), (SAMPLES, 32, WIDTH)
FULL = Recompute(mode="full")
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Strategy]] = {
    "a teacher, tensor parallel": (Student, FLAT, Strategy(batch=Batch(global_=8, micro=8), mesh=Mesh(tp=2))),
    "ended, tensor parallel, recomputed": (
        Ended, FLAT, Strategy(batch=Batch(global_=8, micro=8), mesh=Mesh(tp=2), recompute=FULL)
    ),
    "complex weights": (Waves, SEQUENCE, Strategy(batch=Batch(global_=16, micro=8), mesh=Mesh(dp_replicate=2))),
    "recurrent, zero 3": (
        Recurrent, SEQUENCE, Strategy(batch=Batch(global_=16, micro=4), mesh=Mesh(dp_shard=2), shard=Shard(zero=3))
    ),
    "recurrent, tensor parallel": (
        Recurrent, SEQUENCE, Strategy(batch=Batch(global_=8, micro=8), mesh=Mesh(tp=2))
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_holds_and_sends_what_is_predicted(case: str) -> None:
    make, shape, strategy = CASES[case]
    module, inputs = make(), torch.randn(shape)
    graph = capture(copy.deepcopy(module), inputs, name=case)
    blocks = sum(link.repeated for link in graph.chain)
    whole = replace(
        strategy, pipeline=Pipeline(stage_blocks=(blocks,)) if blocks else Pipeline(),
        execution=replace(EXECUTION, dropout=graph.dropout),
    )  # fmt: skip
    found = dry_run_of(module.to("meta"), inputs, graph, load_cluster("h100-sxm:1x2"), whole)
    assert not found.findings, [one.text for one in found.findings]


def test_parts_without_a_backward_are_gathered_once_and_bounds_know_that() -> None:
    graph = capture(Student(), torch.randn(FLAT), name="student")
    assert not graph.backward_throughout
    problem = Problem(
        graph=graph, cluster=load_cluster("h100-sxm:2x4"), global_batch=64, execution=EXECUTION, constraints={"shard.zero": 3, "mesh.dp_shard": 8},
    )  # fmt: skip
    found = plan(problem, within=0.0)
    assert found.status == "optimal"
    stage = program_of(Expander(graph, problem.cluster), found.strategy).stages[0]
    by_name = {work.name: (len(work.gathers), len(work.regathers)) for work, _ in stage.blocks}
    assert by_name["Block"] == (1, 0), "the teacher's"
    assert by_name["Block_2"] == by_name["Block_3"] == (1, 1)


def test_complex_parameters_stay_complex_in_another_precision() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module.register_parameter("modes", nn.Parameter(torch.randn(4, dtype=torch.complex64)))
    hold_in(module, torch.bfloat16)
    assert [p.dtype for p in module.parameters()] == [torch.complex64, *[torch.bfloat16] * 4]
