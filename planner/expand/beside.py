"""What stands beside a link of the chain under FSDP2, of what `costmodel.memory` adds to it for its neighbours in the stage.

Where the partition is known the neighbours are; where it is not (`most_beside`) a link is priced beside the most that there may
be: what a unit frees or lacks is then at its largest, so that its own bytes are the least of all places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoparallel.costmodel.program import BlockWork, Collective, CollectiveOp
from autoparallel.planner.expand import state
from autoparallel.planner.expand.gathers import gathers_of
from autoparallel.planner.expand.glue import GlueUnit
from autoparallel.planner.strategy.types import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSizes:
    """Whole bytes of a link: what its reductions take in, and of that what `stands` when it has run back, in its last one; what is gathered
    for it, experts apart, which are gathered while it runs."""

    reduced: int
    stands: int
    gathered: int
    expert_gathered: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Bytes: of the last reduction (of the link behind), which goes when gradients of this link are reduced; of what is gathered for the
    link ahead, which runs back next. `inside`: what the walk adds for both neighbours of units that are reduced and gathered while those
    run, of which `apart` are gathered; what is gathered for the link behind, in a forward, is `following`. `coming`: whether what is gathered for the link ahead comes beside this one, as of two blocks
    (`runtime/gradients/fsdp.py`, `_gather_ahead_in_order`). `ending`: the root unit of the stage, beside its first link, the last to run back; `gone`, what repeated blocks have freed by then where gradients are summed
    up: those, and parameters. `alone`: no other link is in the stage."""

    reduced: int = 0
    gathered: int = 0
    inside: int = 0
    apart: int = 0
    following: int = 0
    coming: bool = False
    ending: GlueUnit | None = None
    gone: int = 0
    alone: bool = False


def whole_gradients(reduce: Sequence[Collective]) -> int:
    """Bytes of what reduce-scatters take in."""
    return sum(c.size_bytes for c in reduce if c.op is CollectiveOp.REDUCE_SCATTER)


def link_sizes(work: BlockWork, strategy: Strategy, *, stands: int | None, root: int) -> LinkSizes:
    """Of a link's work; `root` bytes of its parameters are gathered for a whole pass. `stands`: None
    where all but experts is one unit."""
    gather, expert_gather = gathers_of(work.parameters, work.expert_parameters, strategy)
    dense = whole_gradients(state.reduction_of(work.trainable - work.expert_trainable, strategy))
    whole = whole_gradients(state.reduction_of(work.trainable, strategy, work.expert_trainable))
    return LinkSizes(
        reduced=whole, stands=dense if stands is None else stands,
        gathered=max(gather.size_bytes - root, 0) if gather else 0,
        expert_gathered=expert_gather.size_bytes if expert_gather else 0,
    )  # fmt: skip


def beside_of(ahead: LinkSizes | None, behind: LinkSizes | None, ending: GlueUnit | None = None) -> Beside:
    """Beside a link with these neighbours in its stage."""
    return Beside(
        reduced=behind.stands if behind else 0,
        gathered=ahead.gathered if ahead else 0,
        inside=(behind.reduced - behind.stands if behind else 0) + (ahead.expert_gathered if ahead else 0),
        apart=ahead.expert_gathered if ahead else 0,
        following=behind.gathered + behind.expert_gathered if behind else 0,
        ending=ending,
        alone=ahead is None and behind is None,
    )


def most_beside(every: Sequence[Beside]) -> Beside:
    """Beside which no link has more of its own than beside any of `every`: the root unit is reduced elsewhere."""
    return Beside(
        reduced=max(one.reduced for one in every),
        gathered=max(one.gathered for one in every),
        inside=max(one.inside for one in every),
    )
