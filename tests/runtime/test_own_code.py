"""What people's own code does: it checkpoints its layers, takes and returns dataclasses, draws log-probabilities, and makes
what nobody reads."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autoparallel import auto_parallelize
from autoparallel.costmodel.graph_json import graph_from_json, graph_to_json
from autoparallel.errors import UserError
from autoparallel.planner.capture import capture
from autoparallel.planner.strategy.types import (
    Batch,
    Execution,
    Mesh,
    Pipeline,
    Recompute,
    Shard,
    Strategy,
)
from autoparallel.runtime.capabilities.models import DIVIDING
from autoparallel.runtime.limits import graph_limits
from tests.runtime.harness import Processes

SAMPLES, MICRO, WIDTH, DEPTH = 4, 2, 16, 4


@dataclass
class Given:
    states: Tensor
    actions: Tensor


@dataclass
class Result:
    loss: Tensor
    means: Tensor
    entropy: Tensor | None = None


@dataclass
class Carried:
    """What layers hand on."""

    hidden: Tensor
    skipped: Tensor


class Layer(nn.Module):
    """Attention and an MLP of what is carried, in a checkpoint of its own or not. Counts its runs."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.own, self.runs = own, 0

    def _run(self, x: Tensor) -> Tensor:
        self.runs += 1
        heads = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.mixed(x).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))

    def forward(self, given: Carried | Tensor) -> Any:
        if isinstance(given, Tensor):
            return checkpoint(self._run, given, use_reentrant=False) if self.own else self._run(given)
        made = self._run(given.hidden)
        return Carried(hidden=made, skipped=given.skipped + made)


class Policy(nn.Module):
    """A policy's loss of a dataclass in a dataclass. One layer makes what nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mean = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList(Layer(own=False) for _ in range(DEPTH - 1))
        self.unread = nn.ModuleList([Layer(own=False)])
        self.spread = nn.Parameter(torch.zeros(2))

    def forward(self, batch: Given) -> Result:
        carried = Carried(hidden=self.first(batch.states), skipped=torch.zeros(()))
        for layer in self.layers:
            carried = layer(carried)
        self.unread[0](carried.hidden)
        found = torch.distributions.Normal(self.mean(carried.skipped), self.spread.exp())
        return Result(loss=-found.log_prob(batch.actions).mean(), means=found.mean)


class Checkpointed(nn.Module):
    def __init__(self, around: str) -> None:
        super().__init__()
        self.around, self.first = around, nn.Linear(3, WIDTH)
        self.first.weight = nn.Parameter(torch.randn(3, WIDTH).t())  # column by column
        self.layers = nn.ModuleList(Layer(own=around == "inside") for _ in range(DEPTH))

    def forward(self, batch: Given) -> Result:
        x = self.first(batch.states)
        for layer in self.layers:
            if self.around == "inside":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.around == "reentrant")
        return Result(loss=(x[..., :2] - batch.actions).square().mean(), means=x)


class Sparse(Policy):
    """A policy of states by number, each of which has a row of a table with sparse gradients, as has the number of what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(4, WIDTH, sparse=True)  # type: ignore[assignment]
        self.bag = nn.EmbeddingBag(4, WIDTH, mode="sum", sparse=True)

    def forward(self, batch: Given) -> Result:
        numbers = (batch.states > 0).sum(-1)
        x = self.first(numbers) + self.bag(numbers).unsqueeze(1)
        for layer in self.layers:
            x = layer(x)
        self.unread[0](x)
        return Result(loss=(self.mean(x) - batch.actions).square().mean(), means=x)


