"""A cluster as a strategy file records it: by name and hash where it ships, else whole, with a hash all the same.

What ships can change with the version: the hash tells whether a name still means what it meant.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autoparallel.errors import UserError
from autoparallel.profiles.convert import cluster_from_dict, cluster_to_dict
from autoparallel.profiles.hardware import Cluster, Device
from autoparallel.profiles.load import is_path, load_cluster, load_device

_NO_FIGURES = ("provenance", "architecture", "schema")  # keys of tables that say nothing of the machine


def cluster_hash(cluster: Cluster) -> str:
    """Sixteen hex digits of every figure; neither the cluster's name nor the sources make other machines."""
    table = {key: value for key, value in cluster_to_dict(cluster).items() if key != "name"}
    return hashlib.sha256(json.dumps(_figures(table), sort_keys=True).encode()).hexdigest()[:16]


def _figures(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _figures(inner) for key, inner in value.items() if key not in _NO_FIGURES}
    return [_figures(inner) for inner in value] if isinstance(value, list) else value


def cluster_record(cluster: Cluster, *, embed: bool = False) -> dict[str, Any]:
    """`[problem] cluster`: name and hash of a cluster that ships; of any other one, or where it is to be embedded, the
    whole table. Unless embedded, its devices that ship are names in it."""
    hash_ = cluster_hash(cluster)
    if embed:
        return _hashed(cluster_to_dict(cluster), hash_)
    if _ships(cluster, hash_):
        return {"name": cluster.name, "hash": hash_}
    table = cluster_to_dict(cluster)
    groups = [
        {**given, "device": group.device.name} if _device_ships(group.device) else given
        for given, group in zip(table["group"], cluster.groups, strict=True)
    ]
    return _hashed(table | {"group": groups}, hash_)


def recorded_cluster(table: Mapping[str, Any], where: str, *, checked: bool = True) -> Cluster:
    """The cluster that a `cluster_record` stands for; `where` is what messages call it.

    Raises UserError where its name is not known, or (`checked`) where its figures are not those that the hash was made
    of. Tables without a hash, as earlier versions wrote them, are read as they stand.
    """
    given = {key: value for key, value in table.items() if key != "hash"}
    cluster = cluster_from_dict(given, where) if is_whole(table) else _named(given.get("name"), where)
    if checked and table.get("hash") not in (None, cluster_hash(cluster)):
        raise UserError(_changed(table, cluster, where))
    return cluster


def recorded_hash(table: Mapping[str, Any], where: str) -> str:
    """The hash of the cluster that a file was planned for."""
    said = table.get("hash")
    return said if isinstance(said, str) else cluster_hash(recorded_cluster(table, where))


def differing(record: Mapping[str, Any], cluster: Cluster, where: str) -> str:
    """What of two clusters is not the same, `: levels differ`, as far as the recorded one is known; empty where it is not."""
    try:
        planned = recorded_cluster(record, where, checked=False)
    except UserError:
        return ""
    parts = [k for k in ("groups", "levels", "network") if getattr(planned, k) != getattr(cluster, k)]
    return f": {', '.join(parts) or 'figures'} differ"


def is_whole(table: Mapping[str, Any]) -> bool:
    """Whether a record has the cluster itself, not its name."""
    return "group" in table


def _hashed(table: dict[str, Any], hash_: str) -> dict[str, Any]:
    return {"name": table["name"], "hash": hash_, **table}


def _named(name: object, where: str) -> Cluster:
    if not isinstance(name, str) or is_path(name):
        raise UserError(f"{where}: name = {name!r} is no shipped cluster, and the cluster is not in the file")
    try:
        return load_cluster(name)
    except UserError as error:
        raise UserError(
            f"{where}: {error}; plan with --embed-cluster so that a file keeps its cluster"
        ) from None


def _changed(table: Mapping[str, Any], cluster: Cluster, where: str) -> str:
    what = (
        "was edited, or a device that it names has other figures in this version"
        if is_whole(table)
        else f"{cluster.name} has other figures in this version than when the file was written"
    )
    return (
        f"{where}: {what} (hash {cluster_hash(cluster)}, not {table['hash']}): plan again; with --embed-cluster a file "
        "keeps every figure that it was planned for"
    )


def _ships(cluster: Cluster, hash_: str) -> bool:
    if is_path(cluster.name):
        return False
    try:
        return cluster_hash(load_cluster(cluster.name)) == hash_
    except UserError:
        return False


def _device_ships(device: Device) -> bool:
    if is_path(device.name):
        return False
    try:
        shipped = load_device(device.name)
    except UserError:
        return False
    return replace(shipped, provenance={}) == replace(device, provenance={})
