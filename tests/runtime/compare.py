"""A strategy's losses and gradients against one process that runs the same micro-batches."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from autoparallel.planner.strategy.types import (
    Batch,
    Execution,
    GradSync,
    Mesh,
    Offload,
    Recompute,
    Shard,
    Strategy,
    TensorRule,
)
from autoparallel.runtime.lowering.micro_batches import as_call, loss_of
from autoparallel.runtime.start import parallelize
from tests.runtime.expert_models import EXPERT_EXAMPLES
from tests.runtime.models import EXAMPLES, Example
from tests.runtime.shared import no_program, remembered_cuts

STEPS, LEARNING_RATE = (
    2,
    0.05,
)  # the second step finds what the first has learnt: orders, and an optimizer's state
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Largest relative difference over all gradients, and parameters in the end (with its name), and of the losses, over all steps."""

    gradient: float
    name: str
    loss: float


def strategy_of(
    example: Example, *, micro: int = 2, micro_batches: int = 1, zero: int = 0, recompute: str = "none",
    sequence_parallel: bool = False, compression: tuple[str, ...] = (), order: tuple[str, ...] | None = None,
    bucket_mib: float = 0.01, kernels: str = "eager", attention: str = "flash", tensor: tuple[TensorRule, ...] | None = None,
    offload: float = 0.0, optimizer_offloaded: float = 0.0, secondary: int = 0, **mesh: int,
) -> Strategy:  # fmt: skip
    """A strategy in which each data-parallel rank runs `micro_batches` of `micro` samples."""
    sizes = Mesh(**mesh)
    if order:
        sizes = replace(sizes, order=order)
    return Strategy(
        batch=Batch(global_=micro * micro_batches * sizes.data_parallel, micro=micro),
        mesh=sizes,
        shard=Shard(zero=zero, sequence_parallel=sequence_parallel, secondary=secondary),
        recompute=Recompute(mode=recompute),
        offload=Offload(activations=offload, optimizer=optimizer_offloaded),
        execution=Execution(kernels=kernels, attention=attention),
        grad_sync=GradSync(compression=compression, bucket_mib=bucket_mib),
        tensor=(tuple(example.rules(sequence_parallel)) if tensor is None else tensor)
        if sizes.tp > 1
        else (),
    )


def build(name: str, batch: int, dtype: torch.dtype) -> Example:
    torch.manual_seed(1)
    example = (EXAMPLES | EXPERT_EXAMPLES)[name](batch)
    example.module._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)  # complex numbers stay
    inputs = tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, example.inputs)
    return replace(example, inputs=inputs)


def part(batch: Any, start: int, stop: int) -> Any:
    return tree_map_only(Tensor, lambda t: t[start:stop], batch)


def reference_step(module: nn.Module, example: Example, micro: int, pieces: int) -> float:
    """Forward and backward of `pieces` micro-batches in one process; the mean loss."""
    total = 0.0
    for index in range(pieces):
        cut = (index * micro, (index + 1) * micro)
        args, kwargs = as_call(part(example.inputs, *cut))
        output = module(*args, **kwargs)
        target = part(example.targets, *cut)
        loss = example.loss_fn(output, target) if example.loss_fn else loss_of(output)
        (loss / pieces).backward()
        total += loss.item() / pieces
    return total


class _Reference:
    """One process that trains the whole model on the same micro-batches."""

    def __init__(self, module: nn.Module, example: Example, strategy: Strategy) -> None:
        self._module, self._example, self._micro = module, example, strategy.batch.micro
        self._pieces = strategy.micro_batches * strategy.mesh.data_parallel
        self._optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=0.9)

    def step(self) -> tuple[float, dict[str, Tensor]]:
        """One optimizer step; its loss and gradients."""
        self._optimizer.zero_grad()
        loss = reference_step(self._module, self._example, self._micro, self._pieces)
        gradients = {n: p.grad for n, p in self._module.named_parameters() if p.grad is not None}
        self._optimizer.step()
        return loss, gradients

    def parameters(self) -> dict[str, Tensor]:
        """What there is after the steps."""
        return {n: p.detach() for n, p in self._module.named_parameters()}


def largest_difference(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The criterion: norm of the difference over the larger of own norm and a thousandth of the median's."""
    assert gradients.keys() == expected.keys(), set(gradients) ^ set(expected)
    floor = 1e-3 * torch.stack([g.norm() for g in expected.values()]).median()
    found = {
        n: ((gradients[n] - g).norm() / torch.maximum(g.norm(), floor)).item() for n, g in expected.items()
    }
    worst = max(found, key=lambda name: not_less(found[name]))
    return not_less(found[worst]), worst


def not_less(difference: float) -> float:
    """A difference that compares with others: one that is no number is the largest."""
    return math.inf if math.isnan(difference) else difference


def compare(
    rank: int, world_size: int, name: str, options: dict[str, Any], dtype: str = "float32"
) -> Difference | None:
    """Optimizer steps of model `name` under `strategy_of(**options)`; the difference, on rank 0."""
    strategy = strategy_of(build(name, 1, getattr(torch, dtype)), **options)
    return run_strategy(rank, world_size, name, strategy, dtype)


def run_strategy(
    rank: int, world_size: int, name: str, strategy: Strategy, dtype: str = "float32"
) -> Difference | None:
    """Optimizer steps of model `name` under `strategy`; the difference, on rank 0."""
    kind: torch.dtype = getattr(torch, dtype)
    example = build(name, strategy.batch.global_, kind)
    reference = _Reference(copy.deepcopy(example.module), example, strategy) if rank == 0 else None
    names = [n for n, _ in example.module.named_parameters()]
    share = strategy.batch.micro * strategy.micro_batches
    with remembered_cuts(name, len(example.blocks), dtype, strategy.batch.micro):
        model = parallelize(
            example.module, part(example.inputs, 0, share), strategy, blocks=example.blocks, program=no_program,
            experts=example.experts, entered=example.entered, alone=example.alone,
        )  # fmt: skip
    if strategy.mesh.pp == 1:
        assert [n for n, _ in model.named_parameters()] == names
    optimizer = model.optimizer(torch.optim.SGD, lr=LEARNING_RATE, momentum=0.9)
    first = model.data_parallel_rank * share
    inputs, targets = (part(batch, first, first + share) for batch in (example.inputs, example.targets))
    worst = Difference(gradient=0.0, name="", loss=0.0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model.step(inputs, targets, loss_fn=example.loss_fn).item()
        gradients = model.full_gradients()
        if reference is not None:
            expected_loss, expected = reference.step()
            gradient, where = largest_difference(gradients, expected)
            worst = Difference(
                gradient=max(worst.gradient, gradient),
                name=where if gradient > worst.gradient else worst.name,
                loss=max(worst.loss, not_less(abs(loss - expected_loss) / abs(expected_loss))),
            )
        optimizer.step()
    state = model.full_state_dict()
    if reference is None:
        return None
    parameters = reference.parameters()
    updated, where = largest_difference({name: state[name] for name in parameters}, parameters)
    return replace(worst, gradient=updated, name=f"{where}, updated") if updated > worst.gradient else worst
