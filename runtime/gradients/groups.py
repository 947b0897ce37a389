"""The process groups of a strategy: their names, what they are for, and who is in them. Imports no torch.

`runtime/ranks/mesh.py` makes those along axes and those that join them, `replicas.py` those of network levels, the pipeline
its second one; each is made once, and its description in torch is its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoparallel.planner.expand.axes import EXPERT_SHARD, EXPERTS, SECONDARY
from autoparallel.planner.strategy.islands import is_local
from autoparallel.planner.strategy.types import AXES, Strategy
from autoparallel.runtime.ranks.levels import divided, pairs_of
from autoparallel.runtime.ranks.places import (
    EXPERT_AXES,
    expert_ranks,
    groups_along,
    joined_name,
    rows_along,
    secondary_groups,
    sharding_axes,
    summed_axes,
)

_PURPOSES = {
    "pp": "activations, on to the next stage",
    "dp_replicate": "means of gradients over replicas",
    "dp_shard": "parameters and gradients of one replica, in shares",
    "cp": "parts of the sequence: keys and values",
    "tp": "parts of each layer: sums and gathers of activations",
    EXPERTS: "tokens, to the ranks that hold their experts",
    EXPERT_SHARD: "parameters and gradients of the same experts, in shares",
}

_LOCAL = "what replicas have come by, once in outer.every steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Groups of one kind: every rank of the run is in one of them."""

    name: str
    purpose: str
    ranks: tuple[tuple[int, ...], ...]


def process_groups(strategy: Strategy, level_sizes: Sequence[int] = ()) -> tuple[Groups, ...]:
    """Every kind of group that the runtime makes for a strategy, but for those of tensors that stages share. `level_sizes` are
    devices below one port of each network level. Raises UserError where gradients cannot be reduced level by level."""
    return tuple(_groups(strategy, level_sizes))


def _groups(strategy: Strategy, level_sizes: Sequence[int]) -> Iterator[Groups]:
    mesh, zero = strategy.mesh, strategy.shard.zero
    for axis in AXES:
        if getattr(mesh, axis) > 1:
            local = axis == "dp_replicate" and is_local(strategy)
            yield _made(axis, _LOCAL if local else _PURPOSES[axis], groups_along(mesh, axis))
    if mesh.pp > 1:
        yield _made("pp_back", "gradients, back to the stage before", groups_along(mesh, "pp"))
    for axes, purpose in (
        (sharding_axes(mesh, zero), "parameters and gradients of one replica, in shares"),
        (summed_axes(strategy), "means of gradients"),
    ):
        if len(axes) > 1:
            yield _made(joined_name(axes), purpose, groups_along(mesh, *axes))
        if parts := divided(axes, strategy, level_sizes):
            inside = [part for group in parts for part in group]
            yield _made(f"{joined_name(axes)}_inside", "gradients, below one port of the network", inside)
            yield _made(f"{joined_name(axes)}_across", "gradients, between the ports", pairs_of(parts))
    if ranks := strategy.shard.secondary:
        inside, across = secondary_groups(mesh, ranks)
        yield _made(SECONDARY, "a second copy of the parameters, in shares, for backward passes", inside)
        yield _made(f"{SECONDARY}_copies", "the same share of other copies: no messages", across)
    for axis in (EXPERTS, EXPERT_SHARD) if mesh.ep > 1 else ():
        rows = rows_along(expert_ranks(mesh), [EXPERT_AXES.index(axis)])
        if len(rows[0]) > 1:
            yield _made(axis, _PURPOSES[axis], rows)


def _made(name: str, purpose: str, ranks: Sequence[Sequence[int]]) -> Groups:
    return Groups(name=name, purpose=purpose, ranks=tuple(tuple(sorted(group)) for group in ranks))
