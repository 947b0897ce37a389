"""Cross entropy on logits whose classes are sharded over tp, without gathering them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

_SIGNATURE = inspect.signature(F.cross_entropy)


def in_parts(args: Any, kwargs: Any) -> Tensor | None:
    """What `F.cross_entropy` returns for these arguments, from parts; None where the logits are not class-sharded."""
    call = _SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    if not _handles(call.arguments):
        return None
    options = {name: call.arguments[name] for name in ("ignore_index", "reduction")}
    return cross_entropy(call.arguments["input"], call.arguments["target"], **options)


def _handles(call: Mapping[str, Any]) -> bool:
    logits, target = call["input"], call["target"]
    if not isinstance(logits, DTensor) or logits.dim() != 2 or logits.device_mesh.ndim != 1:
        return False
    unusual = (call["weight"], call["size_average"], call["reduce"], call["label_smoothing"] or None)
    even = logits.shape[1] % logits.device_mesh.size() == 0
    by_index = isinstance(target, Tensor) and not target.is_floating_point() and target.dim() == 1
    return (
        all(option is None for option in unusual) and even and by_index and logits.placements == (Shard(1),)
    )


def cross_entropy(
    logits: DTensor, target: Tensor, *, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """Cross entropy of `logits` (rows, classes), sharded over classes: log(sum(exp)) - logit of the target.

    Per row and rank three numbers travel (maximum, sum, target's logit); the result is a plain tensor, the
    same on every rank.
    """
    mesh = logits.device_mesh
    if isinstance(target, DTensor):
        target = target.full_tensor()
    part = logits.to_local(grad_placements=[Shard(1)])
    first = mesh.get_local_rank() * part.shape[1]
    rows: Tensor = _RowLoss.apply(part, target, first, ignore_index, mesh.get_group())
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    return rows.sum() / (target != ignore_index).sum().to(rows.dtype)


class _RowLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, first: int, ignore: int, group: Any) -> Tensor:
        largest = logits.detach().amax(dim=1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = logits - largest.unsqueeze(1)
        index = target - first
        mine = (index >= 0) & (index < logits.shape[1])
        index = index.clamp(0, logits.shape[1] - 1)
        of_target = shifted.gather(1, index.unsqueeze(1)).squeeze(1) * mine
        exponential = shifted.exp_()
        sums = torch.stack([exponential.sum(dim=1), of_target])
        dist.all_reduce(sums, group=group)
        counted = target != ignore
        ctx.save_for_backward(exponential.div_(sums[0].unsqueeze(1)), index, mine, counted)
        return (sums[0].log() - sums[1]) * counted

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        softmax, index, mine, counted = ctx.saved_tensors
        gradient = softmax.clone()
        gradient[torch.arange(len(index), device=index.device), index] -= mine.to(softmax.dtype)
        return gradient * (grads[0] * counted).unsqueeze(1), None, None, None, None
