"""How gradients are reduced over which ranks, from the strategy: at once, or level by level of the network.

`grad_sync.algorithm = "hierarchical"` reduces inside the nodes first, over replicas (all-reduce) as over the ranks that
shard (reduce-scatter). So does compression that differs between the levels that a group crosses, because that is what it
is priced as. "parameter-server" does, too, with shares of the gradients served by the ranks themselves. "ring" and "tree" are ours, of messages between neighbours, where the backend leaves the choice to nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import nn

from autoparallel.costmodel.compression import parse_method
from autoparallel.planner.strategy.islands import AXIS, is_local
from autoparallel.planner.strategy.types import Strategy
from autoparallel.runtime.gradients.exchanges import Exchange
from autoparallel.runtime.gradients.outer import LocalUpdates
from autoparallel.runtime.gradients.point_to_point import TreeReducer
from autoparallel.runtime.gradients.reductions import Reducer, ScatterReducer, make_reducer
from autoparallel.runtime.gradients.sharded import ShardWire
from autoparallel.runtime.ranks.levels import divided, method_between, pairs_of, two_levels
from autoparallel.runtime.ranks.mesh import RankMesh, subgroup
from autoparallel.runtime.ranks.places import joined_name, sharding_axes, summed_axes

Levels = tuple[dist.ProcessGroup, dist.ProcessGroup]


def with_levels(mesh: RankMesh, strategy: Strategy) -> RankMesh:
    """`mesh` with the groups in which gradients are reduced level by level, if they are; collective."""
    replicas = summed_axes(strategy)
    shards = sharding_axes(strategy.mesh, strategy.shard.zero)
    return replace(
        mesh, levels=_level_groups(replicas, strategy, mesh.level_sizes),
        shard_levels=_level_groups(shards, strategy, mesh.level_sizes),
    )  # fmt: skip


def _level_groups(axes: Sequence[str], strategy: Strategy, level_sizes: Sequence[int]) -> Levels | None:
    """The groups of this rank inside and across, along `axes`; None where it is reduced at once. Collective."""
    found = divided(axes, strategy, level_sizes)
    if not found:
        return None
    inside = subgroup([part for parts in found for part in parts], f"{joined_name(axes)}_inside")
    # Ranks are in one order in every part, so that equal positions meet.
    across = subgroup(pairs_of(found), f"{joined_name(axes)}_across")
    assert inside is not None
    assert across is not None
    return inside, across


def local_updates(
    strategy: Strategy, mesh: RankMesh, parameters: Iterable[nn.Parameter]
) -> LocalUpdates | None:
    """The exchanges of replicas that train by themselves; None where their gradients are summed."""
    if not is_local(strategy):
        return None
    return LocalUpdates(list(parameters), mesh.group(AXIS), strategy.outer, mesh.coordinate(AXIS))


def shard_wire(strategy: Strategy, mesh: RankMesh) -> ShardWire:
    """How gradients travel over the ranks that shard: level by level where the mesh has groups for it, else by the
    method of the outermost level that they cross."""
    axes = sharding_axes(mesh.sizes, strategy.shard.zero)
    if not axes:
        return ShardWire()
    group = mesh.group(*axes)
    method = _method(group, strategy, mesh)
    if mesh.shard_levels is None:
        return ShardWire(method=method, ring=strategy.grad_sync.algorithm == "ring")
    ranks = dist.get_process_group_ranks(group)
    levels = two_levels(ranks, mesh.level_sizes)
    assert levels is not None
    order = tuple(ranks.index(rank) for position in zip(*levels[0], strict=True) for rank in position)
    inside, across = (Exchange(g, _method(g, strategy, mesh)) for g in mesh.shard_levels)
    return ShardWire(method=method, inside=inside, across=across, order=order)


def _method(group: dist.ProcessGroup, strategy: Strategy, mesh: RankMesh) -> str:
    ranks = dist.get_process_group_ranks(group)
    return method_between(ranks, strategy.grad_sync.compression, mesh.level_sizes)


def group_reducer(group: dist.ProcessGroup, strategy: Strategy, mesh: RankMesh) -> Reducer:
    """What takes the mean over the ranks of `group` at once."""
    if strategy.grad_sync.algorithm == "ring":
        return ScatterReducer(Exchange(group, ring=True))
    if strategy.grad_sync.algorithm == "parameter-server":
        return _served(group, strategy, mesh)
    if strategy.grad_sync.algorithm == "tree":
        ranks = dist.get_process_group_ranks(group)
        levels = two_levels(ranks, mesh.level_sizes)
        units = levels[0] if levels is not None else [[rank] for rank in ranks]
        return TreeReducer(group, [[ranks.index(rank) for rank in unit] for unit in units])
    return make_reducer(group, _method(group, strategy, mesh))


def _served(group: dist.ProcessGroup, strategy: Strategy, mesh: RankMesh) -> Reducer:
    """Every rank serves an equal share: gradients are pushed to it, and the mean is pulled. (PowerSGD has no shares.)"""
    method = _method(group, strategy, mesh)
    if parse_method(method).name == "powersgd":
        return make_reducer(group, method)
    return ScatterReducer(Exchange(group, method, served=True))


def replica_reducer(strategy: Strategy, mesh: RankMesh) -> Reducer | None:
    """What takes the mean over the replicas; None where there are none."""
    axes = summed_axes(strategy)
    if not axes:
        return None
    if mesh.levels is None:
        return group_reducer(mesh.group(*axes), strategy, mesh)
    inside, across = mesh.levels
    outer: Reducer = make_reducer(across, _method(across, strategy, mesh))
    if strategy.grad_sync.algorithm == "parameter-server":
        outer = _served(across, strategy, mesh)
    return ScatterReducer(Exchange(inside, _method(inside, strategy, mesh)), outer, across.size())
