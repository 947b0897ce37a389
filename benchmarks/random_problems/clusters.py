"""Draws a cluster: any shipped device, 1 to 512 nodes of 1 to 72 devices, networks from 10 Gbit/s up."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from autoparallel.errors import UserError
from autoparallel.profiles.hardware import Cluster
from autoparallel.profiles.load import cluster_names, device_names, load_cluster, load_device, parse_cluster

GBIT = 1e9 / 8
MOST_DEVICES = 16384
NODES_OF_IRREGULAR = 16  # most nodes of a cluster whose nodes are told apart
# Devices per node that are sold, and how often each is drawn.
PER_NODE: dict[str, tuple[tuple[int, int], ...]] = {
    "gb200": ((4, 3), (72, 2)),
    "gb300": ((4, 3), (72, 2)),
    "cpu-gloo": ((1, 1), (2, 3), (4, 2), (8, 2), (16, 1)),
    "rtx4090": ((1, 2), (2, 3), (4, 4), (8, 4)),
    "l40s": ((1, 1), (2, 2), (4, 4), (8, 4)),
    "a100-pcie-80gb": ((1, 2), (2, 2), (4, 3), (8, 3)),
    "h100-pcie": ((1, 2), (2, 2), (4, 3), (8, 3)),
}
USUAL_PER_NODE = ((8, 12), (4, 4), (2, 1), (1, 1))
KINDS = (
    ("box", 34),
    ("network", 26),
    ("racks", 12),
    ("shipped", 7),
    ("switches", 5),
    ("short", 8),
    ("mixed", 8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnCluster:
    """A cluster as a user names it: `DEVICE:NODESxPER_NODE`, a shipped name, or a cluster file's table."""

    kind: str
    told: str
    table: dict[str, Any] | None = None

    def load(self) -> Cluster:
        return parse_cluster(self.table, self.told) if self.table else load_cluster(self.told)


def pick(rng: Random, weighted: tuple[tuple[Any, int], ...]) -> Any:
    """One of the values, each as often as its weight says."""
    return rng.choices([v for v, _ in weighted], [w for _, w in weighted])[0]


def draw_cluster(rng: Random) -> DrawnCluster:
    """A cluster that the profiles accept."""
    while True:
        drawn = _DRAWERS[pick(rng, KINDS)](rng)
        try:
            cluster = drawn.load()
        except UserError:  # levels that do not hold each other, more devices than a box has
            continue
        if 1 <= cluster.devices <= MOST_DEVICES:
            return drawn


def _accelerators() -> list[str]:
    return [name for name in device_names() if name != "cpu-gloo"]


def _per_node(rng: Random, device: str) -> int:
    return int(pick(rng, PER_NODE.get(device, USUAL_PER_NODE)))


def _nodes(rng: Random, device: str, most: int = 512) -> int:
    """1 to 512, as many below 16 as above; most often a power of two."""
    if device == "cpu-gloo":
        most = min(most, 4)
    count = min(most, round(2 ** rng.uniform(0, 9)))
    return min(most, 1 << (count.bit_length() - 1)) if rng.random() < 0.65 else max(1, count)


def _box(rng: Random) -> DrawnCluster:
    """A device's usual box and network."""
    device = rng.choice(device_names())
    return DrawnCluster(kind="box", told=f"{device}:{_nodes(rng, device)}x{_per_node(rng, device)}")


def _shipped(rng: Random) -> DrawnCluster:
    return DrawnCluster(kind="shipped", told=rng.choice(cluster_names()))


def _inner(rng: Random, device: str, per_node: int) -> list[dict[str, Any]]:
    """What joins the devices of a node: what the device's box has, or less."""
    if per_node == 1:
        return []
    level = load_device(device).levels[0]
    rate = level.bytes_per_s * rng.choice((1.0, 1.0, 1.0, 0.5, 0.25))
    return [{"name": level.name, "size": per_node, "bytes_per_s": rate, "latency_s": level.latency_s}]


def _port(rng: Random, per_node: int) -> dict[str, Any]:
    """What joins the nodes: one port for a node, or one for each device."""
    if rng.random() < 0.5:
        rate = rng.choice((10, 25, 40, 100, 200, 400)) * GBIT
        return {"bytes_per_s": rate / per_node, "nics": 1, "latency_s": rng.choice((1.4e-5, 3e-5, 5e-5))}
    rate = rng.choice((100, 200, 400, 800)) * GBIT
    return {"bytes_per_s": rate, "latency_s": rng.choice((5e-6, 1e-5, 1.4e-5))}


def _table(name: str, groups: list[dict[str, Any]], levels: list[dict[str, Any]]) -> dict[str, Any]:
    return {"schema": 1, "name": name, "group": groups, "level": levels}


