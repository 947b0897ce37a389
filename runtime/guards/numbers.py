"""Losses and gradients that are no numbers: NaN and infinity, found before the optimizer sees them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from autoparallel.errors import UserError
from autoparallel.runtime.tensor.questions import local
from autoparallel.runtime.torch_private import norms_of

POLICIES = ("skip", "roll-back", "stop")


class NotANumber(UserError):
    """A loss or a gradient is NaN or infinite, and the policy says stop."""


def check_policy(policy: str) -> None:
    """Raise UserError for a policy that there is not."""
    if policy not in POLICIES:
        raise UserError(f'not_a_number = "{policy}": choose one of {", ".join(POLICIES)}')


@torch.no_grad()
def all_numbers(loss: float, parameters: Iterable[nn.Parameter]) -> bool:
    """Whether the loss and all gradients of this rank are finite.

    Where the norms are, every number is. A norm of large numbers may be infinite while they are not, so then each is
    looked at.
    """
    if not math.isfinite(loss):
        return False
    parts = [local(p.grad) for p in parameters if p.grad is not None and local(p.grad).numel()]
    parts = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
    kept: dict[torch.dtype, list[Tensor]] = {}
    for part in parts:
        kept.setdefault(part.dtype, []).append(part)
    # In the gradients' own precision, or float32: on a CPU a wider one takes ten times as long.
    norms = [
        n.float() for t, same in kept.items() for n in norms_of(same, torch.promote_types(t, torch.float32))
    ]
    if not norms or bool(torch.stack(norms).isfinite().all()):
        return True
    return all(bool(part.isfinite().all()) for part in parts)


@torch.no_grad()
def culprits(named: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Names of this rank's parameters whose gradient is not finite."""
    return [name for name, p in named if p.grad is not None and not bool(local(p.grad).isfinite().all())]
