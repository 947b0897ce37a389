"""Functions that stay one operator: attention, whose unfused form the meta device would otherwise show; products
of experts, which it knows for one dtype only; a loss that it does not know; and dropout, whose form on a CPU is not
that of an accelerator."""

# The signatures are torch's; what shapes and storages do not depend on is not used.
# ruff: noqa: ARG001

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from autoparallel.planner.capture.recurrent import recurrent


class Attention(torch.autograd.Function):
    """scaled_dot_product_attention as flash attention keeps it: query, key, value, output and the log-sum-exp.

    Source: the saved tensors of aten::_scaled_dot_product_flash_attention in torch's derivatives.yaml. Seed and
    offset of the random generator (32 bytes) are left out; a mask is kept, as the memory-efficient kernel does, one of flags
    as the numbers that scaled_dot_product_attention makes of it (convert_boolean_attn_mask in attention.cpp).
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3])
        if query.shape[-1] == value.shape[-1] and mask is None:
            out = torch.empty_like(query)  # the flash kernels return the query's layout
        else:  # the memory-efficient one heads side by side (meta__scaled_dot_product_efficient_attention in torch)
            out = query.new_empty((*batch, query.shape[-2], query.shape[-3], value.shape[-1])).transpose(
                -3, -2
            )
        statistics = query.new_empty(
            (*batch, query.shape[-3], query.shape[-2]),
            dtype=torch.float64 if query.dtype == torch.float64 else torch.float32,
        )
        ctx.save_for_backward(query, key, value, mask, out, statistics)
        return out

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, mask, _, _ = ctx.saved_tensors
        needs = ctx.needs_input_grad
        tensors = (query, key, value, mask)
        return tuple(torch.empty_like(t) if need else None for t, need in zip(tensors, needs, strict=True))


def _shapes_meet(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, grouped: bool) -> None:
    """Refuses, as torch does, what no kernel attends to: a model that cannot run must not be planned."""
    *batch, _, width = query.shape
    leading = [tuple(key.shape[:-2]), tuple(value.shape[:-2])]
    if grouped and batch and all(heads and batch[-1] % heads[-1] == 0 for heads in leading):
        leading = [(*heads[:-1], batch[-1]) for heads in leading]
    try:
        torch.broadcast_shapes(tuple(batch), *leading)
        meet = key.shape[-1] == width and key.shape[-2] == value.shape[-2]
    except RuntimeError:
        meet = False
    if not meet:
        shapes = ", ".join(str(tuple(t.shape)) for t in (query, key, value))
        raise RuntimeError(
            f"attention of query, key and value of shapes {shapes}: heads or sizes do not divide"
        )


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Same signature as torch.nn.functional.scaled_dot_product_attention."""
    _shapes_meet(query, key, value, grouped=enable_gqa)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = query.new_empty(attn_mask.shape)  # each call makes numbers of its flags, and keeps these
    if query.dim() == 3:  # heads are folded into the batch: one head each
        out: torch.Tensor = Attention.apply(query[None], key[None], value[None], attn_mask)
        return out[0]
    result: torch.Tensor = Attention.apply(query, key, value, attn_mask)
    return result


class GroupedProduct(torch.autograd.Function):
    """grouped_mm: rows sorted by expert, each group times its expert's matrix; keeps its three inputs.

    Source: the saved tensors of aten::_grouped_mm in torch's derivatives.yaml.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, matrices, ends)
        return rows.new_empty((rows.shape[0], matrices.shape[-1]))

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, matrices, _ = ctx.saved_tensors
        needs = ctx.needs_input_grad
        like = [
            torch.empty_like(t) if need else None for t, need in zip((rows, matrices), needs, strict=False)
        ]
        return (*like, None)


def grouped_product(
    input: torch.Tensor, mat2: torch.Tensor, offs: torch.Tensor | None = None, **rest: Any
) -> torch.Tensor:
    """torch.nn.functional.grouped_mm for rows of one tensor and matrices of another."""
    if input.dim() != 2 or mat2.dim() != 3 or offs is None or any(v is not None for v in rest.values()):
        return torch.nn.functional.grouped_mm(input, mat2, offs=offs, **rest)
    result: torch.Tensor = GroupedProduct.apply(input, mat2, offs)
    return result


def dropout(input: torch.Tensor, p: float = 0.5, train: bool = True) -> torch.Tensor:
    """torch.dropout as accelerators run it: one kernel, and a mask of one byte an element for the backward."""
    if p == 0 or not train:
        return input
    return torch.native_dropout(input, p, train)[0]


class CtcLoss(torch.autograd.Function):
    """The loss of each sample of ctc_loss, and what it keeps: the probabilities and those of every prefix.

    Source: native_ctc_loss in torch's LossCTC.cpp (log_alpha is samples x time x (2 longest target + 1)) and its saved
    tensors in derivatives.yaml, the targets among them.
    """

    @staticmethod
    def forward(ctx: Any, log_probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        time, samples = log_probs.shape[0], log_probs.shape[1]
        longest = targets.shape[-1] if targets.dim() == 2 else -(-targets.shape[0] // samples)
        losses = log_probs.new_empty(samples)
        log_alpha = log_probs.new_empty((samples, time, 2 * longest + 1))
        ctx.save_for_backward(log_probs, targets, losses, log_alpha)
        return losses

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return torch.empty_like(ctx.saved_tensors[0]), None


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 0,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Same signature as torch.ctc_loss, whose reductions are none, mean and sum."""
    losses: torch.Tensor = CtcLoss.apply(log_probs, targets)
    if zero_infinity:  # no loss of a text that does not fit into its sound
        losses = torch.where(losses == math.inf, losses.new_zeros(()), losses)
    if reduction == 1:  # the mean of the losses by the lengths of their targets
        losses = losses / losses.new_empty(losses.shape)
    return (losses.clone, losses.mean, losses.sum)[reduction]()


def embedding(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Same signature as torch.embedding; its gradient is dense, which it is wherever gradients of ranks are added."""
    return torch.embedding(weight, indices, padding_idx, scale_grad_by_freq, False)


def embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    *rest: Any,
) -> Any:
    """Same signature as torch.embedding_bag; its gradient is dense, as that of `embedding`."""
    return torch.embedding_bag(weight, indices, offsets, scale_grad_by_freq, mode, False, *rest)


GROUPED_PRODUCTS = frozenset({"grouped_mm", "_grouped_mm", "grouped_mm_fallback"})


def replacement(name: str) -> Callable[..., Any] | None:
    """What runs instead of torch's function called `name`; None for almost all."""
    if name in GROUPED_PRODUCTS:
        return grouped_product
    kept: dict[str, Callable[..., Any]] = {
        "scaled_dot_product_attention": attention, "dropout": dropout, "ctc_loss": ctc_loss,
        "embedding": embedding, "embedding_bag": embedding_bag,
    }  # fmt: skip
    return kept.get(name)


def instead(
    name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any]:
    """What runs where the model calls torch's function `func`: almost always that."""
    return recurrent(name, args) or partial(replacement(name) or func, *args, **kwargs)


def is_causal(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of attention masks what comes later: its sixth argument."""
    if name != "scaled_dot_product_attention":
        return False
    return bool(kwargs.get("is_causal", args[5] if len(args) > 5 else False))


def known_index(index: Any) -> Any:
    """An index with its lists of numbers as tensors, whose values stay known: torch would make them out of sight."""
    if isinstance(index, tuple):
        return tuple(map(known_index, index))
    if isinstance(index, list) and index and all(type(i) is int for i in index):
        return torch.tensor(index)
    return index