class Forces(nn.Module):
    """Forces are the derivatives of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.energy = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Smooth() for _ in range(DEPTH))

    def forward(self, batch: Given) -> Result:
        places = batch.states.detach().requires_grad_(True)
        x = self.first(places)
        for layer in self.layers:
            x = layer(x)
        (forces,) = torch.autograd.grad(self.energy(x).sum(), places, create_graph=True)
        return Result(loss=(forces[..., :2] - batch.actions).square().mean(), means=forces)


class Smooth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.runs = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + self.down(torch.tanh(self.up(x)))


MODELS = {
    "policy": Policy,
    "inside": lambda: Checkpointed("inside"),
    "reentrant": lambda: Checkpointed("reentrant"),
    "sparse": Sparse,
    "forces": Forces,
}

CASES = (
    ("policy", "tensor parallel"), ("policy", "pipeline"), ("inside", "zero 3, attention recomputed"), ("inside", "pipeline"),
    ("inside", "tensor parallel, recomputed"), ("reentrant", "tensor parallel"), ("reentrant", "pipeline"),
    ("sparse", "zero 1"), ("sparse", "zero 3, attention recomputed"), ("sparse", "tensor parallel"), ("sparse", "pipeline"),
    ("forces", "replicas"),
)  # fmt: skip


def strategies(ranks: int) -> dict[str, Strategy]:
    """By what they do, over so many ranks."""
    batch, execution = Batch(global_=SAMPLES, micro=MICRO), Execution(dtype="fp32", kernels="eager")
    whole, halves = Pipeline(stage_blocks=(DEPTH,)), Pipeline(schedule="1f1b", stage_blocks=(2, 2))
    return {
        "zero 3, attention recomputed": Strategy(
            batch=batch, mesh=Mesh(dp_shard=ranks), shard=Shard(zero=3), recompute=Recompute(mode="selective"),
            pipeline=whole, execution=execution,
        ),
        "zero 1": Strategy(
            batch=batch, mesh=Mesh(dp_shard=ranks), shard=Shard(zero=1), pipeline=whole, execution=execution
        ),
        "replicas": Strategy(batch=batch, mesh=Mesh(dp_replicate=ranks), pipeline=whole, execution=execution),
        "tensor parallel": Strategy(
            batch=batch, mesh=Mesh(tp=ranks), pipeline=whole, execution=execution
        ),
        "tensor parallel, recomputed": Strategy(
            batch=batch, mesh=Mesh(tp=ranks), pipeline=whole, execution=execution,
            recompute=Recompute(mode="full"),
        ),
        "pipeline": Strategy(batch=batch, mesh=Mesh(pp=ranks), pipeline=halves, execution=execution),
    }  # fmt: skip


def part(batch: Given, start: int, stop: int) -> Given:
    return Given(states=batch.states[start:stop], actions=batch.actions[start:stop])


def expected_gradients(module: nn.Module, batch: Given) -> tuple[dict[str, Tensor], int]:
    """Of one process with the same micro-batches; how often its first layer has run."""
    module = copy.deepcopy(module)
    for start in range(0, SAMPLES, MICRO):
        (module(part(batch, start, start + MICRO)).loss * MICRO / SAMPLES).backward()
    found = {name: p.grad.to_dense() for name, p in module.named_parameters() if p.grad is not None}
    return found, module.layers[0].runs  # type: ignore[index, union-attr, return-value]


def on_rank(rank: int, world_size: int) -> list[str]:
    """What differs from one process."""
    wrong = []
    for name, kind in CASES:
        torch.manual_seed(0)
        module = MODELS[name]()
        batch = Given(states=torch.randn(SAMPLES, 6, 3), actions=torch.randn(SAMPLES, 6, 2))
        expected, runs = expected_gradients(module, batch)
        first = module.layers[0]
        model: Any = auto_parallelize(
            module,
            batch,
            strategy=strategies(world_size)[kind],
            cluster=f"cpu-gloo:1x{world_size}",
            cache=None,
        )
        share = SAMPLES // model.data_parallel_size
        before, start = first.runs, model.data_parallel_rank * share
        model.step(part(batch, start, start + share))
        found = model.full_gradients()
        if rank == 0:
            try:
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
            except AssertionError as error:
                wrong.append(f"{name}, {kind}: {error}")
            if kind == "pipeline" and first.runs - before != runs:
                wrong.append(f"{name}, {kind}: the first layer ran {first.runs - before} times, not {runs}")
        dist.barrier()
    return wrong


@pytest.mark.distributed
def test_two_ranks_give_the_gradients_of_one_and_run_again_what_that_does(gloo: Processes) -> None:
    wrong = gloo.run(2, on_rank)[0]
    assert not wrong, "\n".join(wrong)


def refusals_on_rank(rank: int, world_size: int) -> dict[str, str]:
    """What is said of a model that takes derivatives, by strategy."""
    said = {}
    for kind, strategy in strategies(world_size).items():
        batch = Given(states=torch.randn(SAMPLES, 6, 3), actions=torch.randn(SAMPLES, 6, 2))
        try:
            auto_parallelize(
                Forces(), batch, strategy=strategy, cluster=f"cpu-gloo:1x{world_size}", cache=None
            )
        except UserError as error:
            said[kind] = str(error)
    return said


@pytest.mark.distributed
def test_derivatives_in_a_forward_pass_run_on_replicas_alone_and_are_refused_elsewhere(
    gloo: Processes,
) -> None:
    said = gloo.run(2, refusals_on_rank)[0]
    assert set(said) == set(strategies(2)) - {"replicas"}
    assert all("takes derivatives" in words and "set mesh.dp_replicate" in words for words in said.values())
    graph = capture(Forces(), Given(states=torch.randn(4, 6, 3), actions=torch.randn(4, 6, 2)), name="forces")
    assert graph.differentiates
    assert graph_from_json(graph_to_json(graph)).differentiates
    assert graph_limits(graph) == dict.fromkeys(DIVIDING, 1)
