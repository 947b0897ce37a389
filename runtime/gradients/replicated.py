"""Gradients: accumulated over micro-batches, averaged over replicas in buckets, measured and clipped.

Sharded data parallelism (FSDP2) averages over the ranks that it shards over by itself. What is left is done here, the same way for
plain, tensor-parallel and FSDP2 parameters: the mean over the replicas, in buckets that start on their way as
soon as their last gradient has arrived; and partial sums over tp that autograd leaves on replicated
parameters (norms under sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from autoparallel.planner.expand.under_way import MOST_UNDER_WAY
from autoparallel.runtime.gradients.buckets import Bucket, agreed_order, filled
from autoparallel.runtime.gradients.feedback import Memory
from autoparallel.runtime.gradients.reductions import Reducer
from autoparallel.runtime.tensor.questions import local
from autoparallel.runtime.torch_private import (
    after_backward,
    dtensor_like,
    is_fake,
    laid_out,
    layout_of,
    norms_of,
    scale_all,
)


class GradientSync:
    """Brings `.grad` of a module's parameters to the mean over the replicas.

    Between `begin` and `finish` each gradient is expected `arrivals` times and its bucket starts when the
    last has come; `finish` waits for all. The first step fills buckets with the last parameters first, all others
    in the order in which its gradients came. A backward pass outside of the two is followed by the same, at once
    (the mean of what is already averaged is itself, so that accumulating this way stays right).

    Memory: one buffer of `grad_dtype` for all gradients, which `.grad` are views of where the dtypes agree;
    where they differ, the buffer beside `.grad`.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        reducer: Reducer | None,
        *,
        group: dist.ProcessGroup | None,
        grad_dtype: torch.dtype,
        bucket_bytes: float,
        overlap: bool,
        copied: Container[nn.Parameter] = (),
        copied_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._parameters = [p for p in dict.fromkeys(parameters) if p.requires_grad]
        self._reducer, self._group, self._overlap = reducer, group, overlap
        # What FSDP2 leaves alone (scalars): its mean over the ranks that shard is taken here.
        self._copied_group = copied_group
        self._copied = [p for p in self._parameters if p in copied]
        self._arrivals = 0  # expected of each parameter; 0 outside of a step
        self._scheduled = False
        self._next = 0  # buckets start in order, the same on every rank
        self._known_flags: tuple[tuple[int, ...], Tensor] | None = None  # of the last step, and on the device
        accumulate = reducer is not None or any(p.dtype != grad_dtype for p in self._parameters)
        self._fill_with = partial(filled, dtype=grad_dtype, size_bytes=bucket_bytes)
        # The last parameters first, until a step has shown in which order gradients come.
        self._buckets = self._fill_with(self._parameters[::-1]) if accumulate else []
        self._home = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._came: list[nn.Parameter] = []  # whose gradients were complete, in the order of a step
        self._steps = 0
        self._given: dict[nn.Parameter, Tensor] = {}  # see `give`
        self._hooks: list[RemovableHandle] = []
        if accumulate or self._copied or any(isinstance(p, DTensor) for p in self._parameters):
            self._hooks = [p.register_post_accumulate_grad_hook(self._arrive) for p in self._parameters]

    def close(self) -> None:
        """Let go of the parameters: another synchronises them. Gradients stay."""
        for hook in self._hooks:
            hook.remove()

    def buffer_bytes(self) -> int:
        """Bytes of the buffers that are there now; `.grad` are views of them where dtypes agree."""
        return sum(bucket.buffer.nbytes for bucket in self._buckets if bucket.buffer is not None)

    def under_way_bytes(self) -> int:
        """Bytes that reductions hold now, beside the buffers."""
        return sum(bucket.reduction.held_bytes for bucket in self._buckets if bucket.reduction is not None)

    def owed(self) -> dict[nn.Parameter, Tensor]:
        """What error feedback still has to bring to each gradient's mean, this rank's parts of it; of the parameters for
        which it is kept, or to which something was given. Collective over the replicas."""
        found: dict[nn.Parameter, Tensor] = {}
        for bucket in self._buckets if self._reducer is not None and self._reducer.biased else ():
            assert self._reducer is not None
            parts = bucket.views()
            assert bucket.buffer is not None
            flat = self._reducer.owed(_as_real(bucket.buffer).view(-1), bucket.memory)
            dist.all_reduce(flat, group=self._group)
            shares = flat.split([_as_real(part).numel() for part in parts])
            for parameter, part, share in zip(bucket.parameters, parts, shares, strict=True):
                found[parameter] = _shaped(share, part)
        for parameter, given in self._given.items():
            found[parameter] = found[parameter] + given if parameter in found else given.clone()
        return found

    def average_copies(self, owed: Mapping[nn.Parameter, Tensor]) -> None:
        """Make what is owed of every parameter that FSDP2 leaves alone the mean over the ranks that shard, as its gradient
        becomes, in place. Collective over them."""
        for parameter in self._copied:
            if parameter in owed:
                self._average(owed[parameter])

    def mean(self, owed: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """The mean over the replicas of what each of them owes. Collective over them."""
        for part in owed.values() if self._group is not None else ():
            dist.all_reduce(part, group=self._group)
            part /= dist.get_world_size(self._group)
        return owed

    def give(self, owed: Mapping[nn.Parameter, Tensor]) -> None:
        """Add to the gradients of the next step what another run still owed (see `owed`), and forget what is owed now."""
        for bucket in self._buckets:
            bucket.memory = Memory()
        self._given = {p: owed[p] for p in self._parameters if p in owed}

    def _arrange(self) -> None:
        """Fill buckets in the order in which gradients came in the last step, so that none waits for a later one's. Collective."""
        now = [p for bucket in self._buckets for p in bucket.parameters]
        order = agreed_order(now, self._came, self._group)
        if all(one is other for one, other in zip(now, order, strict=True)):
            return
        owed = self.owed()
        self._buckets, self._known_flags = self._fill_with(order), None
        self._home = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        if owed:
            self.give(owed)

    def begin(self, arrivals: int) -> None:
        """Start a step in which each gradient arrives `arrivals` times. Collective."""
        self._arrivals, self._steps = arrivals, self._steps + 1
        if self._steps == 2 and self._overlap and self._reducer is not None:
            self._arrange()
        self._came.clear()
        for bucket in self._buckets:
            self._fill(bucket)

    def finish(self) -> None:
        """End a step: every `.grad` is the mean over the replicas of what has arrived, added to what was."""
        for bucket in self._buckets[self._next :]:
            self._start(bucket)
        flags, work = self._start_flags()
        for bucket in self._buckets:
            if bucket.reduction is not None:
                bucket.reduction.wait()
                bucket.reduction = None  # which holds the buffer
        if work is not None:
            work.wait()
        if not all(bucket.arrived.get(p) for bucket in self._buckets for p in bucket.parameters):
            flags = flags.cpu()  # waits for the device, once, and only where the flags are read
        position = 0
        for bucket in self._buckets:
            self._hand_over(bucket, flags[position : position + len(bucket.parameters)])
            position += len(bucket.parameters)
        self._arrivals = self._next = 0
        for parameter in self._parameters:
            _reduce_partial(parameter)
        for parameter, given in self._given.items():  # where nothing reduces
            if parameter.grad is not None:
                local(parameter.grad).add_(given.to(parameter.grad.dtype))
        self._given = {p: given for p, given in self._given.items() if p.grad is None}
        for parameter in self._copied:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._average(local(parameter.grad))

    def _average(self, part: Tensor) -> None:
        """Make `part` the mean over the ranks that shard."""
        dist.all_reduce(part, group=self._copied_group)
        part.div_(dist.get_world_size(self._copied_group))

    def _fill(self, bucket: Bucket) -> None:
        """Put what `.grad` holds into the buffer and, where dtypes agree, `.grad` onto the buffer."""
        bucket.arrived.clear()
        bucket.fresh.clear()
        bucket.parts.clear()
        bucket.reduction = None
        for parameter, view in zip(bucket.parameters, bucket.views(), strict=True):
            _reduce_partial(parameter)
            before = parameter.grad
            if before is not None and local(before).data_ptr() == view.data_ptr():
                continue
            view.zero_() if before is None else view.copy_(local(before))
            parameter.grad = None
            if before is None and _is_whole(parameter):
                bucket.fresh.add(parameter)  # the first gradient says whether tp has parts of a sum
            elif parameter.dtype == bucket.dtype:
                parameter.grad = _like(parameter, view)

    def _arrive(self, parameter: nn.Parameter) -> None:
        if not self._arrivals:
            if not self._scheduled:
                self._scheduled = True
                after_backward(self._sync_now)
            return
        bucket = self._home.get(parameter)
        if bucket is None:
            return
        if parameter.grad is not None and (parameter.dtype != bucket.dtype or parameter in bucket.fresh):
            self._take(parameter, bucket)
        bucket.arrived[parameter] = bucket.arrived.get(parameter, 0) + 1
        if bucket.arrived[parameter] == self._arrivals:
            self._came.append(parameter)
        while self._overlap and self._next < len(self._buckets) and self._complete(self._buckets[self._next]):
            self._start(self._buckets[self._next])

    def _take(self, parameter: nn.Parameter, bucket: Bucket) -> None:
        """Add `.grad` to the buffer; parts of a sum over tp are summed once a step, when the bucket starts."""
        gradient, view = parameter.grad, bucket.view(parameter)
        assert gradient is not None
        layout = layout_of(gradient) if _in_parts(gradient) else None
        if layout is None or (parameter in bucket.arrived and parameter not in bucket.parts):
            _reduce_partial(parameter)
            assert parameter.grad is not None
            gradient = parameter.grad
        elif parameter in bucket.fresh:
            bucket.parts[parameter] = layout
        if parameter in bucket.parts and layout is None:
            self._sum_parts(parameter, bucket)
        view.add_(local(gradient))
        parameter.grad = None
        if parameter.dtype == bucket.dtype:
            own = bucket.parts.get(parameter)
            parameter.grad = _like(parameter, view) if own is None else laid_out(view, own)
            bucket.fresh.discard(parameter)

    def _sum_parts(self, parameter: nn.Parameter, bucket: Bucket) -> None:
        layout, view = bucket.parts.pop(parameter), bucket.view(parameter)
        whole = laid_out(view, layout).redistribute(placements=_placements(parameter))
        view.copy_(local(whole))
        if parameter.dtype == bucket.dtype:
            parameter.grad = _like(parameter, view)

    def _complete(self, bucket: Bucket) -> bool:
        return all(bucket.arrived.get(p, 0) >= self._arrivals for p in bucket.parameters)

    def _start(self, bucket: Bucket) -> None:
        self._next += 1
        for parameter in list(bucket.parts):
            self._sum_parts(parameter, bucket)
        if self._reducer is not None:
            assert bucket.buffer is not None
            for parameter, view in zip(bucket.parameters, bucket.views(), strict=True):
                if (given := self._given.pop(parameter, None)) is not None:
                    view += given.to(view)
            self._make_room()
            bucket.reduction = self._reducer.start(_as_real(bucket.buffer), bucket.memory)

    def _make_room(self) -> None:
        """End the oldest reduction where too many have copies beside their buffers; in the same order on every rank."""
        assert self._reducer is not None
        under_way = [bucket for bucket in self._buckets if bucket.reduction is not None]
        if self._reducer.beside and len(under_way) >= MOST_UNDER_WAY:
            assert under_way[0].reduction is not None
            under_way[0].reduction.wait()
            under_way[0].reduction = None

    def _sync_now(self) -> None:
        self._scheduled = False
        arrived = [p for p in self._parameters if p.grad is not None]
        for bucket in self._buckets:
            self._fill(bucket)
            bucket.arrived.update({p: 1 for p in arrived if self._home.get(p) is bucket})
        self.finish()

    def _start_flags(self) -> tuple[Tensor, dist.Work | None]:
        """Which parameters got a gradient on some replica, in the order of the buckets; still on its way."""
        ordered = [p for bucket in self._buckets for p in bucket.parameters]
        here = tuple(1 if self._home[p].arrived.get(p) else 0 for p in ordered)
        device = local(ordered[0]).device if ordered else None
        if self._known_flags is None or self._known_flags[0] != here:  # a copy to the device waits for it
            self._known_flags = here, torch.tensor(here, device=device, dtype=torch.int32)
        flags = self._known_flags[1].clone()
        if not ordered or self._group is None:
            return flags, None
        return flags, dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _hand_over(self, bucket: Bucket, used: Tensor) -> None:
        for index, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views(), strict=True)):
            # Without any gradient, here or on a replica or from before, `.grad` stays None; ranks of a dry run are alike.
            here = bucket.arrived.get(parameter)
            if not here and (is_fake(view) or (not bool(used[index]) and not bool(view.any()))):
                parameter.grad = None
            elif parameter.dtype != bucket.dtype:
                parameter.grad = _like(parameter, view.to(parameter.dtype))
            elif parameter.grad is None:
                parameter.grad = _like(parameter, view)
        bucket.buffer = bucket.buffer if bucket.dtype == bucket.parameters[0].dtype else None


