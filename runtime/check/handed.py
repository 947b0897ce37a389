"""What the stages of a dry run hand on: each receives a copy of its own, as on a rank of its own, and the sender keeps none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from autoparallel.runtime.check.live_bytes import LiveBytes
from autoparallel.runtime.tensor.questions import local


def handed_on(outputs: Sequence[Tensor], live: LiveBytes) -> list[Tensor]:
    """Copies of what a stage returned, which are nobody's yet."""
    with live.looking_away():
        return [value.detach().clone().requires_grad_(value.requires_grad) for value in outputs]


def received(handed: Sequence[Tensor], live: LiveBytes) -> list[Tensor]:
    """Leaves that collect gradients, as a stage has them from now until its backward pass is over (`runtime/pipeline/executor.py`)."""
    found = handed_on(handed, live)
    for value in found:
        live.see(local(value))
    return found


def ways_back(outputs: Sequence[Tensor], *, last: bool) -> list[Any]:
    """Where the backward pass of a stage begins: at edges, or at the loss of the `last` one."""
    return [value if last else get_gradient_edge(value) for value in outputs if value.requires_grad]
