"""Small questions about tensors that may be DTensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only


def is_replicated(tensor: Tensor) -> bool:
    """Whether every rank holds all of it: a plain tensor, or a DTensor that is replicated on every axis."""
    return not isinstance(tensor, DTensor) or all(p.is_replicate() for p in tensor.placements)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its storage; outside autograd."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    part: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return part


def to_plain(value: Any) -> Any:
    """Every DTensor in a nest as the full plain tensor, differentiable; the rest unchanged."""
    return tree_map_only(DTensor, lambda tensor: tensor.full_tensor(), value)


def own_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Each place a parameter is held at: owner, name there, parameter; tied ones once per place."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield owner, name, parameter


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes, for backends that move but do not know the dtype."""
    return tensor.view(torch.uint8)
