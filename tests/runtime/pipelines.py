"""Models deep enough for four stages, and pipelines of them against one process."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from autoparallel.errors import UserError
from autoparallel.planner.strategy.types import Pipeline, Strategy
from autoparallel.runtime.check.messages import Message
from autoparallel.runtime.check.traffic import TrafficRecorder
from autoparallel.runtime.start import parallelize
from tests.runtime.compare import (
    LEARNING_RATE,
    STEPS,
    build,
    largest_difference,
    not_less,
    part,
    reference_step,
    strategy_of,
)
from tests.runtime.models import Example
from tests.runtime.shared import no_program, remembered_cuts

DEPTH = 4


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the steps of a pipeline gave, on rank 0."""

    gradient: float
    name: str
    loss: float
    state: float  # largest difference of the final parameters and buffers
    missing: tuple[str, ...]  # names of the state that differ
    norm: float  # relative difference of the gradients' norm


def deep(name: str, batch: int, dtype: torch.dtype, layers: int = DEPTH) -> Example:
    """The example with its blocks repeated until there are `layers`, all parameters drawn anew."""
    example = build(name, batch, dtype)
    parent, _, _ = example.blocks[0].rpartition(".")
    blocks = example.module.get_submodule(parent)
    pattern = list(blocks.children())
    for index in range(layers):
        setattr(blocks, str(index), copy.deepcopy(pattern[index % len(pattern)]))
    config = getattr(example.module, "config", None)
    if config is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[i % len(pattern)] for i in range(layers)]
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in example.module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += 0.1 * noise.to(parameter.dtype)
    inside = {e.path.removeprefix(f"{example.blocks[0]}."): e for e in example.experts}
    experts = [
        replace(layer, path=f"{parent}.{index}.{path}")
        for index in range(layers)
        for path, layer in inside.items()
        if path in dict(blocks.get_submodule(str(index)).named_modules())
    ]
    return replace(
        example, blocks=tuple(f"{parent}.{index}" for index in range(layers)), experts=tuple(experts)
    )


def pipeline_strategy(example: Example, pipeline: dict[str, Any], options: dict[str, Any]) -> Strategy:
    """`options` of `strategy_of`; `without` names a module whose tensor rule is left out."""
    options = dict(options)
    without = options.pop("without", None)
    strategy = strategy_of(example, **options)
    rules = tuple(rule for rule in strategy.tensor if rule.module != without)
    return replace(strategy, pipeline=Pipeline(**pipeline), tensor=rules)


def run_pipeline(
    rank: int, world_size: int, name: str, pipeline: dict[str, Any], options: dict[str, Any], dtype: str,
    layers: int = DEPTH,
) -> Found | None:  # fmt: skip
    """Optimizer steps of a pipeline beside one process, which is on rank 0; the loss is the same on all ranks."""
    kind: torch.dtype = getattr(torch, dtype)
    strategy = pipeline_strategy(deep(name, 1, kind, layers), pipeline, options)
    example = deep(name, strategy.batch.global_, kind, layers)
    reference, initial = copy.deepcopy(example.module), copy.deepcopy(example.module.state_dict())
    share = strategy.batch.micro * strategy.micro_batches
    with remembered_cuts(name, layers, dtype, strategy.batch.micro):
        model = parallelize(
            example.module, part(example.inputs, 0, share), strategy, blocks=example.blocks, program=no_program,
            experts=example.experts,
        )  # fmt: skip
    alone = torch.optim.SGD(reference.parameters(), lr=LEARNING_RATE, momentum=0.9)
    optimizers = [model.optimizer(torch.optim.SGD, lr=LEARNING_RATE, momentum=0.9), alone]
    first = model.data_parallel_rank * share
    inputs, targets = (part(batch, first, first + share) for batch in (example.inputs, example.targets))
    worst, where, loss_difference = 0.0, "", 0.0
    norm = expected_norm = torch.ones(())
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model.step(inputs, targets, loss_fn=example.loss_fn).item()
        assert len(set(_of_all_ranks(loss, world_size))) == 1, "the mean loss is the same on every rank"
        gradients, norm = model.full_gradients(), model.clip_grad_norm_(1e9)
        if rank == 0:
            pieces = strategy.micro_batches * strategy.mesh.data_parallel
            expected_loss = reference_step(reference, example, strategy.batch.micro, pieces)
            expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
            found, at = largest_difference(gradients, expected)
            worst, where = max((worst, where), (found, at))
            loss_difference = max(loss_difference, not_less(abs(loss - expected_loss) / abs(expected_loss)))
            expected_norm = nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
        for optimizer in optimizers:
            optimizer.step()
    state, wanted = model.full_state_dict(), reference.state_dict()
    _loads_back(model, initial)
    if rank:
        return None
    differences = [not_less(_difference(state[n], wanted[n])) for n in wanted if n in state]
    # Running statistics of a replica are those of its own samples.
    return Found(
        gradient=worst,
        name=where,
        loss=loss_difference,
        state=max(differences),
        missing=tuple(set(state) ^ set(wanted)),
        norm=not_less(float((norm - expected_norm).abs() / expected_norm)),
    )


