"""The cluster that a run was on: what its record says of it, and whether one that somebody names is the same.

What a run measured tells of the devices and nodes that it was on: others are refused. Figures of these may differ, as they do
once a profile is calibrated or prices change: that is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoparallel.errors import UserError
from autoparallel.profiles import Cluster
from autoparallel.profiles.record import cluster_hash, cluster_record, differing, recorded_cluster
from autoparallel.profiles.resize import resized
from autoparallel.report.numbers import times
from autoparallel.runtime.monitor.record import NAME, Record


def said_of(cluster: Cluster | None) -> dict[str, Any]:
    """What a start of the record says of its cluster: it, as strategy files do, and its devices; nothing where none is known."""
    return {} if cluster is None else {"cluster": cluster_record(cluster), "devices": _devices(cluster)}


def recorded(folder: Path, record: Record) -> Cluster | None:
    """The cluster that a start says it was on; None: it does not say."""
    said = record.start.get("cluster")
    return recorded_cluster(said, _where(folder), checked=False) if said else None


def same_devices(one: Record, other: Record) -> bool:
    """Whether two starts were on the same devices, as far as they say."""
    known = {tuple(record.start["devices"]) for record in (one, other) if "devices" in record.start}
    return len(known) < 2


def as_many(cluster: Cluster, record: Record) -> Cluster:
    """As much of the cluster as a start had."""
    return resized(cluster, int(record.start["world"]), per_node_of(record))


def per_node_of(record: Record) -> int:
    """Ranks of a node."""
    return int(str(record.start["shape"]).partition("x")[2])


def cluster_of(folder: Path, record: Record, named: Cluster | None, say: Callable[[str], None]) -> Cluster:
    """The cluster of a start, by the figures of the one that is `named`, if any; `say` is told where these are not those that it
    ran under. Raises UserError where another one is named, or none is known."""
    said = record.start.get("cluster")
    if not said:
        if named is None:
            raise UserError(f"{folder / NAME}: does not say which cluster the run is on: give --cluster")
        return as_many(named, record)
    if named is not None:
        _refuse_another(folder, record, named)
    known = named or recorded_cluster(said, _where(folder), checked=False)
    here = as_many(known, record)
    if cluster_hash(here) != said["hash"]:
        what = f"--cluster {known.name}" if named else f"{known.name} in this version"
        say(
            f"warning: {what} has other figures than the run in {folder} was planned with"
            f"{differing(said, here, _where(folder))}; the answer is by these"
        )
    return here


def _refuse_another(folder: Path, record: Record, named: Cluster) -> None:
    """Raise UserError where the devices are others, or are spread over nodes in another way."""
    said, devices = record.start["cluster"], record.start["devices"]
    try:
        known = recorded(folder, record)
    except UserError:  # it shipped once
        known = None
    if _devices(named) == devices and (
        known is None or _machines(as_many(named, record)) == _machines(known)
    ):
        return
    was = _machines(known) if known else ", ".join(devices)
    raise UserError(
        f"--cluster {named.name} ({_machines(named)}): the run in {folder} was on {said['name']} ({was}), and its steps say nothing "
        f"of other machines; leave --cluster out, or plan for these: `autoparallel plan {folder / record.start['graph']} --cluster "
        f"{named.name}`. A profile of the devices that the run was on has their name (`autoparallel profile --name`)"
    )


def _where(folder: Path) -> str:
    return f"{folder / NAME}: cluster"


def _devices(cluster: Cluster) -> list[str]:
    return sorted({group.device.name for group in cluster.groups})


def _machines(cluster: Cluster) -> str:
    """`16 h100-sxm on 2 nodes`."""
    devices, nodes = Counter[str](), Counter[str]()
    for group in cluster.groups:
        devices[group.device.name] += group.devices
        nodes[group.device.name] += group.nodes
    return ", ".join(f"{devices[name]} {name} on {times(nodes[name], 'node')}" for name in sorted(devices))
