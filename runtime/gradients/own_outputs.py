"""Outputs of FSDP2's units that their reader may change in place.

FSDP2 gathers a unit's parameters for its backward pass by a hook on what the unit returns. Where that is a view (a linear
layer of three dims, an LSTM whose batch comes first) and the code that reads it adds to it in place, autograd gives it
another history without the hook: parameters are not gathered, and the backward pass ends in an error. What is returned here
has the same storage, and is no view; nothing is copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


class _Own(torch.autograd.Function):
    """The same numbers in the same place, as a tensor that looks at no other."""

    @staticmethod
    def forward(_: Any, view: Tensor) -> Tensor:
        storage, offset = view.untyped_storage(), view.storage_offset()
        return torch.empty(0, dtype=view.dtype, device=view.device).set_(
            storage, offset, view.shape, view.stride()
        )

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def own_outputs(unit: nn.Module) -> None:
    """Let a unit return no views; before `fully_shard`, whose hook comes after."""
    unit.register_forward_hook(torch._dynamo.disable(_without_views))


def _without_views(_: nn.Module, __: Any, output: Any) -> Any:
    return tree_map(_without_view, output) if torch.is_grad_enabled() else output


def _without_view(leaf: Any) -> Any:
    is_view = type(leaf) is Tensor and leaf.requires_grad and leaf._base is not None
    return _Own.apply(leaf) if is_view else leaf