def _as_real(tensor: Tensor) -> Tensor:
    """The same memory as real numbers: what is summed and squared alike."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    """Numbers in a row in the shape of `like`, which may be complex."""
    if like.is_complex():
        return torch.view_as_complex(flat.view(*like.shape, 2).contiguous())
    return flat.view(like.shape).clone()


def _like(parameter: nn.Parameter, part: Tensor) -> Tensor:
    """A gradient for `parameter` whose local part is `part`."""
    if not isinstance(parameter, DTensor):
        return part
    return dtensor_like(part, parameter)


def _is_whole(parameter: nn.Parameter) -> bool:
    """Whether tensor parallelism has it whole on every rank, so that its gradients may be parts of a sum."""
    return isinstance(parameter, DTensor) and all(p.is_replicate() for p in parameter.placements)


def _in_parts(gradient: Tensor) -> bool:
    return isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements)


def _placements(parameter: nn.Parameter) -> Any:
    assert isinstance(parameter, DTensor)
    return parameter.placements


def _reduce_partial(parameter: nn.Parameter) -> None:
    gradient = parameter.grad
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return
    if gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def gradient_norm_squared(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Sum of squares of all gradients, in float32 or wider, over every axis that shards them; collective.

    Each tensor counts once, however many ranks hold a copy of it.
    """
    held: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    for parameter in dict.fromkeys(parameters):
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            sharded = tuple(i for i, p in enumerate(gradient.placements) if not p.is_replicate())
            held.setdefault((gradient.device_mesh, sharded), []).append(local(gradient))
        elif gradient is not None:
            held.setdefault((None, ()), []).append(gradient.detach())
    squares = []
    for (mesh, sharded), parts in held.items():
        square = _sum_of_squares(parts)
        for dim in sharded:
            assert mesh is not None
            dist.all_reduce(square, group=mesh.get_group(dim))
        squares.append(square)
    return torch.stack(squares).sum() if squares else torch.zeros(())


def _sum_of_squares(parts: Sequence[Tensor]) -> Tensor:
    """Of all numbers in `parts`; as few kernels as there are dtypes, where the device has them for many tensors."""
    wide = torch.float64 if any(_as_real(p).dtype == torch.float64 for p in parts) else torch.float32
    norms = [norm for same in _by_dtype([_as_real(part) for part in parts]) for norm in norms_of(same, wide)]
    return torch.stack(norms).square().sum()


def _by_dtype(parts: Sequence[Tensor]) -> list[list[Tensor]]:
    found: dict[torch.dtype, list[Tensor]] = {}
    for part in parts:
        found.setdefault(part.dtype, []).append(part)
    return list(found.values())


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply every gradient by `factor`, in place."""
    parts = [local(p.grad) for p in dict.fromkeys(parameters) if p.grad is not None]
    for same in _by_dtype(parts):
        scale_all(same, factor.to(same[0].device))