def _of_all_ranks(value: float, ranks: int) -> list[float]:
    found = [0.0] * ranks
    dist.all_gather_object(found, value)
    return found


def _loads_back(model: nn.Module, whole: dict[str, Tensor]) -> None:
    """A pipeline loads its own state, and its share of a whole model's."""
    model.load_state_dict(model.state_dict())
    doubled = {name: 2 * tensor for name, tensor in whole.items()}
    model.load_state_dict(doubled)
    for name, tensor in model.full_state_dict().items():
        assert torch.equal(tensor, doubled[name]), name
    with pytest.raises(UserError, match=r"missing .*; unexpected nobodys\.weight"):
        model.load_state_dict({"nobodys.weight": torch.zeros(1)})


def initial_state(
    rank: int, world_size: int, name: str, pipeline: dict[str, Any], options: dict[str, Any]
) -> dict[str, Tensor]:
    """Rank 0's full state of a model built on the meta device."""
    example = deep(name, 1, torch.float32)
    strategy = pipeline_strategy(example, pipeline, options)
    module = example.module.to("meta")
    torch.manual_seed(3 + rank)  # only rank 0's generator may count
    model = parallelize(
        module, deep(name, 1, torch.float32).inputs, strategy, blocks=example.blocks, program=no_program
    )
    return model.full_state_dict()


def refused(
    rank: int, world_size: int, pipeline: dict[str, Any], options: dict[str, Any] | None = None
) -> str:
    """What a strategy that cannot run is refused with."""
    example = deep("mlp", 2, torch.float32)
    strategy = pipeline_strategy(example, pipeline, {"pp": 2, **(options or {})})
    try:
        parallelize(example.module, example.inputs, strategy, blocks=example.blocks, program=no_program)
    except UserError as error:
        return str(error)
    return ""


def exchanged(
    rank: int, world_size: int, name: str, pipelines: list[dict[str, Any]], options: dict[str, Any]
) -> list[Counter[Message]]:
    """What a step sends over dp_shard with each of `pipelines`."""
    found = []
    for pipeline in pipelines:
        example = deep(name, 4, torch.float32)
        strategy = pipeline_strategy(example, pipeline, options)
        with remembered_cuts(name, DEPTH, "float32", strategy.batch.micro):
            model = parallelize(
                example.module, example.inputs, strategy, blocks=example.blocks, program=no_program
            )
        with TrafficRecorder({model._mesh.group("dp_shard").group_name: "dp_shard"}) as recorder:
            model.step(example.inputs, example.targets, loss_fn=example.loss_fn)
        found.append(Counter({m: n for m, n in recorder.found.items() if m.axis == "dp_shard"}))
    return found


def outputs_kept(rank: int, world_size: int, pipeline: dict[str, Any], micro_batches: int) -> int:
    """How many of the first stage's outputs are in memory when its first backward pass begins."""
    example = deep("mlp", 2 * micro_batches, torch.float32)
    last = example.module.get_submodule(example.blocks[1])
    forward, made, alive = last.forward, list[StorageWeakRef](), list[int]()

    def watched(x: Tensor) -> Tensor:
        output: Tensor = forward(x)
        made.append(StorageWeakRef(output.untyped_storage()))
        output.register_hook(count)
        return output

    def count(gradient: Tensor) -> None:
        model._runner._channels.finish()  # Gloo does not tell by itself that a message has left
        alive.append(sum(not one.expired() for one in made))

    last.forward = watched  # type: ignore[method-assign]
    strategy = pipeline_strategy(example, pipeline, {"pp": 2, "micro_batches": micro_batches})
    model = parallelize(example.module, example.inputs, strategy, blocks=example.blocks, program=no_program)
    made.clear()  # of what was traced
    model.step(example.inputs, example.targets, loss_fn=example.loss_fn)
    return alive[0] if rank == 0 else 0


def _difference(value: Tensor, wanted: Tensor) -> float:
    return float((value.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-6))
