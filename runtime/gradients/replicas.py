"""How the gradients of replicas are reduced: at once, or level by level of the network.

`grad_sync.algorithm = "hierarchical"` reduces over dp_replicate inside the nodes first. So does compression
that differs between the levels that a group crosses, because that is what it is priced as. Which algorithm
runs inside one collective ("ring", "tree") is the choice of NCCL and Gloo: a strategy that fixes it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from autoparallel.errors import UserError
from autoparallel.planner.strategy.types import Strategy
from autoparallel.runtime.gradients.compression import method_between
from autoparallel.runtime.gradients.reductions import Reducer, ScatterReducer, make_reducer, two_levels
from autoparallel.runtime.ranks.mesh import RankMesh, groups_along, replica_axes, sharding_axes

_RUN = ("auto", "hierarchical")


def check_algorithm(strategy: Strategy, level_sizes: Sequence[int]) -> None:
    """Refuse a `grad_sync.algorithm` that the runtime does not run as it says."""
    algorithm, sizes = strategy.grad_sync.algorithm, strategy.mesh
    if sizes.data_parallel * sizes.cp == 1 or algorithm == "auto":
        return
    where = f'grad_sync.algorithm = "{algorithm}"'
    if algorithm not in _RUN:
        raise UserError(
            f"{where}: which algorithm a collective uses is the choice of the communication library, and there "
            f"are no parameter servers; write one of {', '.join(_RUN)}"
        )
    if not level_sizes:
        raise UserError(f"{where} needs to know the network's levels: pass cluster= to auto_parallelize")
    sharded = sharding_axes(sizes, strategy.shard.zero)
    if sharded and any(two_levels(group, level_sizes) for group in groups_along(sizes, *sharded)):
        raise UserError(
            f"{where}: the runtime reduces sharded gradients at once; keep dp_shard inside a node and use "
            "dp_replicate across nodes (mesh.order), or write auto"
        )
    _divided(strategy, level_sizes)


def with_levels(mesh: RankMesh, strategy: Strategy) -> RankMesh:
    """`mesh` with the groups in which gradients are reduced level by level, if they are; collective."""
    divided = _divided(strategy, mesh.level_sizes)
    if not divided:
        return mesh
    inside, _ = dist.new_subgroups_by_enumeration([part for parts in divided for part in parts])
    # Ranks are in one order in every part, so that equal positions meet.
    pairs = [list(position) for parts in divided for position in zip(*parts, strict=True)]
    across, _ = dist.new_subgroups_by_enumeration(pairs)
    assert isinstance(inside, dist.ProcessGroup)
    assert isinstance(across, dist.ProcessGroup)
    return replace(mesh, levels=(inside, across))


def _divided(strategy: Strategy, level_sizes: Sequence[int]) -> list[list[list[int]]]:
    """Each group of replicas, divided into the parts inside; empty where it is reduced at once."""
    compression = strategy.grad_sync.compression
    replicas = replica_axes(strategy.mesh, strategy.shard.zero)
    groups = groups_along(strategy.mesh, *replicas) if replicas else []
    found = [two_levels(ranks, level_sizes) for ranks in groups]
    if all(levels is None for levels in found):
        return []
    parts = [levels[0] for levels in found if levels is not None]
    differs = any(
        method_between(own[0], compression, level_sizes) != method_between(ranks, compression, level_sizes)
        for own, ranks in zip(parts, groups, strict=False)
    )
    if strategy.grad_sync.algorithm != "hierarchical" and not differs:
        return []
    if len({levels and (levels[1], len(levels[0])) for levels in found}) > 1:
        raise UserError(
            "grad_sync: the replicas do not stand alike below the ports of the network, so their gradients "
            'cannot be reduced level by level: change mesh.order, or use one compression and algorithm = "auto"'
        )
    return parts


def method_along(axes: Sequence[str], strategy: Strategy, mesh: RankMesh) -> str:
    """How gradients travel along `axes` at once: by the method of the outermost level that they cross."""
    return _method(mesh.group(*axes), strategy, mesh) if axes else "none"


def _method(group: dist.ProcessGroup, strategy: Strategy, mesh: RankMesh) -> str:
    ranks = dist.get_process_group_ranks(group)
    return method_between(ranks, strategy.grad_sync.compression, mesh.level_sizes)


def group_reducer(group: dist.ProcessGroup, strategy: Strategy, mesh: RankMesh) -> Reducer:
    """What takes the mean over the ranks of `group` at once."""
    return make_reducer(group, _method(group, strategy, mesh))


def replica_reducer(strategy: Strategy, mesh: RankMesh) -> Reducer | None:
    """What takes the mean over the replicas; None where there are none."""
    axes = replica_axes(mesh.sizes, strategy.shard.zero)
    if not axes:
        return None
    if mesh.levels is None:
        return group_reducer(mesh.group(*axes), strategy, mesh)
    inside, across = mesh.levels
    outer = make_reducer(across, _method(across, strategy, mesh))
    return ScatterReducer(inside, _method(inside, strategy, mesh), outer)
