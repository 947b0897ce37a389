"""Islands: the parts of a cluster on which replicas train by themselves under `[outer]`, each with a strategy of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoparallel.planner.strategy.types import Outer, Strategy
from autoparallel.profiles.hardware import Cluster
from autoparallel.profiles.parts import of_nodes

AXIS = "dp_replicate"  # along which islands stand


def is_local(strategy: Strategy) -> bool:
    """Whether replicas do not sum their gradients."""
    return strategy.outer.algorithm != "none"


def island_cluster(cluster: Cluster, islands: int) -> Cluster | None:
    """One of so many equal parts of a cluster: whole nodes, or a part of one; None where it has no such parts."""
    if len(cluster.groups) > 1 or cluster.network is not None or any(group.short for group in cluster.groups):
        return None
    devices, each = divmod(cluster.devices, islands)[0], cluster.groups[0].devices_per_node
    if cluster.devices % islands or (devices % each and each % devices):
        return None
    return of_nodes(cluster, range(max(devices // each, 1)), min(devices, each))


def island(cluster: Cluster, strategy: Strategy) -> tuple[Cluster, Strategy]:
    """The part of the cluster that one replica trains on, and what it does there."""
    mesh, batch = strategy.mesh, strategy.batch
    per_node = cluster.groups[0].devices_per_node
    devices = mesh.devices // mesh.dp_replicate
    own = of_nodes(cluster, range(max(-(-devices // per_node), 1)), min(devices, per_node))
    alone = replace(
        strategy,
        mesh=replace(mesh, dp_replicate=1),
        outer=Outer(),
        batch=replace(batch, global_=batch.global_ // mesh.dp_replicate),
    )
    return own, alone


def outer_problems(cluster: Cluster, strategy: Strategy) -> Iterator[str]:
    """Every reason why replicas cannot train by themselves as `[outer]` says."""
    outer, mesh = strategy.outer, strategy.mesh
    if not is_local(strategy):
        return
    where = f'outer.algorithm = "{outer.algorithm}"'
    if mesh.dp_replicate < 2:
        yield f"{where} needs replicas: mesh.dp_replicate = {mesh.dp_replicate}; raise it, or write none"
    if mesh.order[0] != AXIS:
        yield f"{where} needs replicas on the slowest network: write mesh.order with {AXIS} first, not {list(mesh.order)}"
    if outer.fragments > outer.every:
        yield (
            f"outer.fragments = {outer.fragments} with outer.every = {outer.every}: each fragment has a step of its own; write at "
            f"most {outer.every}"
        )
    if len(cluster.groups) > 1 or cluster.network is not None or mesh.placement:
        yield f"{where} needs a regular cluster of one kind of device; write none"
        return
    per_node = cluster.groups[0].devices_per_node
    devices = mesh.devices // max(mesh.dp_replicate, 1)
    if devices % per_node and per_node % devices:
        yield (
            f"{where}: a replica has {devices} devices, neither whole nodes of {per_node} nor an equal part of one; change "
            "mesh.dp_replicate"
        )
    if any(rule.tier not in (None, "device") for rule in strategy.embedding):
        yield f'{where}: tables in tiers are updated in every step; set tier = "device", or write none'
