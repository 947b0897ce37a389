"""Irregular networks of cluster files: nodes and switches joined by links, each with its own figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autoparallel.errors import UserError
from autoparallel.profiles.figures import Figures
from autoparallel.profiles.hardware import Cluster, Fabric, Level, Link, Network, ValueKind
from autoparallel.profiles.parts import devices_of_nodes
from autoparallel.profiles.schema import ClusterFile, FigureTable, SwitchTable, nearest

# Nodes of an irregular network: more have a regular one, or a graph too large to place anything on exactly.
MOST_NODES = 64
LEVEL = "network"  # the level that stands for all of it


def with_network(cluster: Cluster, table: ClusterFile, figures: Figures) -> Cluster:
    """The cluster whose nodes are joined by the file's switches and links; its levels end at the node."""
    have, where = devices_of_nodes(cluster), figures.where
    if len(have) > MOST_NODES:
        raise UserError(
            f"{where}: {len(have)} nodes on [[switch]]es and [[link]]s, of at most {MOST_NODES}; describe equal "
            "parts of the network as [[level]]s"
        )
    fabric = _fabric(table, len(have), figures)
    per_node = max(have)
    inner = [level for level in cluster.levels if level.size <= per_node]
    if table.level and len(inner) < len(cluster.levels):
        raise UserError(
            f"{where}: level `{cluster.levels[len(inner)].name}` joins more devices than a node's {per_node}, which "
            "[[switch]]es and [[link]]s do; leave it out"
        )
    nics = figures.whole("nics", table.nics, above=False) if table.nics else 0
    outer = Level(
        name=LEVEL,
        size=max(cluster.devices, 1),
        bytes_per_s=max(node_bytes_per_s(fabric, node) for node in range(fabric.nodes)) / per_node,
        latency_s=min(link.latency_s for link in fabric.links),
        nics=nics,
    )
    inner = [level for level in inner if level.size < cluster.devices]
    network = Network(fabric=fabric, placement=tuple(range(fabric.nodes)), devices=have)
    return replace(cluster, levels=(*inner, outer), network=network)


def node_bytes_per_s(fabric: Fabric, node: int) -> float:
    """What all links of a node carry in one direction."""
    return sum(link.bytes_per_s for link in fabric.links if node in link.ends)


def network_tables(fabric: Fabric) -> dict[str, Any]:
    """The `[[switch]]` and `[[link]]` tables of a file with this fabric."""
    links = [
        {
            "between": [fabric.name(end) for end in link.ends],
            "bytes_per_s": link.bytes_per_s,
            "latency_s": link.latency_s,
        }
        for link in fabric.links
    ]
    switches = [{"name": name} for name in fabric.switches]
    return ({"switch": switches} if switches else {}) | {"link": links}


def _fabric(table: ClusterFile, nodes: int, figures: Figures) -> Fabric:
    where, names = figures.where, [switch.name for switch in table.switch]
    known = {f"node-{n}": n for n in range(nodes)}
    for number, name in enumerate(names):
        if name in known:
            raise UserError(
                f"{where}: `switch.{number}.name` = {name!r} is there already; each end needs a name of its own"
            )
        known[name] = nodes + number
    links: list[Link] = []
    for number, switch in enumerate(table.switch):
        links += _of_switch(switch, f"switch.{number}", nodes, known, figures, len(links))
    for number, one in enumerate(table.link):
        key = f"link.{number}"
        ends = [_end(name, f"{key}.between", known, where) for name in one.between]
        links.append(_link(ends, one.bytes_per_s, one.latency_s, key, figures))
        _remember(figures, key, len(links) - 1)
    _forget(figures)
    fabric = Fabric(nodes=nodes, switches=tuple(names), links=tuple(links))
    _check_joined(fabric, where)
    return fabric


def _of_switch(
    switch: SwitchTable, key: str, nodes: int, known: dict[str, int], figures: Figures, before: int
) -> list[Link]:
    """The links of a switch to its nodes, and its trunk."""
    where, here = figures.where, known[switch.name]
    if not switch.nodes and not switch.up:
        return []
    if switch.bytes_per_s is None or switch.latency_s is None:
        raise UserError(f"{where}: `{key}` has nodes or a trunk `up`, so it needs bytes_per_s and latency_s")
    links = []
    for node in switch.nodes:
        if not 0 <= node < nodes:
            raise UserError(f"{where}: `{key}.nodes`: {node}, but the cluster has the nodes 0 to {nodes - 1}")
        links.append(_link([node, here], switch.bytes_per_s, switch.latency_s, key, figures))
    if switch.up is not None:
        above = _end(switch.up, f"{key}.up", known, where)
        one = links[0] if links else _link([above, here], switch.bytes_per_s, switch.latency_s, key, figures)
        over = switch.oversubscription
        share = figures.take(f"{key}.oversubscription", over, above=False) if over else 1.0
        if share <= 0.0:
            raise UserError(f"{where}: `{key}.oversubscription` must be more than 0")
        trunk = one.bytes_per_s * max(len(links), 1) / share
        links.append(_joined([here, above], trunk, one.latency_s, key, figures))
    for number in range(len(links)):
        _remember(figures, key, before + number)
    return links


def _link(ends: Sequence[int], rate: FigureTable, latency: FigureTable, key: str, figures: Figures) -> Link:
    bytes_per_s = figures.rate(f"{key}.bytes_per_s", rate)
    latency_s = figures.take(f"{key}.latency_s", latency, above=False)
    return _joined(ends, bytes_per_s, latency_s, key, figures)


def _joined(ends: Sequence[int], bytes_per_s: float, latency_s: float, key: str, figures: Figures) -> Link:
    first, second = ends
    if first == second:
        raise UserError(f"{figures.where}: `{key}` joins an end to itself; name two")
    return Link(ends=(first, second), bytes_per_s=bytes_per_s, latency_s=latency_s)


def _remember(figures: Figures, key: str, number: int) -> None:
    """Figures of a link are known by its number among all links, those of switches first."""
    for name in ("bytes_per_s", "latency_s"):
        known, kept = figures.provenance[f"{key}.{name}"], f"network.{number}.{name}"
        figures.provenance[kept] = figures.listed.get(kept, known) if known.kind is ValueKind.USER else known


def _forget(figures: Figures) -> None:
    """Drop the keys by which the file's tables were checked, which number links in another way."""
    for key in [k for k in figures.provenance if k.startswith(("switch.", "link."))]:
        del figures.provenance[key]


def _end(name: str, key: str, known: dict[str, int], where: str) -> int:
    if name not in known:
        raise UserError(
            f"{where}: `{key}`: no node or switch is called {name!r}{nearest(name, known)}; nodes are node-0, "
            "node-1, …, counted through the groups"
        )
    return known[name]


def _check_joined(fabric: Fabric, where: str) -> None:
    """Every node reaches every other."""
    reached, waiting = {0}, [0]
    beside: dict[int, list[int]] = {}
    for link in fabric.links:
        for one, other in (link.ends, link.ends[::-1]):
            beside.setdefault(one, []).append(other)
    while waiting:
        for other in beside.get(waiting.pop(), []):
            if other not in reached:
                reached.add(other)
                waiting.append(other)
    lost = [fabric.name(end) for end in range(fabric.nodes) if end not in reached]
    if lost:
        raise UserError(
            f"{where}: nothing joins node-0 and {lost[0]}; add a [[link]], or the node to a [[switch]]"
        )
    if not fabric.links:
        raise UserError(f"{where}: one node needs no [[switch]]; leave it out")
