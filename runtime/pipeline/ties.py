"""Parameters tied across pipeline stages: each stage holds a copy, and their gradients are added up.

The copies start equal and get the same gradient, so that any optimizer keeps them equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoparallel.runtime.gradients.owed import OwedGradients
from autoparallel.runtime.loading.materialise import share_of
from autoparallel.runtime.pipeline.groups import pipeline_group
from autoparallel.runtime.ranks.mesh import RankMesh
from autoparallel.runtime.stages.cut import StageModule
from autoparallel.runtime.tensor.questions import as_bytes, local, own_parameters
from autoparallel.runtime.torch_private import dtensor_like


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
    """The copies of one parameter that this rank holds, and the ranks that hold others."""

    parameters: tuple[nn.Parameter, ...]
    group: dist.ProcessGroup | None  # None if all copies are here
    source: int  # the rank in `group` that holds the first copy
    same_layout: bool  # of all copies: then parts can be added as they are

    @classmethod
    def of(
        cls, parameters: tuple[nn.Parameter, ...], group: dist.ProcessGroup | None, *, source: int
    ) -> _Copies:
        """Collective over `group`."""
        layouts: list[object] = [p.placements if isinstance(p, DTensor) else None for p in parameters]
        if group is not None:
            every: list[list[object]] = [[] for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(every, layouts, group=group)
            layouts = [layout for part in every for layout in part]
        same = all(layout == layouts[0] for layout in layouts)
        return cls(parameters=parameters, group=group, source=source, same_layout=same)

    def comparable(self, tensor: Tensor) -> Tensor:
        """What can be added to the other copies': this rank's part if all are laid out alike, else the whole."""
        if isinstance(tensor, DTensor) and not self.same_layout:
            return tensor.full_tensor().contiguous()
        return local(tensor).contiguous()

    def laid_out(self, value: Tensor, parameter: nn.Parameter) -> Tensor:
        """Inverse of `comparable`: a tensor laid out like `parameter`."""
        if not isinstance(parameter, DTensor):
            return value
        return dtensor_like(value, parameter) if self.same_layout else share_of(value, parameter)

    def summed(self, own: Tensor) -> Tensor:
        """The sum of what each rank has. Two ranks send each other theirs, one message each way at once, as is priced; either order
        of a sum of two is the same number."""
        if self.group is None:
            return own
        if dist.get_world_size(self.group) > 2:
            dist.all_reduce(own, group=self.group)
            return own
        peer, other = 1 - dist.get_rank(self.group), torch.empty_like(own)
        exchange = [
            dist.P2POp(dist.isend, as_bytes(own), group=self.group, group_peer=peer),
            dist.P2POp(dist.irecv, as_bytes(other), group=self.group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        return own + other

    def any_has(self, here: bool) -> bool:
        """Whether any of the ranks says so. Collective over `group`."""
        if self.group is None:
            return here
        flag = torch.tensor(int(here), device=local(self.parameters[0]).device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group)
        return bool(flag.item())

    @torch.no_grad()
    def equalise(self) -> None:
        """Give every copy the values of the first."""
        value = self.comparable(self.parameters[0]).clone()
        if self.group is not None:
            dist.broadcast(as_bytes(value), dist.get_global_rank(self.group, self.source), group=self.group)
        for parameter in self.parameters:
            local(parameter).copy_(local(self.laid_out(value, parameter)))


class TiedGradients:
    """Adds up, after a step, the gradients of the copies of each tied parameter; collective over the ranks that
    hold any."""

    def __init__(self, stages: Sequence[StageModule], mesh: RankMesh) -> None:
        held = {stage.stage_cut.index: stage for stage in stages}
        homes = _homes(sorted(held), mesh.group("pp"))
        self._copies: list[_Copies] = []
        self._not_counted: set[nn.Parameter] = set()
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for tie in stages[0].stage_cut.ties:
            ranks = tuple(sorted({homes[stage] for stage in tie.stages}))
            if len(ranks) > 1 and ranks not in groups:
                groups[ranks] = pipeline_group(mesh, ranks, f"pp_tied_{'_'.join(map(str, ranks))}")
            mine = tuple(
                held[stage].get_parameter(name)
                for stage, name in zip(tie.stages, tie.names, strict=True)
                if stage in held
            )
            if mine:
                copies = _Copies.of(mine, groups.get(ranks), source=ranks.index(homes[tie.stages[0]]))
                copies.equalise()
                self._not_counted |= set(mine[1:] if tie.stages[0] in held else mine)
                if mine[0].requires_grad:
                    self._copies.append(copies)
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
    def reduce(self) -> None:
        """Every copy's `.grad` becomes the sum over all copies, plus what was there before the step."""
        for copies in self._copies:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in copies.parameters]
            total = torch.stack([copies.comparable(g) for g in gradients]).sum(dim=0)
            total = copies.summed(total)
            for parameter in copies.parameters:
                parameter.grad = copies.laid_out(total.clone(), parameter)
                if parameter in self._before:
                    parameter.grad += self._before[parameter]

    @torch.no_grad()
    def add_up(self, owed: dict[nn.Parameter, Tensor]) -> None:
        """As `reduce`, of what error feedback owes by parameter, this rank's share: every copy then has what all owe."""
        for copies in self._copies:
            if not copies.any_has(any(parameter in owed for parameter in copies.parameters)):
                continue
            parts = [
                _like(owed[p] if p in owed else torch.zeros_like(local(p.detach())), p)
                for p in copies.parameters
            ]
            total = copies.summed(torch.stack([copies.comparable(part) for part in parts]).sum(dim=0))
            for parameter in copies.parameters:
                owed[parameter] = local(copies.laid_out(total.clone(), parameter))


class OwedOfStages:
    """What the reductions of all of this rank's stages owe. Each copy of a tied parameter has gradients of its own: what they owe
    together is saved under all names of the parameter, and the first copy alone takes it back."""

    def __init__(self, stages: Sequence[OwedGradients], ties: TiedGradients) -> None:
        self._stages, self._ties = stages, ties

    def gather(self) -> dict[nn.Parameter, Tensor]:
        """By parameter, this rank's share; collective over all ranks of the pipeline."""
        found = {p: part for owed in self._stages for p, part in owed.gather().items()}
        self._ties.add_up(found)
        return found

    def give(self, owed: Mapping[nn.Parameter, Tensor]) -> None:
        """Add to the next step's gradients what was owed, and forget what is owed now."""
        counted = {p: part for p, part in owed.items() if not self._ties.is_copy(p)}
        for stage in self._stages:
            stage.give(counted)


def _like(part: Tensor, parameter: nn.Parameter) -> Tensor:
    """`part`, or the DTensor of which it is this rank's part where the parameter is one."""
    return dtensor_like(part, parameter) if isinstance(parameter, DTensor) else part


def _homes(mine: list[int], group: dist.ProcessGroup) -> dict[int, int]:
    """The pipeline rank of every stage."""
    every: list[list[int]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(every, mine, group=group)
    return {stage: rank for rank, stages in enumerate(every) for stage in stages}
