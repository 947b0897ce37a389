"""Attention, dropout and recurrent layers as a GPU runs them, on a dry run's tensors, which have no values: what its kernels keep, a CPU's would not.

Where there is dropout, or a mask, a CPU's attention keeps the scores whole; a GPU's keeps the statistics of their softmax. Of a dropout a
CPU keeps a mask of the input's dtype, a GPU one of bytes. All steps of a recurrent layer are one call, which keeps what
`planner/capture/recurrent.py` says.
Source: aten/src/ATen/native/transformers/attention.cpp, cuda/sdp_utils.cpp; native/Dropout.cpp.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from autoparallel.planner.capture.heads import MULTI_HEAD
from autoparallel.planner.capture.opened import multi_head
from autoparallel.planner.capture.recurrent import recurrent

_DIMS, _HEADS = 4, 1  # batch, heads, length, head size; the dim of heads


class DeviceKernels(TorchFunctionMode):
    """While active, dropout and recurrent layers are a GPU's, and with `flash` so is attention of four dims: the flash kernel or, where it has a mask,
    the memory-efficient one."""

    def __init__(self, *, flash: bool) -> None:
        super().__init__()
        self._flash = flash

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is MULTI_HEAD:
            with self:
                return multi_head(*args, **kwargs)
        if self._flash and func is F.scaled_dot_product_attention and args[0].dim() == _DIMS:
            return _attention(*args, **kwargs)
        if func is F.dropout and not kwargs.get("inplace"):
            return _dropout(*args, **kwargs)
        layers = recurrent(getattr(func, "__name__", ""), args)
        if layers is not None and not isinstance(args[0], DTensor):
            return layers()
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0.0 or inplace:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, training)[0]


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,  # noqa: ARG001  seen in the shapes
) -> Tensor:  # fmt: skip
    if attn_mask is None and query.shape[-1] == value.shape[-1]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]
    groups = query.shape[_HEADS] // key.shape[_HEADS]
    if groups > 1:  # of which the other kernel knows nothing
        key, value = (t.repeat_interleave(groups, dim=_HEADS) for t in (key, value))
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    bias = None if attn_mask is None else _bias(attn_mask, query, key)
    return efficient(query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """What is added to the scores, as wide as they are: the kernel reads one dtype, and a view for each head."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
    return mask.expand(*query.shape[:-1], key.shape[-2])
