"""Parameters whose gradients travel together: in the order in which gradients arrive, as far as it is known."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoparallel.runtime.gradients.feedback import Memory
from autoparallel.runtime.gradients.reductions import Reduction
from autoparallel.runtime.tensor.questions import local


@dataclass(slots=True, kw_only=True, eq=False)
class Bucket:
    """Parameters whose gradients travel together, in one flat buffer of `dtype`."""

    parameters: list[nn.Parameter]
    dtype: torch.dtype
    arrived: dict[nn.Parameter, int] = field(default_factory=dict)
    buffer: Tensor | None = None
    reduction: Reduction | None = None
    memory: Memory = field(default_factory=Memory)
    # Parameters of which the buffer has nothing from before the step; of these, the layout in which tp has parts of a sum.
    fresh: set[nn.Parameter] = field(default_factory=set)
    parts: dict[nn.Parameter, Any] = field(default_factory=dict)

    def view(self, parameter: nn.Parameter) -> Tensor:
        """The part of the buffer that is this parameter's."""
        return self.views()[next(i for i, p in enumerate(self.parameters) if p is parameter)]

    def views(self) -> list[Tensor]:
        """The buffer cut into one tensor per parameter, allocated zero if it is not there."""
        numels = [local(p).numel() for p in self.parameters]
        if self.buffer is None:
            device = local(self.parameters[0]).device
            self.buffer = torch.zeros(sum(numels), dtype=self.dtype, device=device)
        parts = self.buffer.split(numels)
        return [part.view(local(p).shape) for part, p in zip(parts, self.parameters, strict=True)]


def filled(parameters: Sequence[nn.Parameter], dtype: torch.dtype, size_bytes: float) -> list[Bucket]:
    """Buckets of about `size_bytes` of these parameters, in their order."""
    buckets: list[Bucket] = []
    held = float("inf")
    for parameter in parameters:
        numel = local(parameter).numel()
        # Parameters of several dtypes need one bucket each: `.grad` has its parameter's dtype.
        if held + numel * dtype.itemsize > size_bytes or buckets[-1].parameters[0].dtype != parameter.dtype:
            buckets.append(Bucket(parameters=[], dtype=parameter.dtype if parameter.is_complex() else dtype))
            held = 0.0
        buckets[-1].parameters.append(parameter)
        held += numel * dtype.itemsize
    return buckets


def agreed_order(
    parameters: Sequence[nn.Parameter], came: Collection[nn.Parameter], group: dist.ProcessGroup | None
) -> list[nn.Parameter]:
    """`parameters` as their gradients `came` on the first rank of the group, and behind these those of which none did. Collective."""
    number = {parameter: index for index, parameter in enumerate(parameters)}
    first = [number[parameter] for parameter in dict.fromkeys(came) if parameter in number]
    rest = [index for index in range(len(parameters)) if index not in set(first)]
    device = local(parameters[0]).device if group is not None and parameters else torch.device("cpu")
    order = torch.tensor([*first, *rest], dtype=torch.int64, device=device)
    if group is not None and parameters:
        dist.broadcast(order, group=group, group_src=0)
    return [parameters[index] for index in order.tolist()]
