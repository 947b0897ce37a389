"""The devices that a strategy really uses: some nodes of the cluster, in the order that it names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoparallel.costmodel.kernels import computes, nearest_dtype
from autoparallel.planner.strategy.runs import runs
from autoparallel.planner.strategy.types import Mesh, Strategy
from autoparallel.profiles.hardware import Cluster
from autoparallel.profiles.parts import devices_of_nodes, group_of_nodes, of_nodes, only_group


def machines(cluster: Cluster, strategy: Strategy) -> tuple[Cluster, Strategy]:
    """The part of the cluster that a strategy runs on, as a cluster of its own, and the strategy as one for that.

    Regular clusters of one kind of device are what they are. Of groups that a strategy names, one alone is a
    cluster; nodes short of a device are left out where as many ranks as there are fit on nodes that are alike.
    """
    mesh = strategy.mesh
    nodes, per_node = mesh.placement, mesh.per_node
    if not nodes and not per_node and any(group.short for group in cluster.groups):
        nodes, per_node = alike_nodes(cluster, mesh.devices)
    if nodes or per_node:
        cluster = of_nodes(cluster, nodes or range(cluster.nodes), per_node)
    elif cluster.network is not None and len(set(mesh.groups)) > 1:
        cluster = of_nodes(cluster, nodes_by_group(cluster, mesh.groups))
    groups = mesh.groups
    if len(cluster.groups) > 1 and len(set(groups)) == 1:
        cluster, groups = only_group(cluster, groups[0]), ()
    if (nodes, per_node, groups) != (mesh.placement, mesh.per_node, mesh.groups) or nodes or per_node:
        strategy = replace(strategy, mesh=replace(mesh, placement=(), per_node=0, groups=groups))
    return cluster, strategy


def alike_nodes(cluster: Cluster, devices: int) -> tuple[tuple[int, ...], int]:
    """Nodes, and devices of each, that hold so many devices: as many of each as can be; then all nodes, those that
    lack most last."""
    for nodes, per_node in regular_parts(cluster):
        if len(nodes) * per_node >= devices:
            return nodes, per_node
    have = devices_of_nodes(cluster)
    return tuple(sorted((n for n in range(len(have)) if have[n]), key=lambda node: -have[node])), 0


def regular_parts(cluster: Cluster) -> Iterator[tuple[tuple[int, ...], int]]:
    """All nodes that have at least so many devices, and that many of each: largest nodes first."""
    have = devices_of_nodes(cluster)
    for per_node in sorted({n for n in have if n}, reverse=True):
        yield tuple(node for node, n in enumerate(have) if n >= per_node), per_node


def nodes_by_group(cluster: Cluster, groups: Sequence[int]) -> tuple[int, ...]:
    """The nodes of the named groups, in the order in which pipeline ranks take them."""
    homes = group_of_nodes(cluster)
    return tuple(n for g in dict.fromkeys(groups) for n, home in enumerate(homes) if home == g)


def nodes_in_use(mesh: Mesh) -> tuple[int, ...]:
    """The nodes of `mesh.placement` that the mesh reaches, in rank order: hosts start in this order."""
    each = mesh.per_node or -(-mesh.devices // max(len(mesh.placement), 1))
    return mesh.placement[: -(-mesh.devices // each)]


def unknown_nodes(cluster: Cluster, nodes: Sequence[int], per_node: int) -> str:
    """What is wrong with `mesh.placement` or `mesh.per_node` whatever the mesh; "" for nothing."""
    have = devices_of_nodes(cluster)
    if len(set(nodes)) < len(nodes) or any(not 0 <= node < len(have) for node in nodes):
        return f"mesh.placement = {runs(nodes)}: name nodes from 0 to {len(have) - 1} of {cluster.name}, each at most once"
    if per_node > max(have):
        return f"mesh.per_node = {per_node}: the nodes of {cluster.name} have at most {max(have)} devices"
    return ""


def placement_problems(cluster: Cluster, strategy: Strategy) -> Iterator[str]:
    """What is wrong with `mesh.placement` and `mesh.per_node`; nothing where they are left out."""
    mesh, have = strategy.mesh, devices_of_nodes(cluster)
    nodes, per_node = mesh.placement, mesh.per_node
    shown = f"mesh.placement = {runs(nodes)}"
    if unknown := unknown_nodes(cluster, nodes, per_node):
        yield unknown
        return
    if not nodes and not per_node:
        return
    if len({group.device.name for group in cluster.groups}) > 1:
        yield from _of_groups(cluster, strategy)
        return
    gives = [min(have[node], per_node or max(have)) for node in nodes or range(len(have))]
    if any(one != max(gives) for one in gives[:-1]):
        yield (
            f"{shown}, mesh.per_node = {per_node}: these nodes give {runs(gives)} devices; all but the last must give as "
            f"many: leave nodes out, or set mesh.per_node = {min(gives)}"
        )
    elif sum(gives) < mesh.devices:
        yield (
            f"{shown}, mesh.per_node = {per_node}: {sum(gives)} devices for a mesh of {mesh.devices}; name more nodes "
            "or lower an axis"
        )


def _of_groups(cluster: Cluster, strategy: Strategy) -> Iterator[str]:
    """Among several kinds of device: all nodes of the named groups, group by group."""
    mesh, homes = strategy.mesh, group_of_nodes(cluster)
    wanted = nodes_by_group(cluster, mesh.groups or range(len(cluster.groups)))
    if mesh.per_node or sorted(mesh.placement) != sorted(wanted):
        yield (
            f"mesh.placement = {runs(mesh.placement)}: among several kinds of device name every node of the groups in "
            f"use, {runs(sorted(wanted))}, and leave mesh.per_node out"
        )
    elif mesh.groups and [homes[n] for n in mesh.placement] != [homes[n] for n in wanted]:
        yield (
            f"mesh.placement = {runs(mesh.placement)}: mesh.groups = {runs(mesh.groups)} takes nodes in the order "
            f"{runs(wanted)}; nodes may change places inside their group"
        )


def idle_words(cluster: Cluster, strategy: Strategy) -> str:
    """Which devices do nothing, and why, where nodes are short of a device or a group is left out; else ""."""
    return "; ".join(filter(None, (_short_nodes(cluster, strategy), _left_out(cluster, strategy))))


def _left_out(cluster: Cluster, strategy: Strategy) -> str:
    """Device groups of a mixed cluster that the strategy does not name."""
    named, dtype = set(strategy.mesh.groups), strategy.execution.dtype
    if not named or len(named) == len(cluster.groups):
        return ""
    rest = [(i, group) for i, group in enumerate(cluster.groups) if i not in named]
    out = ", ".join(f"group {i} ({g.devices} {g.device.name})" for i, g in rest)
    found = [f"{sum(g.devices for _, g in rest)} of {cluster.devices} devices idle: {out} left out"]
    for device in {g.device.name: g.device for _, g in rest if not computes(g.device, dtype)}.values():
        other = nearest_dtype(device, dtype)
        shared = all(computes(group.device, other) for group in cluster.groups)
        remedy = f", but every device in {other}: try --set execution.dtype={other}" if shared else ""
        found.append(f"{device.name} does not compute in {dtype}{remedy}")
    return "; ".join(found)


def _short_nodes(cluster: Cluster, strategy: Strategy) -> str:
    mesh, have = strategy.mesh, devices_of_nodes(cluster)
    full = max(have)
    short = [node for node, devices in enumerate(have) if devices < full]
    idle = sum(have) - mesh.devices
    if not short or not idle:
        return ""
    nodes, per_node = mesh.placement, mesh.per_node
    if not nodes:
        nodes, per_node = alike_nodes(cluster, mesh.devices)
    found = [
        f"{idle} of {sum(have)} devices idle",
        ", ".join(f"node {node} has {have[node]} of {full}" for node in short),
    ]
    if out := [node for node in short if node not in nodes]:
        found.append(f"node {', '.join(map(str, out))} left out, so that all nodes are alike")
    elif per_node and per_node < full:
        found.append(f"{per_node} of every node in use, so that all are alike")
    if mesh.devices < sum(min(have[node], per_node or full) for node in nodes):
        found.append(f"batch and model divide among {mesh.devices} devices")
    return "; ".join(found)
