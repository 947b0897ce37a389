"""Runs a model on a CPU with what is priced, where torch's own kernels for CPUs do the same in another way.

- Attention whose keys and values are of unlike widths, or whose bias is trained: torch has no fused kernel for that on a
  CPU and writes it out, which keeps what no kernel of a GPU keeps. Under a mask the kernel of GPUs writes heads side by side,
  that of CPUs as the query lies: what follows copies here and not there.
- Recurrent layers: a kernel of a library runs all steps, keeps what is its own affair, and `flop_counter` does not see it. Step by
  step it does; `fused` ones keep what those of accelerators keep.
- Scans that are a library's kernel on accelerators (`library_kernels.py`), and return numbers of no meaning here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from autoparallel.planner.capture.library_kernels import KERNELS
from autoparallel.planner.capture.opened import OpenedFunctions
from autoparallel.planner.capture.recurrent import recurrent
from benchmarks.coverage.stepwise import stepwise


class Composed(OpenedFunctions):
    """While on, recurrent layers run step by step; with `fused` they, and attention that a CPU has no kernel for, keep what those of
    GPUs keep. `replaced` says what was met of these."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self._fused = fused
        self.replaced: set[str] = set()

    def __torch_function__(
        self, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (steps := stepwise(name := getattr(func, "__name__", ""), args)) is not None:
            self.replaced.add(name)
            return fused_recurrent(name, args) if self._fused else steps()
        return super().__torch_function__(func, types_, args, kwargs)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._fused and func is F.scaled_dot_product_attention and _is_other(*args, **kwargs):
            self.replaced.add("attention")
            return fused_attention(*args, **kwargs)
        if func in KERNELS.values():
            self.replaced.add(func.__name__)
        return func(*args, **kwargs)


def _is_other(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **settings: Any
) -> bool:
    """Whether a CPU has no fused kernel for this call of attention, or one that lays out its result in another way."""
    chosen = torch._fused_sdp_choice(query, key, value, attn_mask, *rest, **settings)
    side_by_side = query.transpose(-3, -2).is_contiguous()
    return bool(chosen == SDPBackend.MATH.value or (attn_mask is not None and not side_by_side))


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **settings: Any
) -> Tensor:
    """Attention that keeps what aten::_scaled_dot_product_efficient_attention keeps, but for the generator's seed; a mask of
    flags becomes numbers. It has no backward pass."""
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    out: Tensor = _Fused.apply(query, key, value, attn_mask, rest, settings)
    return out


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, rest: Any, settings: Any
    ) -> Tensor:
        out = F.scaled_dot_product_attention(query, key, value, mask, *rest, **settings)
        out = (
            out.transpose(-3, -2).contiguous().transpose(-3, -2)
        )  # heads side by side, as that kernel writes them
        statistics = out.new_empty(out.shape[:-1])  # in float32, as all of it here
        ctx.save_for_backward(query, key, value, mask, out, statistics)
        return out


def fused_recurrent(name: str, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """A recurrent layer that keeps what is priced, with the values of torch's. It has no backward pass."""
    steps, layers = stepwise(name, args), recurrent(name, args)
    assert steps is not None
    assert layers is not None
    with torch.no_grad():
        values = steps()
    found = layers()
    for made, value in zip(found, values, strict=True):
        made.data.copy_(value)
    return found
