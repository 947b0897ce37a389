"""Parts of a cluster, each a cluster of its own: one group, some nodes, some devices of each; and larger ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from autoparallel.profiles.hardware import Cluster, Group, Level, Network


def bounded(levels: Sequence[Level], count: int) -> tuple[Level, ...]:
    """Levels up to the first that holds all `count` devices, which then holds just these."""
    kept: list[Level] = []
    for level in levels:
        if kept and (kept[-1].size >= count or level.size <= kept[-1].size):
            continue
        kept.append(level)
    return (*kept[:-1], replace(kept[-1], size=count))


def evenly_filled(levels: Sequence[Level], count: int) -> tuple[Level, ...]:
    """The same levels where a job of `count` devices takes as many of the devices in each domain of a level, of the
    fewest domains that hold it: 256 devices take 64 of each of four domains of 72. A domain that does not come out
    even, or not in whole domains of the level inside, stays as it is.

    Kind: formula. Source: Slurm's block topology (`sbatch --segment`), as jobs on NVL72 racks are placed.
    """
    filled: list[Level] = []
    for level in levels:
        domains = -(-count // level.size)
        even, rest = divmod(count, domains)
        whole = not rest and even % (filled[-1].size if filled else 1) == 0
        filled.append(replace(level, size=even) if domains > 1 and whole else level)
    return tuple(filled)


def at_nodes(levels: Sequence[Level], box: int, per_node: int) -> tuple[Level, ...]:
    """The levels of a device's usual `box` for nodes that hold `per_node` devices: what ends at the box or inside it ends
    at a smaller node too, and a level of whole boxes joins as many nodes."""
    return tuple(
        replace(level, size=min(level.size, per_node) if level.size <= box else level.size // box * per_node)
        for level in levels
    )


def devices_of_nodes(cluster: Cluster) -> tuple[int, ...]:
    """Devices of every node, numbered through the groups."""
    return tuple(devices for group in cluster.groups for devices in group.devices_of_nodes)


def placed(cluster: Cluster, placement: Sequence[int]) -> Cluster:
    """The cluster with its blocks of devices on other nodes of its irregular network."""
    network = cluster.network
    assert network is not None
    have = dict(zip(network.placement, network.devices, strict=True))
    moved = replace(network, placement=tuple(placement), devices=tuple(have[node] for node in placement))
    return replace(cluster, network=moved)


def group_of_nodes(cluster: Cluster) -> tuple[int, ...]:
    """The group of every node, numbered through the groups."""
    return tuple(index for index, group in enumerate(cluster.groups) for _ in range(group.nodes))


def only_group(cluster: Cluster, index: int) -> Cluster:
    """One device group of a cluster, joined by its own levels, or by those of the cluster that it needs."""
    group, network = cluster.groups[index], cluster.network
    levels = bounded(group.levels or cluster.levels, group.devices)
    if network is not None:
        homes = group_of_nodes(cluster)
        kept = [i for i, node in enumerate(network.placement) if homes[node] == index]
        levels = (*levels[:-1], replace(cluster.levels[-1], size=group.devices))
        network = replace(
            network,
            placement=tuple(network.placement[i] for i in kept),
            devices=tuple(network.devices[i] for i in kept),
        )
    return replace(cluster, groups=(group,), levels=levels, network=network)


def of_nodes(cluster: Cluster, nodes: Sequence[int], per_node: int = 0) -> Cluster:
    """The cluster of some nodes, in this order, with at most `per_node` devices of each (0: all that they have).

    All but the last must give equally many; each run of as many is a group. A level whose units are then no longer alike is left out: its devices
    talk over the next. Several kinds of device keep all their nodes.
    """
    have, homes = devices_of_nodes(cluster), group_of_nodes(cluster)
    if len({group.device.name for group in cluster.groups}) > 1:
        return _replaced(cluster, nodes, [have[node] for node in nodes])
    most = per_node or max(have[node] for node in nodes)
    gives = [min(most, have[node]) for node in nodes]
    groups: list[Group] = []
    for (index, given), run in groupby(
        zip(nodes, gives, strict=True), key=lambda one: (homes[one[0]], one[1])
    ):
        alike = replace(cluster.groups[index], devices_per_node=given, short=(), levels=())
        groups.append(replace(alike, nodes=len(list(run))))
    usual = max(group.devices_per_node for group in cluster.groups)
    levels = _levels(cluster.levels, nodes, usual, most, sum(gives))
    return _replaced(replace(cluster, groups=tuple(groups), levels=levels), nodes, gives)


def _replaced(cluster: Cluster, nodes: Sequence[int], gives: Sequence[int]) -> Cluster:
    if cluster.network is None:
        return cluster
    network: Network = replace(cluster.network, placement=tuple(nodes), devices=tuple(gives))
    return replace(cluster, network=network)


def _levels(
    levels: Sequence[Level], nodes: Sequence[int], usual: int, most: int, count: int
) -> tuple[Level, ...]:
    """The levels for nodes of `most` devices instead of `usual`."""
    kept: list[Level] = []
    for level in levels[:-1]:
        if level.size < usual:
            size = level.size if most % level.size == 0 else 0
        else:
            size = _nodes_of_unit(nodes, level.size // usual) * most
        if size > (kept[-1].size if kept else 0):
            kept.append(replace(level, size=size))
    return bounded((*kept, replace(levels[-1], size=max(count, 1))), count)


def _nodes_of_unit(nodes: Sequence[int], unit: int) -> int:
    """How many of the nodes stand in each unit of `unit` nodes; 0 where not all but the last have as many."""
    runs = [len(list(run)) for _, run in groupby(node // unit for node in nodes)]
    if len(runs) != len({node // unit for node in nodes}):
        return 0
    return runs[0] if all(n == runs[0] for n in runs[:-1]) and runs[-1] <= runs[0] else 0


def grown(cluster: Cluster, nodes: int, per_node: int) -> Cluster:
    """A cluster of one node as `nodes` nodes of `per_node` of its devices: its own levels, then those of the
    device's usual network."""
    (group,) = cluster.groups
    count = nodes * per_node
    inside = tuple(
        replace(level, size=per_node) if level is cluster.levels[-1] else level for level in cluster.levels
    )
    usual = [
        replace(level, size=max(level.size // group.device.devices_per_node, 1) * per_node)
        for level in group.device.levels
        if level.size > group.device.devices_per_node
    ]
    bigger = replace(group, nodes=nodes, devices_per_node=per_node)
    return replace(cluster, groups=(bigger,), levels=bounded((*inside, *usual), count))
