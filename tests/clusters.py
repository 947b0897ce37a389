"""Small clusters with irregular networks, as their files would say: what tests place meshes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoparallel.profiles import Cluster, cluster_from_dict

NVLINK = {"name": "nvlink", "bytes_per_s": 3e11, "latency_s": 3e-6}
Cable = tuple[str, str, float]


def cluster_file(
    nodes: int, cables: Sequence[Cable] = (), *, per_node: int = 2, device: str = "a100-sxm-80gb", **more: Any
) -> dict[str, Any]:
    """The table of a cluster of equal nodes and cables (ends and bytes per second) between them and switches."""
    names = {end for one, other, _ in cables for end in (one, other)}
    switches = sorted(name for name in names if not name.startswith("node-"))
    table: dict[str, Any] = {
        "name": "irregular",
        "group": [{"device": device, "nodes": nodes, "devices_per_node": per_node}],
        "level": [{**NVLINK, "size": per_node}],
        "link": [{"between": [a, b], "bytes_per_s": rate, "latency_s": 5e-6} for a, b, rate in cables],
    }
    if switches:
        table["switch"] = [{"name": name} for name in switches]
    return table | more


def on_cables(nodes: int, cables: Sequence[Cable], **more: Any) -> Cluster:
    """The cluster of such a table."""
    return cluster_from_dict(cluster_file(nodes, cables, **more), "test")


def ring(rates: Sequence[float], **more: Any) -> Cluster:
    """Nodes in a ring; `rates[i]` joins node i and the next."""
    count = len(rates)
    cables = [(f"node-{i}", f"node-{(i + 1) % count}", rate) for i, rate in enumerate(rates)]
    return on_cables(count, cables, **more)


def racks(homes: Sequence[int], port: float, trunk: float, **more: Any) -> Cluster:
    """Nodes on the switches of their racks, and a trunk from each of these to one above."""
    cables = [(f"node-{i}", f"leaf-{home}", port) for i, home in enumerate(homes)]
    cables += [(f"leaf-{home}", "spine", trunk) for home in sorted(set(homes))]
    return on_cables(len(homes), cables, **more)
