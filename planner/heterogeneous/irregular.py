"""Parts of clusters that are not one regular whole, each a search of its own.

    several kinds of device    planner/search/space/mixed.py
    nodes short of a device    all nodes with at least so many devices, and that many of each, for every number that
                               occurs; and all devices, where only one node is short
    an irregular network       the placements that any mesh could want (planner/search/space/placements.py)

Each search begins with the best value of those before it, so that what cannot win costs little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoparallel.planner.heterogeneous.cuts import cut_reaches
from autoparallel.planner.heterogeneous.mixed import Part, is_mixed, parts
from autoparallel.planner.heterogeneous.placements import choices, reaches, sequences
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.space.meshes import build_meshes
from autoparallel.planner.strategy.machines import nodes_by_group, regular_parts
from autoparallel.profiles.hardware import Cluster
from autoparallel.profiles.parts import devices_of_nodes, of_nodes, placed

PLACED = ("mesh.placement", "mesh.per_node")


def has_parts(problem: Problem) -> bool:
    """Whether a plan of the problem is the best of several searches."""
    cluster = problem.cluster
    chosen = any(problem.constraints.get(key) for key in PLACED)
    short = any(group.short for group in cluster.groups)
    return is_mixed(problem) or short or chosen or cluster.network is not None


def every_part(problem: Problem) -> tuple[Part, ...]:
    """Every part to search, those that are searched fastest first."""
    free = {k: v for k, v in problem.constraints.items() if k not in PLACED}
    nodes = tuple(problem.fixed.mesh.placement or ())
    per_node = problem.fixed.mesh.per_node or 0
    whole = replace(problem, constraints=free)
    if nodes or per_node:
        cluster = of_nodes(problem.cluster, nodes or range(problem.cluster.nodes), per_node)
        part = Part(name="as placed", problem=replace(whole, cluster=cluster), nodes=nodes, per_node=per_node)
        return (_with_reach(part),)
    if is_mixed(whole):
        return tuple(one for part in parts(whole) for one in _on_network(part))
    return tuple(one for part in _without_short(whole) for one in _on_network(part))


def _without_short(problem: Problem) -> Iterator[Part]:
    """The largest regular parts of a cluster with nodes that are short of a device."""
    cluster = problem.cluster
    if not any(group.short for group in cluster.groups):
        yield Part(name="", problem=problem)
        return
    have = devices_of_nodes(cluster)
    for nodes, per_node in regular_parts(cluster):
        yield _of_nodes(problem, f"{per_node} devices of each of {len(nodes)} nodes", nodes, per_node)
    if sum(n < max(have) for n in have) == 1 and min(have):
        last = tuple(sorted(range(len(have)), key=lambda node: -have[node]))
        yield _of_nodes(problem, f"all {cluster.devices} devices, the short node last", last, max(have))


def _of_nodes(problem: Problem, name: str, nodes: tuple[int, ...], per_node: int) -> Part:
    small = replace(problem, cluster=of_nodes(problem.cluster, nodes, per_node))
    return Part(name=name, problem=small, nodes=nodes, per_node=per_node)


def _on_network(part: Part) -> Iterator[Part]:
    """The part with each placement that some mesh could want; where there are too many, the part without any, for
    a bound (`planner/search/plan_parts.py` then places what that finds)."""
    if part.problem.cluster.network is None:
        yield part
        return
    groups = part.problem.fixed.groups
    if groups and len(part.problem.cluster.groups) > 1:
        nodes = nodes_by_group(part.problem.cluster, groups)
        cluster = of_nodes(part.problem.cluster, nodes)
        part = replace(part, problem=replace(part.problem, cluster=cluster), nodes=nodes)
    homes = _homes(part.problem.cluster, groups)
    part = _with_reach(part, homes)
    cluster, network = part.problem.cluster, part.problem.cluster.network
    assert network is not None
    every = sequences(network, homes)
    if every is None:
        loose = replace(cluster, network=replace(network, unplaced=True))
        yield replace(part, problem=replace(part.problem, cluster=loose), loose=True)
        return
    ports = min(cluster.levels[-1].nics or max(network.devices), max(network.devices))
    for choice in choices(build_meshes(part.problem), network, every, ports):
        yield replace(on_nodes(part, choice.placement), worth=choice.worth)


def on_nodes(part: Part, placement: Sequence[int]) -> Part:
    """A part with its blocks of devices on these nodes."""
    cluster = placed(part.problem.cluster, placement)
    network = cluster.network
    assert network is not None
    cluster = replace(cluster, network=replace(network, unplaced=False))
    where = f"on nodes {', '.join(map(str, placement))}"
    alike = part.group is None and len({group.device.name for group in cluster.groups}) == 1
    per_node = max(network.devices) if alike else 0
    return replace(
        part, name=f"{part.name} {where}".strip(), nodes=tuple(placement), loose=False, per_node=per_node,
        problem=replace(part.problem, cluster=cluster),
    )  # fmt: skip


def _homes(cluster: Cluster, groups: Sequence[int] | None) -> tuple[int, ...]:
    """What of the network's blocks may change places: those of one device group, where pipeline ranks name them."""
    assert cluster.network is not None
    if not groups:
        return (0,) * len(cluster.network.placement)
    return tuple(index for index in dict.fromkeys(groups) for _ in range(cluster.groups[index].nodes))


def _with_reach(part: Part, homes: Sequence[int] = ()) -> Part:
    """The part with what the best placement of its network gives."""
    network = part.problem.cluster.network
    if network is None:
        return part
    every = sequences(network, homes)
    known = reaches(network, every) if every is not None else cut_reaches(network)
    cluster = replace(part.problem.cluster, network=replace(network, reach=known))
    return replace(part, problem=replace(part.problem, cluster=cluster))
