"""What a network lets through at best, from its minimum cuts: for bounds, where placements are too many to look at.

Take any set S of a nodes, of n. Of g groups of f nodes each, floor(a / f) fit inside S and floor((n - a) / f) outside;
all others have nodes on both sides. A ring or an exchange of all with all that has sends at least one flow out of S, a
chain at least one in one of the two directions. So every flow gets at most

    minimum cut between S and the rest / groups on both sides

for every S: here each single node, and what a link or a switch separates.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoparallel.costmodel.links import ALL, CHAIN, RING, routes_of
from autoparallel.planner.heterogeneous.placements import least_groups
from autoparallel.profiles.hardware import Fabric, Network, Reach

_SOURCE, _SINK = "inside", "outside"


def cut_reaches(network: Network) -> tuple[Reach, ...]:
    """`planner.search.space.placements.reaches`, no lower: what no placement goes above."""
    used = frozenset(network.placement)
    cuts = [(len(inside & used), rate) for inside, rate in _cuts(network.fabric, used)]
    latency = routes_of(network.fabric).latency_s
    least = float(latency[latency > 0.0].min(initial=float("inf")))
    found = []
    for pattern in (RING, CHAIN, ALL):
        for fan in range(2, len(used) + 1):
            for groups in sorted({1, least_groups(len(used), fan)}):
                rate = min(
                    (rate / most for inside, rate in cuts
                     if (most := _crossing(pattern, fan, groups, inside, len(used)))),
                    default=float("inf"),
                )  # fmt: skip
                found.append(
                    Reach(pattern=pattern, fan=fan, groups=groups, bytes_per_s=rate,
                          latency_s=least if least < float("inf") else 0.0)
                )  # fmt: skip
    return tuple(found)


def _crossing(pattern: str, fan: int, groups: int, inside: int, nodes: int) -> int:
    """Flows that leave a set of so many nodes at least, in the direction in which more do."""
    idle = nodes - groups * fan  # nodes of no group may stand where they help most
    both = groups - (inside // fan) - ((nodes - inside) // fan)
    if idle and both <= 0:
        return 0
    both = max(both, 0)
    return -(-both // 2) if pattern == CHAIN else both


def _cuts(fabric: Fabric, used: frozenset[int]) -> Iterator[tuple[frozenset[int], float]]:
    """Sets of nodes, and the most that may leave each."""
    import networkx as nx

    graph = nx.Graph()
    for link in fabric.links:
        before = graph.get_edge_data(*link.ends, {}).get("capacity", 0.0)
        graph.add_edge(*link.ends, capacity=before + link.bytes_per_s)
    sets = {frozenset({node}) for node in used}
    for vertex in graph.nodes:
        rest = graph.copy()
        rest.remove_node(vertex)
        sets |= {frozenset(part) & used for part in nx.connected_components(rest)}
    for one, other in list(graph.edges):
        rest = graph.copy()
        rest.remove_edge(one, other)
        sets |= {frozenset(part) & used for part in nx.connected_components(rest)}
    for inside in sorted((s for s in sets if s and s != used), key=sorted):
        whole = graph.copy()
        for node in used:
            whole.add_edge(_SOURCE if node in inside else _SINK, node)  # no capacity: without limit
        yield inside, float(nx.minimum_cut_value(whole, _SOURCE, _SINK))
