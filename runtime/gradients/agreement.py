"""Gradients of what tensor parallelism holds whole, made equal again after methods that treat numbers by their neighbours.

Peers of tp reduce the same gradient each for themselves. A method with scales, draws or choices treats it by what else is
in the buffer, which is another share on every peer: the copies would drift apart. Their mean is taken, in one message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoparallel.costmodel.compression import parse_method
from autoparallel.planner.strategy.types import Strategy
from autoparallel.runtime.ranks.mesh import RankMesh
from autoparallel.runtime.tensor.questions import local

NUMBER_BY_NUMBER = ("none", "fp16", "bf16")


class ReplicatedGradients:
    """The parameters of one module that every peer of tp holds whole."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._parameters, self._group = parameters, group

    @torch.no_grad()
    def agree(self) -> None:
        """Make every gradient the mean of what the peers have. Collective over tp."""
        self._average([local(p.grad) for p in self._parameters if p.grad is not None])

    @torch.no_grad()
    def mean(self, owed: Mapping[nn.Parameter, Tensor]) -> None:
        """Make what is owed of every such parameter the mean of what the peers owe, in place: it is all that they will have
        sent, since their gradients are averaged. Collective over tp."""
        self._average([owed[p] for p in self._parameters if p in owed])

    def _average(self, every: Iterable[Tensor]) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for part in every:
            by_dtype.setdefault(part.dtype, []).append(part)
        for parts in by_dtype.values():
            flat = torch.cat([part.reshape(-1) for part in parts])
            dist.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat, group=self._group)
            flat /= self._group.size()
            for part, mean in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
                part.copy_(mean.view(part.shape))


def replicated_gradients(module: nn.Module, strategy: Strategy, mesh: RankMesh) -> ReplicatedGradients | None:
    """Those of `module` that have to be made equal; None where copies stay equal by themselves."""
    methods = {parse_method(method).name for method in strategy.grad_sync.compression}
    if mesh.sizes.tp == 1 or mesh.sizes.data_parallel * mesh.sizes.cp == 1 or methods <= {*NUMBER_BY_NUMBER}:
        return None
    whole = [p for p in dict.fromkeys(module.parameters()) if p.requires_grad and _held_whole(p)]
    return ReplicatedGradients(whole, mesh.group("tp"))


def _held_whole(parameter: nn.Parameter) -> bool:
    if not isinstance(parameter, DTensor):
        return True
    names = parameter.device_mesh.mesh_dim_names or ()
    return all(p.is_replicate() for name, p in zip(names, parameter.placements, strict=True) if name == "tp")
