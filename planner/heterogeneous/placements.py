"""Which node takes which part of the mesh, on an irregular network.

Placements that differ by nodes which nothing tells apart are one (`sequences`). What a placement gives a mesh is the
rate and the latency of each of its groups (`costmodel.links`); of all placements only those are kept that give some
mesh what no other gives better (`choices`): collectives cost less the more they are given, so that nothing else can
be the fastest. Bounds take the best of all placements for every group on its own (`reaches`); where there are too
many placements to look at, what the minimum cuts of the network let through (`planner/search/space/cuts.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import factorial, prod

import numpy as np

from autoparallel.costmodel.links import ALL, CHAIN, MESSAGES, RING, Floats, Routes, flows, routes_of
from autoparallel.costmodel.program import Axis
from autoparallel.planner.expand.axes import EXPERT_SHARD, EXPERTS, mesh_axes
from autoparallel.planner.search.space.meshes import MESH_KEYS, Bools, Ints, Meshes
from autoparallel.planner.strategy.types import AXES, Batch, Mesh, Strategy
from autoparallel.profiles.hardware import Fabric, Network, Reach
from autoparallel.profiles.network import node_bytes_per_s

MOST_SEQUENCES = 6000  # placements looked at one by one: a fraction of a second. Kind: formula
MOST_TURNS = 500  # automorphisms of the network that make placements alike
# Axes whose groups talk, together or alone; with experts apart, parts of them do.
TALKING: tuple[tuple[str, ...], ...] = (
    ("tp",), ("cp",), ("dp_shard",), ("dp_replicate",), ("dp_shard", "cp"), ("dp_replicate", "dp_shard"),
    ("dp_replicate", "cp"), ("dp_replicate", "dp_shard", "cp"), (EXPERTS,), (EXPERT_SHARD,),
    ("dp_replicate", EXPERT_SHARD),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A placement worth searching, and for which meshes and orders."""

    placement: tuple[int, ...]
    worth: Bools  # by mesh and order


def interchangeable(fabric: Fabric, devices: Sequence[object]) -> tuple[int, ...]:
    """A label for every node: alike where nodes of as many devices hang on one switch by equal cables alone."""
    known: dict[object, int] = {}
    found = []
    for node in range(fabric.nodes):
        cables = [link for link in fabric.links if node in link.ends]
        key: object = node
        if len(cables) == 1:
            (one,) = cables
            other = one.ends[0] + one.ends[1] - node
            if other >= fabric.nodes:
                key = (other, one.bytes_per_s, one.latency_s, devices[node])
        found.append(known.setdefault(key, len(known)))
    return tuple(found)


def sequences(network: Network, homes: Sequence[int] = ()) -> Ints | None:
    """Every distinct placement of the network's nodes, one a row; None where there are too many.

    Blocks change places with those of as many devices, and of their own home where they have one."""
    fabric, none = network.fabric, (0,) * len(network.placement)
    have = dict(zip(network.placement, zip(network.devices, homes or none, strict=True), strict=True))
    blocks = [have[node] for node in network.placement]
    labels = interchangeable(fabric, [have.get(node, (0, 0)) for node in range(fabric.nodes)])
    alike: dict[int, list[int]] = {}
    for node in sorted(network.placement):
        alike.setdefault(labels[node], []).append(node)
    count = factorial(len(network.placement)) // prod(factorial(len(nodes)) for nodes in alike.values())
    if count > MOST_SEQUENCES:
        return None
    kinds = [(len(alike.get(label, ())), have.get(node)) for node, label in enumerate(labels)]
    turns = _turns(fabric, labels, kinds)
    found = []
    for row in _arrangements([len(alike.get(label, ())) for label in range(max(labels) + 1)]):
        if any(tuple(turn[label] for label in row) < row for turn in turns):
            continue
        left = {label: iter(nodes) for label, nodes in alike.items()}
        placement = [next(left[label]) for label in row]
        if [have[node] for node in placement] == blocks:
            found.append(placement)
    return np.array(found, dtype=np.int64).reshape(-1, len(network.placement))


