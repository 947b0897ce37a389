"""This rank's share of a DTensor, and back: what `to_local` and `from_local` do, in a third of their time.

Those work the layout of every gradient out anew; here it is known beforehand. Shares are equal on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from autoparallel.runtime.torch_private import dtensor_of, laid_out, layout_of, with_placement

# Of DTensors, by shape, strides and dtype of a rank's share, and placement.
Layouts = dict[tuple[Any, ...], Any]


def to_share(tensor: DTensor, back: Placement) -> Tensor:
    """This rank's share, differentiable; its gradient is a share of one in the placement `back`."""
    share: Tensor = _Share.apply(tensor, back)
    return share


def from_share(share: Tensor, placement: Placement, mesh: DeviceMesh, layouts: Layouts) -> DTensor:
    """The DTensor of which this rank has `share`, differentiable. `layouts` remembers what was worked out."""
    whole: DTensor = _Whole.apply(share, placement, mesh, layouts)
    return whole


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, back: Placement) -> Tensor:
        share: Tensor = tensor.to_local()
        ctx.set_materialize_grads(False)
        ctx.contiguous, ctx.layout = share.is_contiguous(), layout_of(tensor)
        if back != tensor.placements[-1]:
            ctx.layout = with_placement(ctx.layout, back)
        return share.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[DTensor | None, None]:
        if gradient is None:
            return None, None
        if ctx.contiguous and gradient.is_contiguous():
            return laid_out(gradient, ctx.layout), None
        return dtensor_of(gradient, ctx.layout.mesh, ctx.layout.placements), None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, placement: Placement, mesh: DeviceMesh, layouts: Layouts) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.placement = Replicate() if placement.is_partial() else placement
        key = (share.shape, share.stride(), share.dtype, placement)
        if key not in layouts:
            layouts[key] = layout_of(dtensor_of(share, mesh, [placement]))
        return laid_out(share.detach(), layouts[key])

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[Tensor | None, None, None, None]:
        if gradient is None:
            return None, None, None, None
        if gradient.placements[-1] != ctx.placement:
            gradient = gradient.redistribute(placements=[ctx.placement])
        return gradient.to_local(), None, None, None
