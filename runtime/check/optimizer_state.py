"""What an optimizer keeps after its first update, on tensors without memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from autoparallel.planner.expand.hosted import hosted
from autoparallel.planner.strategy.types import Execution, Strategy
from autoparallel.runtime.tensor.questions import local
from autoparallel.runtime.torch_private import traced_as


def optimizer_bytes(
    stages: Sequence[nn.Module], homes: Sequence[int], alike: Sequence[int], strategy: Strategy
) -> list[int]:
    """Bytes of the state that the optimizer of each stage's rank (`homes`) keeps for the stage on the device, after an update.
    `alike[i]` is the stage that was lowered for stage i."""
    trained = {
        i: [p for p in dict.fromkeys(stages[i].parameters()) if p.requires_grad] for i in dict.fromkeys(alike)
    }
    share, found = strategy.offload.optimizer, [0] * len(alike)
    known: dict[tuple[int, frozenset[int]], int] = {}
    for rank in dict.fromkeys(homes):
        own = [
            (stage, n)
            for stage, home in enumerate(homes)
            if home == rank
            for n in range(len(trained[alike[stage]]))
        ]
        away = {own[k] for k in hosted([local(trained[alike[stage]][n]).numel() for stage, n in own], share)}
        for stage in (stage for stage, home in enumerate(homes) if home == rank):
            key = (alike[stage], frozenset(n for s, n in away if s == stage))
            if key not in known:
                known[key] = _state_bytes(trained[key[0]], key[1], strategy.execution)
            found[stage] = known[key]
    return found


def _state_bytes(trained: Sequence[nn.Parameter], away: Collection[int], execution: Execution) -> int:
    parameters = [nn.Parameter(local(p)) for n, p in enumerate(trained) if n not in away]
    copies = 0
    if execution.master_weights and execution.param_dtype in ("bf16", "fp16"):
        parameters = [nn.Parameter(p.detach().float()) for p in parameters]
        copies = sum(p.nbytes for p in parameters)
    optimizer = _optimizer(execution.optimizer, parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    with traced_as(eager=False):  # the count of steps stays a tensor: its value is not there to be read
        optimizer.step()
    state = [
        value for held in optimizer.state.values() for value in held.values() if isinstance(value, Tensor)
    ]
    return copies + sum(value.nbytes for value in state)


def _optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if not parameters:
        parameters = [nn.Parameter(torch.zeros(0))]
    kinds = {
        "adamw": lambda: torch.optim.AdamW(parameters, foreach=False),
        "adam": lambda: torch.optim.Adam(parameters, foreach=False),
        "sgd": lambda: torch.optim.SGD(parameters, lr=1e-3),
        "sgd-momentum": lambda: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
        "adafactor": lambda: torch.optim.Adafactor(parameters, foreach=False),
    }
    return kinds[name]()
