"""`Cluster` to and from plain tables, so that a strategy file can hold its cluster whole.

The table is a cluster file with the devices written out, numbers bare, and their provenance grouped beside
them, so that it stands alone and stays short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from autoparallel.profiles.hardware import ANY_SIZE, Cluster, Device, Level, Posterior, Provenance
from autoparallel.profiles.load import parse_cluster
from autoparallel.profiles.network import network_tables
from autoparallel.profiles.schema import SCHEMA


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """A cluster file's table that needs no other file; TOML and JSON can hold it."""
    groups = []
    for group in cluster.groups:
        table: dict[str, Any] = {
            "device": device_to_dict(group.device),
            "nodes": group.nodes,
            "devices_per_node": group.devices_per_node,
        }
        if group.price_per_device_hour is not None:
            table["price_per_device_hour"] = group.price_per_device_hour
        if group.short:
            table["short"] = {str(node): devices for node, devices in group.short}
        if group.levels:
            table["level"] = [_level(level) for level in group.levels]
        groups.append(table)
    network = cluster.network
    levels = cluster.levels if network is None else cluster.levels[:-1]
    if network is None and len(levels) > 1:  # nodes short of a device leave the last units smaller
        unit, last = levels[-2].size, levels[-1]
        levels = (*levels[:-1], replace(last, size=-(-last.size // unit) * unit))
    table = {
        "schema": SCHEMA,
        "name": cluster.name,
        "group": groups,
        "level": [_level(level) for level in levels],
    }
    if network is not None:
        table |= network_tables(network.fabric)
        if cluster.levels[-1].nics:
            table["nics"] = cluster.levels[-1].nics
    if cluster.failures is not None:
        table["failures"] = asdict(cluster.failures)
    return table | {"provenance": _grouped(cluster.provenance)}


def cluster_from_dict(table: Mapping[str, Any], where: str = "cluster") -> Cluster:
    """The cluster of such a table; `where` is what error messages call it."""
    return parse_cluster(dict(table), where)


def device_to_dict(device: Device) -> dict[str, Any]:
    """A device file's table with every constant written out."""
    box: dict[str, Any] = {
        "devices_per_node": device.devices_per_node,
        "levels": [_level(level) for level in device.levels],
    }
    if device.cores:
        box["cores"] = device.cores
    return {
        "schema": SCHEMA,
        "name": device.name,
        "architecture": "",
        "memory": {"bytes": device.memory_bytes, "reserve_bytes": device.reserve_bytes},
        "peak_flops": dict(device.peak_flops),
        "hbm_bytes_per_s": device.hbm_bytes_per_s,
        "box": box,
        "constants": _nested(device.constants),
        "provenance": _grouped(device.provenance),
        **({"posterior": _posterior(device.posterior)} if device.posterior else {}),
        **({"residuals": {k: asdict(r) for k, r in device.residuals.items()}} if device.residuals else {}),
    }


def _posterior(posterior: Posterior) -> dict[str, Any]:
    table = asdict(posterior)
    return {
        **table,
        "parts": list(posterior.parts),
        "covariance": [list(row) for row in posterior.covariance],
    }


def _level(level: Level) -> dict[str, Any]:
    table: dict[str, Any] = {"name": level.name}
    if level.size != ANY_SIZE:
        table["size"] = level.size
    table |= {"bytes_per_s": level.bytes_per_s, "latency_s": level.latency_s}
    if level.oversubscription != 1.0:
        table["oversubscription"] = level.oversubscription
    if level.in_network_reduction:
        table["in_network_reduction"] = True
    if level.nics:
        table["nics"] = level.nics
    return table


def _nested(constants: Mapping[str, float]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in sorted(constants.items()):
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def _grouped(provenance: Mapping[str, Provenance]) -> list[dict[str, Any]]:
    by_source: dict[tuple[str, str], list[str]] = {}
    for key, value in sorted(provenance.items()):
        by_source.setdefault((str(value.kind), value.source), []).append(key)
    return [{"kind": kind, "source": source, "keys": keys} for (kind, source), keys in by_source.items()]
