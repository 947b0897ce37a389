"""What groups of devices get of an irregular network: routes, the flows of a collective on them, the narrowest link.

Between two nodes traffic takes all paths of the fewest hops, in equal shares (equal-cost multipath, RFC 2992), so
that routes depend on what is joined and never on how fast it is: a faster link then never costs time. All groups
along an axis talk at once, as `costmodel.topology` has it on regular levels, and share the links that they cross:

    device rate = min over links of  capacity / flows that cross the link

Flows by pattern: `ring` from each rank to the next of its group and from the last to the first, where these stand
on different nodes (also for trees, whose edges are as many); `chain` the same without the way back (messages
between stages), `loop` with it (from the last stage of one turn to the first of the next); `all` between every two
ranks of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, pairwise, product

import numpy as np
from numpy.typing import NDArray

from autoparallel.costmodel.program import Axis, Collective, CollectiveOp
from autoparallel.profiles.hardware import Fabric, Network
from autoparallel.profiles.network import node_bytes_per_s

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RING, CHAIN, LOOP, ALL = "ring", "chain", "loop", "all"
MESSAGES = (CHAIN, LOOP)
MOST_PATHS = 64  # of equal length between two nodes: more are taken for so many. Kind: formula


@dataclass(frozen=True, slots=True)
class Routes:
    """The links of a fabric, each direction apart, and what every pair of nodes uses of them."""

    capacity: Floats  # by directed link, bytes per second
    share: Floats  # by node, node and directed link: the part of their traffic that crosses it
    latency_s: Floats  # by node and node, of the longest of their paths

    @property
    def nodes(self) -> int:
        return len(self.latency_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What one flow of a pattern gets, and how long its first byte takes."""

    bytes_per_s: float
    latency_s: float


def pattern_of(one: Collective) -> str:
    """Who talks to whom in a collective."""
    if one.op is CollectiveOp.SEND:
        return LOOP if one.wraps else CHAIN
    return ALL if one.op is CollectiveOp.ALL_TO_ALL else RING


def directed_links(fabric: Fabric) -> tuple[tuple[int, int], ...]:
    """Both directions of every joined pair of ends, in the order of `Routes.capacity`."""
    both = (ends for link in fabric.links for ends in (link.ends, link.ends[::-1]))
    return tuple(dict.fromkeys(both))


@lru_cache(maxsize=32)
def routes_of(fabric: Fabric) -> Routes:
    """The routes of a fabric. Pure: remembered because every price asks for them."""
    import networkx as nx  # 0.2 s that regular clusters need not wait for

    graph = nx.Graph()
    graph.add_nodes_from(range(fabric.nodes + len(fabric.switches)))
    rate: dict[tuple[int, int], float] = {}
    late: dict[tuple[int, int], float] = {}
    for link in fabric.links:  # several cables between two ends add up
        for one, other in (link.ends, link.ends[::-1]):
            graph.add_edge(one, other)
            rate[one, other] = rate.get((one, other), 0.0) + link.bytes_per_s
            late[one, other] = max(late.get((one, other), 0.0), link.latency_s)
    number = {edge: i for i, edge in enumerate(directed_links(fabric))}
    share = np.zeros((fabric.nodes, fabric.nodes, len(number)))
    latency = np.zeros((fabric.nodes, fabric.nodes))
    for a, b in product(range(fabric.nodes), repeat=2):
        if a == b:
            continue
        paths = list(islice(nx.all_shortest_paths(graph, a, b), MOST_PATHS))
        for path in paths:
            hops = list(pairwise(path))
            for hop in hops:
                share[a, b, number[hop]] += 1.0 / len(paths)
            latency[a, b] = max(latency[a, b], sum(late[hop] for hop in hops))
    return Routes(np.array([rate[edge] for edge in number]), share, latency)


def flows(members: Sequence[Axis], inside: int, pattern: str, blocks: Sequence[int]) -> Floats:
    """Flows between blocks of devices (the nodes in rank order), when every group along the axes talks.

    `inside` ranks of a group stand on one node and share its way out: a ring that leaves the node has so many.
    """
    nodes = _nodes_of_groups(members, blocks)
    found = np.zeros((len(blocks), len(blocks)))
    if pattern == ALL:
        counts = np.zeros((len(nodes), len(blocks)))
        np.add.at(counts, (np.arange(len(nodes))[:, None], nodes), 1.0)
        found = counts.T @ counts / max(nodes.shape[1] - inside, 1)
    elif pattern in MESSAGES:
        after = nodes if pattern == LOOP else nodes[:, :-1]
        np.add.at(found, (after, np.roll(nodes, -1, axis=1)[:, : after.shape[1]]), 1.0)
    else:
        np.add.at(found, (nodes, np.roll(nodes, -1, axis=1)), float(inside))
    np.fill_diagonal(found, 0.0)
    return found


def meets_again(network: Network, members: Sequence[Axis], inside: int, pattern: str) -> bool:
    """Whether groups do not line up with the nodes, so that of the neighbours that are taken to be on different ones (after every
    `inside` ranks) some are on the same. No, for bounds, where that is the placement's."""
    if network.unplaced and len(set(network.devices)) > 1:
        return False
    nodes = _nodes_of_groups(members, network.devices)
    after = np.roll(nodes, -1, axis=1)
    leaving = np.arange(nodes.shape[1]) % inside == inside - 1
    if pattern == CHAIN:
        leaving[-1] = False
    return bool((nodes == after)[:, leaving].any())