def _network(rng: Random) -> DrawnCluster:
    """A usual box on another network."""
    device = rng.choice(_accelerators())
    nodes, per_node = _nodes(rng, device), _per_node(rng, device)
    port = _port(rng, per_node)
    told = f"{device}:{nodes}x{per_node} at {port['bytes_per_s'] * (per_node if 'nics' in port else 1) / GBIT:.0f} Gbit/s"
    told += " a node" if "nics" in port else " a device"
    group = {"device": device, "nodes": nodes, "devices_per_node": per_node}
    levels = [*_inner(rng, device, per_node), {"name": "network", **port}]
    if nodes == 1 and per_node > 1:
        levels = levels[:1]
    return DrawnCluster(kind="network", told=told, table=_table(told, [group], levels))


def _racks(rng: Random) -> DrawnCluster:
    """Racks, the network between them oversubscribed."""
    device = rng.choice(_accelerators())
    per_node, rack = _per_node(rng, device), rng.choice((2, 4, 8, 16))
    racks = rng.choice((2, 2, 3, 4, 8, 16))
    over, port = rng.choice((1.5, 2.0, 3.0, 4.0, 8.0)), _port(rng, per_node)
    told = f"{device}:{racks * rack}x{per_node} in {racks} racks, {over:g} to 1"
    group = {"device": device, "nodes": racks * rack, "devices_per_node": per_node}
    levels = [
        *_inner(rng, device, per_node),
        {"name": "leaf", "size": rack * per_node, **port},
        {"name": "spine", **port, "oversubscription": over},
    ]
    return DrawnCluster(kind="racks", told=told, table=_table(told, [group], levels))


def _switches(rng: Random) -> DrawnCluster:
    """A few nodes behind leaf switches whose trunks carry less than the ports below."""
    device = rng.choice(_accelerators())
    per_node, leaves, each = _per_node(rng, device), rng.choice((2, 2, 4)), rng.choice((1, 2, 2, 3))
    nodes, over = leaves * each, rng.choice((2.0, 4.0))
    port = {"bytes_per_s": rng.choice((100, 200, 400, 1600)) * GBIT, "latency_s": 7e-6}
    order = list(range(nodes))
    rng.shuffle(order)
    told = f"{device}:{nodes}x{per_node} on {leaves} leaf switches, {over:g} to 1"
    group = {"device": device, "nodes": nodes, "devices_per_node": per_node}
    inner = _inner(rng, device, per_node)
    if not inner:
        inner = [{"name": "node", "size": 1, "bytes_per_s": port["bytes_per_s"], "latency_s": 3e-6}]
    leaf = [
        {
            "name": f"leaf-{i}", "nodes": sorted(order[i * each : (i + 1) * each]), "up": "spine", "oversubscription": over,
            **port,
        }
        for i in range(leaves)
    ]  # fmt: skip
    table = _table(told, [group], inner) | {"switch": [*leaf, {"name": "spine"}]}
    return DrawnCluster(kind="switches", told=told, table=table)


def _short(rng: Random) -> DrawnCluster:
    """Some nodes have lost devices."""
    device = rng.choice(_accelerators())
    per_node = rng.choice((4, 8, 8, 8))
    nodes = min(NODES_OF_IRREGULAR, max(2, _nodes(rng, device, 64)))
    lost = {
        str(rng.randrange(nodes)): per_node - rng.choice((1, 1, 1, 2)) for _ in range(rng.choice((1, 1, 2)))
    }
    told = f"{device}:{nodes}x{per_node}, of nodes {', '.join(f'{n} {have}' for n, have in sorted(lost.items()))}"
    group = {"device": device, "nodes": nodes, "devices_per_node": per_node, "short": lost}
    levels = [*_inner(rng, device, per_node), {"name": "network", **_port(rng, per_node)}]
    return DrawnCluster(kind="short", told=told, table=_table(told, [group], levels))


def _mixed(rng: Random) -> DrawnCluster:
    """Two kinds of device on one network: what they share is as fast as the slower of the two."""
    several = [name for name in device_names() if name not in ("cpu-gloo", "gb200", "gb300")]
    first, second = rng.sample(several, 2)
    per_node = rng.choice((4, 8, 8))
    counts = [rng.choice((1, 2, 2, 3, 4, 8)) for _ in range(2)]
    port = _port(rng, per_node)
    own = [_inner(rng, device, per_node) for device in (first, second)]
    slower = min(own, key=lambda levels: float(levels[0]["bytes_per_s"]))
    told = f"{first}:{counts[0]}x{per_node} + {second}:{counts[1]}x{per_node}"
    groups = [
        {
            "device": device,
            "nodes": count,
            "devices_per_node": per_node,
            "level": [*levels, {"name": "network", **port}],
        }
        for device, count, levels in zip((first, second), counts, own, strict=True)
    ]
    levels = [slower[0] | {"name": "node"}, {"name": "network", **port}]
    return DrawnCluster(kind="mixed", told=told, table=_table(told, groups, levels))


_DRAWERS = {
    "box": _box, "network": _network, "racks": _racks, "shipped": _shipped, "switches": _switches, "short": _short,
    "mixed": _mixed,
}  # fmt: skip