def _arrangements(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every order of a multiset of labels, ascending."""
    if not any(counts):
        yield ()
        return
    for label, count in enumerate(counts):
        if count:
            fewer = [n - (i == label) for i, n in enumerate(counts)]
            for rest in _arrangements(fewer):
                yield (label, *rest)


def _turns(fabric: Fabric, labels: Sequence[int], kinds: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    """Renamings of the labels that leave the network as it is."""
    import networkx as nx

    graph = nx.Graph()
    first: dict[int, int] = {}
    for node, label in enumerate(labels):
        first.setdefault(label, node)
    for node in first.values():
        graph.add_node(node, kind=("node", kinds[node]))
    for switch in range(len(fabric.switches)):
        graph.add_node(fabric.nodes + switch, kind=("switch", None))
    for link in fabric.links:
        if all(end in graph for end in link.ends):
            cables = graph.get_edge_data(*link.ends, {}).get("cables", ())
            graph.add_edge(*link.ends, cables=tuple(sorted((*cables, (link.bytes_per_s, link.latency_s)))))
    matcher = nx.algorithms.isomorphism.GraphMatcher(
        graph, graph, node_match=lambda a, b: a["kind"] == b["kind"],
        edge_match=lambda a, b: a["cables"] == b["cables"],
    )  # fmt: skip
    found = []
    for turn in islice(matcher.isomorphisms_iter(), MOST_TURNS):
        found.append(tuple(labels[turn[first[label]]] for label in range(len(first))))
    return tuple(found)


def figures(
    routes: Routes, demand: Floats, placements: Ints, pattern: str, port_bytes_per_s: Floats | None = None
) -> tuple[Floats, Floats]:
    """`costmodel.links.figure_of` of every placement: rates and latencies. A message takes one port of its node."""
    rows, columns = np.nonzero(demand)
    if not len(rows):
        return np.full(len(placements), np.inf), np.zeros(len(placements))
    weight = demand[rows, columns]
    here, there = placements[:, rows], placements[:, columns]
    load = np.einsum("k,pkl->pl", weight, routes.share[here, there])
    with np.errstate(divide="ignore"):
        rate = (routes.capacity / load).min(axis=1)
    if pattern in MESSAGES and port_bytes_per_s is not None:
        rate = np.minimum(rate, port_bytes_per_s[here].min(axis=1))
    late = routes.latency_s[here, there]
    return rate, late @ weight / weight.sum() if pattern == RING else late.max(axis=1)


def reaches(network: Network, placements: Ints) -> tuple[Reach, ...]:
    """What the best placement gives groups of any number of nodes, one group alone or as many as there are."""
    routes, nodes = routes_of(network.fabric), len(network.placement)
    found = []
    for pattern in (RING, CHAIN, ALL):
        for fan in range(2, nodes + 1):
            for groups in sorted({1, least_groups(nodes, fan)}):
                demand = node_flows(pattern, fan, groups, nodes)
                rate, late = figures(routes, demand, placements, pattern)
                found.append(
                    Reach(pattern=pattern, fan=fan, groups=groups, bytes_per_s=float(rate.max()),
                          latency_s=float(late.min()))
                )  # fmt: skip
    return tuple(found)


def least_groups(nodes: int, fan: int) -> int:
    """Groups of `fan` nodes along one axis, whatever the distance between neighbours."""
    return min(nodes // (fan * stride) * stride for stride in range(1, nodes // fan + 1))


def node_flows(pattern: str, fan: int, groups: int, nodes: int) -> Floats:
    """One flow between neighbours of the first groups of `fan` nodes each."""
    used = (1,) * (fan * groups)
    found = np.zeros((nodes, nodes))
    demand = flows((Axis(name="", size=fan, stride=1),), 1, pattern, used)
    found[: len(used), : len(used)] = demand
    return found


def choices(meshes: Meshes, network: Network, placements: Ints, ports: int) -> tuple[Choice, ...]:
    """The fewest placements that give every mesh all that no other gives better; nodes have `ports` each."""
    routes = routes_of(network.fabric)
    out = np.array([node_bytes_per_s(network.fabric, node) for node in range(routes.nodes)])
    known: dict[tuple[object, ...], tuple[Floats, Floats] | None] = {}
    kinds: dict[tuple[tuple[object, ...], ...], list[tuple[int, int]]] = {}
    for mesh, order in _distinct(meshes):
        keys: list[tuple[object, ...]] = []
        for members, pattern in _talkers(meshes.sizes[mesh], meshes.orders[order]):
            key = (members, pattern)
            if key not in known:
                demand = flows(members, 1, pattern, network.devices)
                known[key] = (
                    figures(routes, demand, placements, pattern, out / ports) if demand.any() else None
                )
            if known[key] is not None:
                keys.append(key)
        kinds.setdefault(tuple(keys), []).append((mesh, order))
    wanted: list[tuple[Bools, list[tuple[int, int]]]] = []
    for talk, where in kinds.items():
        columns = [column for key in talk for column in _better(known[key])]
        wanted += [(same, where) for same in _undominated(columns, len(placements))]
    return _cover(wanted, placements, meshes)


def _better(found: tuple[Floats, Floats] | None) -> tuple[Floats, Floats]:
    assert found is not None
    return found[0], -found[1]


def _distinct(meshes: Meshes) -> Iterator[tuple[int, int]]:
    """Meshes and orders that differ by more than the names of nodes: by neighbours inside a node, or by the order
    of the axes whose ranks one ring joins."""
    order_of_data = [
        [axis for axis in order if axis in ("dp_replicate", "dp_shard", "cp")] for order in meshes.orders
    ]
    for mesh, sizes in enumerate(meshes.sizes):
        large = {axis for axis in AXES if sizes[MESH_KEYS.index(axis)] > 1}
        seen = set()
        for order in np.flatnonzero(meshes.placed[mesh]):
            near = meshes.near[order, mesh, :, meshes.strides :]
            key = (near.tobytes(), tuple(axis for axis in order_of_data[order] if axis in large))
            if key not in seen:
                seen.add(key)
                yield mesh, int(order)


def _talkers(sizes: Ints, order: Sequence[str]) -> Iterator[tuple[tuple[Axis, ...], str]]:
    """Members and pattern of all that a mesh's ranks may talk in."""
    mesh = Mesh(order=tuple(order), **{name: int(n) for name, n in zip(MESH_KEYS, sizes, strict=True)})  # type: ignore[arg-type]
    axes = [a for a in mesh_axes(Strategy(batch=Batch(global_=1, micro=1), mesh=mesh)) if a.size > 1]
    for axis in axes:
        if axis.name == "pp":
            yield from (((replace(axis, name="", derived=False),), pattern) for pattern in MESSAGES)
    seen = set()
    for names in TALKING:
        members = tuple(replace(a, name="", derived=False) for a in axes if a.name in names)
        pattern = ALL if EXPERTS in names else RING
        if members and (members, pattern) not in seen:
            seen.add((members, pattern))
            yield members, pattern


def _undominated(columns: Sequence[Floats], count: int) -> list[Bools]:
    """For each best combination of figures (more is better), which placements have it."""
    if not columns:
        return [np.ones(count, dtype=np.bool_)]
    table = np.stack(columns, axis=1)
    rows, which = np.unique(table, axis=0, return_inverse=True)
    kept = [
        i for i, row in enumerate(rows)
        if not ((rows >= row).all(axis=1) & (rows > row).any(axis=1)).any()
    ]  # fmt: skip
    return [np.asarray(which.reshape(-1) == i) for i in kept]


def _cover(
    wanted: list[tuple[Bools, list[tuple[int, int]]]], placements: Ints, meshes: Meshes
) -> tuple[Choice, ...]:
    """Placements until every wish has one, those that meet most wishes first."""
    found = []
    while wanted:
        votes = sum(same.astype(np.int64) * len(where) for same, where in wanted)
        best = int(np.argmax(votes))
        worth = np.zeros_like(meshes.placed)
        for same, where in wanted:
            if same[best]:
                rows, orders = zip(*where, strict=True)
                worth[list(rows), list(orders)] = True
        wanted = [one for one in wanted if not one[0][best]]
        found.append(Choice(placement=tuple(int(n) for n in placements[best]), worth=worth))
    return tuple(found)
