"""Whether `[recovery]` can be what the file says."""

from __future__ import annotations

from collections.abc import Iterator

from autoparallel.planner.strategy.types import RecoveryRule, Strategy
from autoparallel.profiles.hardware import Cluster


def nodes_of(cluster: Cluster, devices: int) -> int:
    """Nodes that so many devices fill, at least one."""
    return max(-(-devices // per_node(cluster)), 1)


def per_node(cluster: Cluster) -> int:
    """Devices of the largest node."""
    return max(group.devices_per_node for group in cluster.groups)


def recovery_problems(cluster: Cluster, strategy: Strategy) -> Iterator[str]:
    """Every reason why the strategy cannot recover as it says."""
    rule, mesh = strategy.recovery, strategy.mesh
    if rule == RecoveryRule():
        return
    nodes = nodes_of(cluster, mesh.devices)
    if rule.policy == "drop-replica" and mesh.dp_replicate < 2:
        yield (
            f'recovery.policy = "drop-replica" needs another replica: mesh.dp_replicate = {mesh.dp_replicate}; raise it, or '
            "choose another policy"
        )
    if rule.peers and nodes < 2:
        yield f"recovery.peers = {rule.peers}: the strategy runs on one node, which has no neighbour; set it to 0"
    if rule.policy == "peers" and not rule.peers:
        yield 'recovery.policy = "peers" needs recovery.peers = 1'
    if rule.policy == "spares" and not rule.spares:
        yield 'recovery.policy = "spares" needs recovery.spares of at least 1'
    if nodes + rule.spares > max(cluster.nodes, nodes):
        yield (
            f"recovery.spares = {rule.spares}: the strategy runs on {nodes} of the {cluster.nodes} nodes of {cluster.name}; "
            f"lower it to {max(cluster.nodes - nodes, 0)}, or the mesh"
        )
