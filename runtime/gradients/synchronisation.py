"""All that synchronises the gradients of one module, made from a strategy, and made anew when `[grad_sync]` changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from autoparallel.planner.strategy.types import GradSync, Strategy
from autoparallel.runtime.capabilities.rows import Case
from autoparallel.runtime.capabilities.table import check_capabilities
from autoparallel.runtime.gradients.agreement import replicated_gradients
from autoparallel.runtime.gradients.fsdp import set_gathers, set_scatters
from autoparallel.runtime.gradients.owed import OwedGradients
from autoparallel.runtime.gradients.reductions import Reducer
from autoparallel.runtime.gradients.replicas import (
    group_reducer,
    replica_reducer,
    shard_wire,
    with_levels,
)
from autoparallel.runtime.gradients.replicated import GradientSync
from autoparallel.runtime.ranks.accelerator import backend_of_ranks
from autoparallel.runtime.ranks.mesh import RankMesh
from autoparallel.runtime.ranks.places import sharding_axes, summed_axes

_MIB = 2**20


def with_sync(strategy: Strategy, sync: GradSync, mesh: RankMesh) -> Strategy:
    """The strategy with another `[grad_sync]`. Raises UserError, before anything is changed, where it cannot be run."""
    found = replace(strategy, grad_sync=sync)
    check_capabilities(Case(strategy=found, level_sizes=mesh.level_sizes, backend=backend_of_ranks()))
    return found


class Synchronisation:
    """Brings `.grad` of a module's parameters to the mean over all data-parallel ranks.

    `copied` are parameters that FSDP2 leaves alone, `experts` layers that other ranks hold alike than the rest.
    """

    def __init__(
        self, module: nn.Module, strategy: Strategy, mesh: RankMesh, *, grad_dtype: torch.dtype,
        copied: Collection[nn.Parameter] = (), experts: Sequence[nn.Module] = (),
    ) -> None:  # fmt: skip
        self._module, self._mesh, self._grad_dtype = module, mesh, grad_dtype
        self._copied, self._experts = copied, experts
        self._syncs: list[GradientSync] = []
        self.owed = OwedGradients()
        self._make(strategy)

    def begin(self, arrivals: int) -> None:
        """Start a step in which each gradient arrives `arrivals` times."""
        for sync in self._syncs:
            sync.begin(arrivals)

    def finish(self) -> None:
        """End the step: `.grad` holds the means."""
        for sync in self._syncs:
            sync.finish()
        if self._replicated is not None:
            self._replicated.agree()

    def buffer_bytes(self) -> int:
        """Bytes of the buffers that are there now; `.grad` are views of them where dtypes agree."""
        return sum(sync.buffer_bytes() for sync in self._syncs)

    def under_way_bytes(self) -> int:
        """Bytes that reductions hold now, beside the buffers."""
        return sum(sync.under_way_bytes() for sync in self._syncs)

    def switch(self, strategy: Strategy) -> None:
        """From the next step on synchronise as `strategy` says, which differs in `[grad_sync]` alone. What error feedback
        owes goes along. Collective, between two steps."""
        owed = self.owed.gather()
        for sync in self._syncs:
            sync.close()
        self._make(strategy)
        if owed:
            self.owed.give(owed)

    def _make(self, strategy: Strategy) -> None:
        mesh = with_levels(self._mesh, strategy)
        self._syncs = self._gradient_syncs(strategy, mesh)
        self._replicated = replicated_gradients(self._module, strategy, mesh)
        scatters = set_scatters(self._module, shard_wire(strategy, mesh), self._experts)
        self.owed.follow(self._syncs, scatters, self._replicated)
        set_gathers(self._module, strategy.grad_sync.weights if strategy.shard.zero == 3 else "none")

    def _gradient_syncs(self, strategy: Strategy, mesh: RankMesh) -> list[GradientSync]:
        """Over the replicas. Where FSDP2 does not shard, experts have other ones than the rest."""
        zero, sync = strategy.shard.zero, strategy.grad_sync
        replicas, sharded = summed_axes(strategy), sharding_axes(mesh.sizes, zero)
        apart = dict.fromkeys(p for layer in self._experts for p in layer.parameters() if not sharded)

        # Of one rank by itself, which only casts, a copy is the only one: its mean over the replicas is taken as any other's.
        copied, copied_group = (self._copied, mesh.group(*sharded)) if sharded else ((), None)

        def over(
            parameters: Iterable[nn.Parameter], reducer: Reducer | None, group: dist.ProcessGroup | None
        ) -> GradientSync:
            return GradientSync(
                parameters, reducer, group=group, grad_dtype=self._grad_dtype, bucket_bytes=sync.bucket_mib * _MIB,
                overlap=sync.overlap, copied=copied, copied_group=copied_group,
            )  # fmt: skip

        dense = [parameter for parameter in self._module.parameters() if parameter not in apart]
        found = [over(dense, replica_reducer(strategy, mesh), mesh.group(*replicas) if replicas else None)]
        if apart:
            group = mesh.expert_replicas()
            found.append(over(apart, group_reducer(group, strategy, mesh) if group else None, group))
        return found
