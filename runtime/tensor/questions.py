"""Small questions about tensors that may be DTensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

_WRITES = frozenset(
    {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__"}
)
_COUNTED = frozenset({
    torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere, torch.masked_select, Tensor.masked_select,
    torch.unique, Tensor.unique, torch.unique_consecutive, Tensor.unique_consecutive,
})  # fmt: skip


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
    return tree_map_only(DTensor, _plain, value)


def _plain(tensor: DTensor) -> Tensor:
    full = tensor.full_tensor()
    return _LaidOut.apply(full) if full.requires_grad else full


class _LaidOut(Function):
    """Gives a gradient the layout of the tensor: DTensor takes it to have that of the whole (torch 2.13), and views of it fail."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.strides = tensor.stride()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        if grad.stride() == ctx.strides:
            return grad
        if 0 in ctx.strides:  # repeated
            return grad.contiguous()
        return torch.empty_strided(grad.shape, ctx.strides, dtype=grad.dtype, device=grad.device).copy_(grad)


def own_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Each place a parameter is held at: owner, name there, parameter; tied ones once per place."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield owner, name, parameter


@contextmanager
def copied_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the modules have copies of their own buffers: what they write there is lost."""
    held = [(module, dict(module._buffers)) for module in modules]
    try:
        with torch.no_grad():
            for module, buffers in held:
                module._buffers.update({name: b.clone() for name, b in buffers.items() if b is not None})
        yield
    finally:
        for module, buffers in held:
            module._buffers.update(buffers)


def is_in_place(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of torch writes into one of its arguments, by its name."""
    name = getattr(func, "__name__", "")
    return (
        name in _WRITES or (name.endswith("_") and not name.endswith("__")) or kwargs.get("out") is not None
    )


def is_counted_out(func: Any, args: Sequence[Any]) -> bool:
    """Whether the values of a function's arguments say how large its result is: no rule of DTensor's can."""
    if func is torch.where:
        return len(args) == 1
    if func is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(part, Tensor) and part.dtype is torch.bool for part in index)
    return func in _COUNTED


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes in a row: backends move dtypes that they cannot add, or do not know."""
    return tensor.view(-1).view(torch.uint8)
