"""Hardware and cluster descriptions: TOML data and the loader that checks it."""

from __future__ import annotations

from autoparallel.profiles.convert import cluster_from_dict, cluster_to_dict
from autoparallel.profiles.hardware import Cluster, Device, Group, Level, Provenance, ValueKind
from autoparallel.profiles.load import cluster_names, device_names, load_cluster, load_device

__all__ = [
    "Cluster",
    "Device",
    "Group",
    "Level",
    "Provenance",
    "ValueKind",
    "cluster_from_dict",
    "cluster_names",
    "cluster_to_dict",
    "device_names",
    "load_cluster",
    "load_device",
]
