"""What one call does that runs as kernels of a library: what it returns, what it keeps, and its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autoparallel.costmodel.graph import ITEM_BYTES, OpKind

FLOAT = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Equal kernels of a call: a product, of which `product` has the letters (see `Work.sizes`) of rows, columns and what is
    contracted, or what moves `numbers` of the call's dtype and computes `flops`; `of` what the gradient is."""

    count: int = 1
    product: str = ""
    numbers: float = 0
    flops: int = 0
    kind: OpKind = OpKind.GEMM
    of: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """A tensor that a call makes: like one of its arguments (by its place among the tensors given), or of a shape and dtype, ""
    for the first argument's."""

    like: int | None = None
    shape: tuple[int, ...] = ()
    dtype: str = ""

    def empty(self, given: Sequence[Tensor]) -> Tensor:
        if self.like is not None:
            return torch.empty_like(given[self.like])
        return given[0].new_empty(self.shape, dtype=getattr(torch, self.dtype) if self.dtype else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a call returns and keeps for its backward pass (`given`: places of arguments; `made`: of results), and its kernels."""

    returns: tuple[Inside, ...]
    kept: tuple[Inside, ...] = ()
    given: tuple[int, ...]
    made: tuple[int, ...] = ()
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    sizes: dict[str, int] = field(default_factory=dict)


class OneCall(torch.autograd.Function):
    """Returns and keeps what `work` says. Shapes alone."""

    @staticmethod
    def forward(ctx: Any, work: Work, *given: Tensor) -> tuple[Tensor, ...]:
        made = tuple(part.empty(given) for part in work.returns)
        inside = [part.empty(given) for part in work.kept]
        ctx.save_for_backward(*(given[i] for i in work.given), *inside, *(made[i] for i in work.made))
        ctx.shapes = [(t.shape, t.dtype, t.device) for t in given]
        return made

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.saved_tensors is not None  # which are let go of behind this
        wanted = zip(ctx.shapes, ctx.needs_input_grad[1:], strict=True)
        return (None, *(torch.empty(s, dtype=t, device=d) if need else None for (s, t, d), need in wanted))


def present(*given: Any) -> list[Any]:
    """The arguments that are there."""
    return [one for one in given if one is not None]


def floats(rows: Any) -> float:
    """Numbers of the dtype of `rows` that one in 32 bits is as long as."""
    return ITEM_BYTES[FLOAT] / ITEM_BYTES[str(rows.dtype).removeprefix("torch.")]


def kernels_of(of: str, *kernels: tuple[float, float]) -> tuple[Step, ...]:
    """Kernels that go over a sequence in chunks, of so many FLOPs and numbers moved."""
    return tuple(
        Step(kind=OpKind.RECURRENT, flops=round(flops), numbers=moved, of=of) for flops, moved in kernels
    )
