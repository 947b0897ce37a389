"""Hardware and cluster descriptions: TOML data and the loader that checks it.

- `hardware.py`: `Device` and `Cluster`, as the rest of the house knows them.
- `load.py`: from a name, a file or DEVICE:NODESxPER_NODE to these: `schema.py` checks keys and types, `figures.py` ranges
  and provenance, `constants.py` lists the cost model's own; `build.py` and `network.py` make the data of them.
- `stacks.py`: software stacks, likewise from TOML.
- `parts.py`: nodes and groups of a cluster as clusters of their own.
- `resize.py`: a cluster with more or fewer devices.
- `csv_rows.py`: rows of a CSV with named columns, which users hand in.
- `convert.py`, `write.py`: back to plain tables and to files; `record.py`: as strategy files keep them; `likest.py`: the profile that suits a device's name.
"""

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
