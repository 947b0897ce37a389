"""What an optimizer keeps after its first update, on tensors without memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autoparallel.planner.strategy.types import Strategy
from autoparallel.runtime.memory.optimizer import hosted
from autoparallel.runtime.tensor.questions import local
from autoparallel.runtime.torch_private import traced_as


def optimizer_bytes(stage: nn.Module, strategy: Strategy) -> int:
    """Bytes of the state that the optimizer keeps for this rank's parameters on the device, after an update."""
    trained = [p for p in dict.fromkeys(stage.parameters()) if p.requires_grad]
    away, execution = hosted(trained, strategy.offload.optimizer), strategy.execution
    parameters = [nn.Parameter(local(p)) for p in trained if p not in away]
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
