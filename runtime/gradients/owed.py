"""What error feedback holds back of all gradients of a module, for checkpoints: as shares of parameters are, under any
strategy.

Every rank keeps what it has not sent. Together that is a gradient still to come: its mean over the ranks, of which each
rank holds its share, is what is saved; where peers of tp all hold a parameter whole, each of which has sent its own
gradient, the mean over these, too. Loaded, it is added to the next step's gradients before they are encoded, so that
nothing is lost however many ranks there are then, and whatever their method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from autoparallel.runtime.fsdp_private import unit_shards
from autoparallel.runtime.gradients.agreement import ReplicatedGradients
from autoparallel.runtime.gradients.replicated import GradientSync
from autoparallel.runtime.gradients.sharded import UnitScatter
from autoparallel.runtime.tensor.questions import local


class Owed(Protocol):
    """What all reductions of a rank owe."""

    def gather(self) -> dict[nn.Parameter, Tensor]:
        """By parameter, this rank's share; collective over all ranks that hold the module."""

    def give(self, owed: Mapping[nn.Parameter, Tensor]) -> None:
        """Add to the next step's gradients what was owed, and forget what is owed now."""


class OwedGradients:
    """Gathers and gives back what the reductions of one module owe."""

    def __init__(self) -> None:
        self._replicated: ReplicatedGradients | None = None
        self._syncs: Sequence[GradientSync] = ()
        self._scatters: Mapping[FSDPModule, UnitScatter] = {}

    def follow(
        self, syncs: Sequence[GradientSync], scatters: Mapping[FSDPModule, UnitScatter],
        replicated: ReplicatedGradients | None,
    ) -> None:  # fmt: skip
        """From now on these are what reduces, and what makes copies over tp equal."""
        self._syncs, self._scatters, self._replicated = syncs, scatters, replicated

    def gather(self) -> dict[nn.Parameter, Tensor]:
        """By parameter, this rank's share; of those for which error feedback is kept, or something was given. Collective over all ranks that
        hold the module."""
        found: dict[nn.Parameter, Tensor] = {}
        for unit, scatter in self._scatters.items():
            if scatter.biased or scatter.is_given:
                found |= _cut(unit, scatter.owed())
        if found:
            found = self._syncs[0].mean(found)
        for sync in self._syncs:
            for parameter, part in sync.owed().items():
                found[parameter] = found[parameter] + part if parameter in found else part
        for sync in self._syncs:
            sync.average_copies(found)
        if self._replicated is not None:
            self._replicated.mean(found)
        return found

    def give(self, owed: Mapping[nn.Parameter, Tensor]) -> None:
        """Add to the next step's gradients what was owed, by parameter, this rank's share, and forget what is owed now."""
        left = dict(owed)
        for unit, scatter in self._scatters.items():
            shards = unit_shards(unit)
            own = any(parameter in left for parameter, _ in shards)
            scatter.give(_joined(shards, left) if own else None)
            for parameter, _ in shards:
                left.pop(parameter, None)
        for sync in self._syncs:
            sync.give(left)


def _cut(unit: FSDPModule, part: Tensor | None) -> dict[nn.Parameter, Tensor]:
    """A rank's part of a unit's gradients by parameter; zeros where there is none, or one of other parameters (not all
    of the unit's got a gradient in the last step)."""
    shards = unit_shards(unit)
    if part is None or part.numel() != sum(size for _, size in shards):
        return {p: local(p).new_zeros(local(p).shape) for p, _ in shards}
    found, first = {}, 0
    for parameter, size in shards:
        own = local(parameter)
        found[parameter] = part[first : first + own.numel()].view(own.shape).clone()
        first += size
    return found


def _joined(shards: Sequence[tuple[nn.Parameter, int]], owed: Mapping[nn.Parameter, Tensor]) -> Tensor:
    """The inverse of `_cut`."""
    whole = local(shards[0][0]).new_zeros(sum(size for _, size in shards))
    first = 0
    for parameter, size in shards:
        if parameter in owed:
            part = owed[parameter]
            whole[first : first + part.numel()].copy_(part.reshape(-1))
        first += size
    return whole