def _nodes_of_groups(members: Sequence[Axis], blocks: Sequence[int]) -> Ints:
    """The node of every rank of every whole group, one row a group."""
    home = np.repeat(np.arange(len(blocks)), blocks)
    return np.asarray(home[_groups(members, len(home))])


def _groups(members: Sequence[Axis], devices: int) -> Ints:
    """The ranks of every whole group, ascending, one row a group."""
    ranks, offsets = np.arange(devices), np.zeros(1, dtype=np.int64)
    for axis in members:
        offsets = (offsets[:, None] + axis.stride * np.arange(axis.size)).reshape(-1)
        ranks = ranks[(ranks // axis.stride) % axis.size == 0]
    offsets = np.unique(offsets)
    first = ranks[ranks + offsets[-1] < devices]
    return np.asarray(first[:, None] + offsets)


def figure_of(routes: Routes, demand: Floats, placement: Sequence[int], pattern: str) -> Figure:
    """The rate that every flow gets at once, and the latency: of all edges of a ring on average, else the worst."""
    at = np.array(placement)
    rows, columns = np.nonzero(demand)
    if not len(rows):
        return Figure(bytes_per_s=float("inf"), latency_s=0.0)
    weight, pairs = demand[rows, columns], (at[rows], at[columns])
    load = weight @ routes.share[pairs]
    crossed = load > 0.0
    rate = float((routes.capacity[crossed] / load[crossed]).min())
    late = routes.latency_s[pairs]
    mean = pattern == RING
    return Figure(
        bytes_per_s=rate, latency_s=float(weight @ late / weight.sum()) if mean else float(late.max())
    )


def linked(
    network: Network, members: Sequence[Axis], inside: int, fan: int, pattern: str, ports: int
) -> Figure | None:
    """What a device gets where its group leaves the node; None where no group does.

    A message takes one of its node's `ports`.
    """
    each = max(network.devices)
    if network.unplaced:
        pattern = CHAIN if pattern == LOOP else pattern  # which gets no less
        best = _best(network, members, fan, pattern, each) or _at_most(network, members, inside, pattern)
        if best is None or pattern != CHAIN:
            return best
        port = max(node_bytes_per_s(network.fabric, node) for node in network.placement) / ports
        return replace(best, bytes_per_s=min(best.bytes_per_s, port))
    demand = flows(members, inside, pattern, network.devices)
    routes = routes_of(network.fabric)
    found = figure_of(routes, demand, network.placement, pattern)
    senders = {network.placement[row] for row in np.nonzero(demand)[0]}
    if pattern not in MESSAGES or not senders:  # none where all of them are on one node
        return found
    leaving = min(node_bytes_per_s(network.fabric, node) for node in senders)
    return Figure(bytes_per_s=min(found.bytes_per_s, leaving / ports), latency_s=found.latency_s)


def narrowest(network: Network, members: Sequence[Axis], inside: int, pattern: str) -> tuple[str, str]:
    """The ends of the link that the groups along some axes fill first."""
    demand, routes = flows(members, inside, pattern, network.devices), routes_of(network.fabric)
    at = np.array(network.placement)
    rows, columns = np.nonzero(demand)
    load = demand[rows, columns] @ routes.share[at[rows], at[columns]]
    one, other = directed_links(network.fabric)[int(np.argmax(load / routes.capacity))]
    return network.fabric.name(one), network.fabric.name(other)


def _best(network: Network, members: Sequence[Axis], fan: int, pattern: str, each: int) -> Figure | None:
    """The reach of groups of `fan` nodes, divided among the flows of a node; None where groups and nodes do not
    line up."""
    aligned = (
        all(axis.stride % each == 0 or (each % axis.stride == 0 and _even(axis, each)) for axis in members)
        and len(set(network.devices)) == 1
    )
    alike = [r for r in network.reach if (r.pattern, r.fan) == (pattern, fan)]
    if not alike or not aligned:
        return None
    many = len(members) == 1  # axes with others between them may make fewer groups than a single one
    known = (max if many else min)(alike, key=lambda reach: reach.groups)
    weight = min(min(axis.stride for axis in members), each) if pattern == CHAIN else each
    return Figure(bytes_per_s=known.bytes_per_s / weight, latency_s=known.latency_s)


def _at_most(network: Network, members: Sequence[Axis], inside: int, pattern: str) -> Figure | None:
    """What no placement exceeds, whether groups and nodes line up or not: some node has as many flows as any block of devices,
    and no node has wider links than the widest."""
    demand = flows(members, inside, pattern, network.devices)
    if not demand.any():
        return None
    most = max(float(demand.sum(axis=0).max()), float(demand.sum(axis=1).max()))
    if len(set(network.devices)) > 1:  # which blocks there are is the placement's
        most = float(inside) if pattern == RING else 1.0
    widest = max(node_bytes_per_s(network.fabric, node) for node in network.placement)
    late = routes_of(network.fabric).latency_s
    return Figure(bytes_per_s=widest / most, latency_s=float(late[~np.eye(len(late), dtype=bool)].min()))


def _even(axis: Axis, each: int) -> bool:
    span = axis.stride * axis.size
    return each % span == 0 or span % each == 0
