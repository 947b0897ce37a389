"""Parameters tied across pipeline stages: each stage holds a copy, and their gradients are added up.

The copies start equal and get the same gradient, so that any optimizer keeps them equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from autoparallel.runtime.cut import StageModule, Tie
from autoparallel.runtime.materialise import share_of
from autoparallel.runtime.tensor_tools import local, own_parameters


def separate_ties(stages: Sequence[StageModule]) -> None:
    """Give each of this rank's stages its own copy of a parameter that another of them holds too."""
    taken: set[nn.Parameter] = set()
    for stage in stages:
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for owner, name, parameter in list(own_parameters(stage)):
            if parameter in taken:
                if parameter not in copies:
                    copies[parameter] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                setattr(owner, name, copies[parameter])
        taken |= set(stage.parameters())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copies:
    parameters: tuple[nn.Parameter, ...]  # this rank's copies
    group: dist.ProcessGroup | None  # the pipeline ranks that hold copies; None if they are all here
    same_layout: bool


class TiedGradients:
    """Adds up, after a step, the gradients of the copies of each tied parameter; collective over `group`."""

    def __init__(
        self, stages: Sequence[StageModule], group: dist.ProcessGroup, mesh: DeviceMesh | None
    ) -> None:
        held = {stage.stage_cut.index: stage for stage in stages}
        self._mesh = mesh
        homes = _homes(sorted(held), group)
        self._copies: list[_Copies] = []
        self._not_counted: set[nn.Parameter] = set()
        for tie in stages[0].stage_cut.ties:
            ranks = sorted({homes[stage] for stage in tie.stages})
            mine = tuple(
                held[stage].get_parameter(name)
                for stage, name in zip(tie.stages, tie.names, strict=True)
                if stage in held
            )
            if mine and mine[0].requires_grad:
                self._copies.append(_copies(tie, mine, ranks, group))
                self._not_counted |= set(mine[1:] if tie.stages[0] in held else mine)
        self._before: dict[nn.Parameter, Tensor] = {}

    def is_copy(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter counts as another stage's (in a norm over the whole model)."""
        return parameter in self._not_counted

    def begin(self) -> None:
        """Start a step: what `.grad` holds from before is already added up, so it is set aside."""
        self._before = {}
        for copies in self._copies:
            for parameter in copies.parameters:
                if parameter.grad is not None:
                    self._before[parameter] = parameter.grad
                    parameter.grad = None

    @torch.no_grad()
    def share_values(self) -> None:
        """Give every copy the first copy's values (stages that initialise their own draw different ones)."""
        for copies in self._copies:
            first = copies.parameters[0]
            whole = first.full_tensor() if isinstance(first, DTensor) else first.detach().clone()
            if copies.group is not None:
                dist.broadcast(whole, dist.get_global_rank(copies.group, 0), group=copies.group)
            for parameter in copies.parameters:
                local(parameter).copy_(local(share_of(whole, parameter)))

    @torch.no_grad()
    def reduce(self) -> None:
        """Every copy's `.grad` becomes the sum over all copies, plus what was there before the step."""
        for copies in self._copies:
            parts = [self._part(p, copies.same_layout) for p in copies.parameters]
            total = torch.stack(parts).sum(dim=0) if len(parts) > 1 else parts[0].contiguous()
            if copies.group is not None:
                dist.all_reduce(total, group=copies.group)
            for parameter in copies.parameters:
                parameter.grad = self._as_gradient(total.clone(), parameter, copies.same_layout)
                if parameter in self._before:
                    parameter.grad += self._before[parameter]

    def _part(self, parameter: nn.Parameter, same_layout: bool) -> Tensor:
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        if isinstance(gradient, DTensor) and not same_layout:
            return gradient.full_tensor()
        return local(gradient).clone()

    def _as_gradient(self, total: Tensor, parameter: nn.Parameter, same_layout: bool) -> Tensor:
        if not isinstance(parameter, DTensor):
            return total
        mesh, placements = parameter.device_mesh, parameter.placements
        if not same_layout:
            return distribute_tensor(total, mesh, placements, src_data_rank=None)
        return DTensor.from_local(
            total, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )


def _homes(mine: list[int], group: dist.ProcessGroup) -> dict[int, int]:
    """The pipeline rank of every stage."""
    every: list[list[int]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(every, mine, group=group)
    return {stage: rank for rank, stages in enumerate(every) for stage in stages}


def _copies(tie: Tie, mine: tuple[nn.Parameter, ...], ranks: list[int], group: dist.ProcessGroup) -> _Copies:
    layouts = [p.placements if isinstance(p, DTensor) else None for p in mine]
    if len(ranks) == 1:
        return _Copies(parameters=mine, group=None, same_layout=all(x == layouts[0] for x in layouts))
    members = [dist.get_global_rank(group, rank) for rank in ranks]
    own = dist.new_group(members, use_local_synchronization=True)
    every: list[list[object]] = [[] for _ in ranks]
    dist.all_gather_object(every, layouts, group=own)
    flat = [layout for part in every for layout in part]
    assert tie.stages, "a tie joins stages"
    return _Copies(parameters=mine, group=own, same_layout=all(layout == flat[0] for layout in flat))
