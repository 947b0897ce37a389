"""Tensors on their way into and out of context parallelism.

A tensor of the sequence is a DTensor on a mesh whose first axis is cp: `Shard(d)` along it where each rank has its
share of the sequence, and whatever tensor parallelism makes of it along the second, if there is one. Any other
tensor (plain, or a DTensor on the axis tp alone) knows nothing of cp: every rank has the same values.

Gradients of tensors that know nothing of cp may differ between the ranks: **their mean over cp is the gradient**.
That is what data parallelism takes of parameters anyway, it stays true under all that autograd does with such
tensors on its way back, and it needs no communication where they meet the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autoparallel.runtime.tensor.questions import to_plain
from autoparallel.runtime.torch_private import dtensor_of


def on_mesh(value: Any, mesh: DeviceMesh) -> bool:
    """Whether `value` is a DTensor that knows of cp, the first axis of `mesh`."""
    return isinstance(value, DTensor) and value.device_mesh == mesh


def onto(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor that knows nothing of cp as one that is replicated over it, without communication both ways."""
    if on_mesh(tensor, mesh):
        assert isinstance(tensor, DTensor)
        return tensor
    return _Onto.apply(tensor, mesh)  # type: ignore[no-any-return]


def whole(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The tensor gathered over cp, as one that knows nothing of it; its gradient is reduced and scattered."""
    return _Whole.apply(tensor, mesh) if on_mesh(tensor, mesh) else tensor


def whole_alike(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The same where every rank then does the same, backward too: each has all of the gradient, and keeps its part."""
    return _WholeAlike.apply(tensor, mesh) if on_mesh(tensor, mesh) else tensor


def cut(tensor: Tensor, dim: int, mesh: DeviceMesh) -> DTensor:
    """The tensor sharded along `dim` over cp: cut locally where every rank has all of it."""
    return placed(onto(tensor, mesh), Shard(dim))


def placed(tensor: DTensor, placement: Placement) -> DTensor:
    """The tensor in `placement` over cp, and as it was over tp."""
    if tensor.placements[0] == placement:
        return tensor
    # What arrives is contiguous, whatever was sent; DTensor would take it to have the strides of what was sent.
    settled: DTensor = tensor.contiguous()  # type: ignore[assignment]
    # Sums that tp still has in parts are taken here: DTensor makes none of its own accord.
    rest = [Replicate() if p.is_partial() else p for p in tensor.placements[1:]]
    return settled.redistribute(placements=[placement, *rest])


def own_part(tensor: DTensor, gradient: Placement) -> Tensor:
    """What this rank of cp has of a tensor, plain or a DTensor on tp, whose gradient lies over cp as `gradient`."""
    return _OwnPart.apply(tensor, gradient)  # type: ignore[no-any-return]


def of_parts(part: Tensor, placement: Placement, mesh: DeviceMesh) -> DTensor:
    """The tensor of which each rank of cp has `part`, in `placement`; equal parts where they are shards."""
    return _OfParts.apply(part, placement, mesh)  # type: ignore[no-any-return]


def used_by_shares(value: Any, mesh: DeviceMesh) -> Any:
    """A tensor that knows nothing of cp as each rank uses it for its share alone: gradients are parts of a sum."""
    is_used = isinstance(value, Tensor) and value.requires_grad
    return _UsedByShares.apply(value, mesh.size(0)) if is_used else value


class _UsedByShares(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.ranks, None


class _Onto(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mesh: DeviceMesh) -> DTensor:
        ctx.plain = not isinstance(tensor, DTensor)
        return _join(tensor, Replicate(), mesh)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        mean = _any_mean(grads[0])
        return to_plain(mean) if ctx.plain else mean, None


class _Whole(Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, mesh: DeviceMesh) -> Tensor:
        before = tensor.placements[0]
        ctx.mesh, ctx.wanted = mesh, before if isinstance(before, Shard) else Replicate()
        return _apart(placed(tensor, Replicate()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        parts = _join(grads[0] / ctx.mesh.size(0), Partial(), ctx.mesh)
        return placed(parts, ctx.wanted), None


class _WholeAlike(Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, mesh: DeviceMesh) -> Tensor:
        return _Whole.forward(ctx, tensor, mesh)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return placed(_join(grads[0], Replicate(), ctx.mesh), ctx.wanted), None


class _OwnPart(Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, gradient: Placement) -> Tensor:
        ctx.mesh, ctx.gradient = tensor.device_mesh, gradient
        return _apart(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _join(grads[0].contiguous(), ctx.gradient, ctx.mesh), None


class _OfParts(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, placement: Placement, mesh: DeviceMesh) -> DTensor:
        # The gradient of each part of a sum is that of the sum.
        ctx.wanted = Replicate() if isinstance(placement, Partial) else placement
        ctx.plain = not isinstance(part, DTensor)
        return _join(part, placement, mesh)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        part = _apart(placed(grads[0], ctx.wanted))
        return to_plain(part) if ctx.plain else part, None, None


def _join(part: Tensor, placement: Placement, mesh: DeviceMesh) -> DTensor:
    """The DTensor on `mesh` of which `part` is this rank's along cp."""
    rest: Sequence[Placement] = ()
    if isinstance(part, DTensor):
        rest, part = part.placements, part.to_local()
    elif mesh.ndim > 1:
        rest = [Replicate()] * (mesh.ndim - 1)
    return dtensor_of(part.view_as(part), mesh, [placement, *rest])


def _apart(tensor: DTensor) -> Tensor:
    """This rank's part along cp: plain, or on tp."""
    part = tensor.to_local()
    part = part.view_as(part)
    if tensor.device_mesh.ndim == 1:
        return part
    return dtensor_of(part, tensor.device_mesh[_inner(tensor)], tensor.placements[1:])


def _inner(tensor: DTensor) -> str:
    names = tensor.device_mesh.mesh_dim_names
    assert names is not None
    return names[1]


def _any_mean(gradient: Any) -> Tensor:
    """A tensor on each rank of cp whose mean over them is the gradient, if possible without communication."""
    if not isinstance(gradient, DTensor):
        return gradient  # type: ignore[no-any-return]
    ranks = gradient.device_mesh.size(0)
    first, rest = gradient.placements[0], gradient.placements[1:]
    if type(first) is Partial and first.reduce_op == "sum":
        return _apart(gradient) * ranks
    if first.is_replicate() or (type(first) is Partial and first.reduce_op == "avg"):
        return _apart(gradient)
    if type(first) is Shard and not any(p.is_shard(first.dim) for p in rest):
        return _padded(gradient, first.dim)
    return _apart(placed(gradient, Replicate()))


def _padded(gradient: DTensor, dim: int) -> Tensor:
    """This rank's share of the gradient in its place, and zeros in those of the others."""
    mesh, size = gradient.device_mesh, gradient.shape[dim]
    ranks, part = mesh.size(0), gradient.to_local()
    first = min(mesh.get_local_rank(0) * -(-size // ranks), size)
    zeros = part.new_zeros([size if d == dim else n for d, n in enumerate(part.shape)])
    zeros.narrow(dim, first, part.shape[dim]).copy_(part).mul_(ranks)
    return _apart(dtensor_of(zeros, mesh, [Replicate(), *gradient.placements[1:]]))
