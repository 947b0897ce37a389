"""Which of a model's outputs is its loss: one answer for capture, dry runs and steps without a `loss_fn`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autoparallel.planner.capture.trees import plain, tensors


def named_loss(output: Any) -> torch.Tensor | None:
    """The output itself, its `.loss`, or its item "loss", where that is one number; None where it is not."""
    found: Any = output
    if not isinstance(output, torch.Tensor):
        found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return found if isinstance(found, torch.Tensor) and found.numel() == 1 else None


def scalar_losses(output: Any) -> list[torch.Tensor]:
    """The loss that has the name, alone; else all numbers by themselves that need a gradient, in order: who has several
    (two players' losses, a loss and what weighs it) trains by a `loss_fn` that may read any of them."""
    named = named_loss(output)
    if named is not None and named.requires_grad:
        return [named]
    return [t for t in tensors(plain(output)) if t.numel() == 1 and t.requires_grad]
