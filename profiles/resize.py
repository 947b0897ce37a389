"""The same cluster with more or fewer devices: what is left of it, or has come back."""

from __future__ import annotations

import re
from dataclasses import replace

from autoparallel.errors import UserError
from autoparallel.profiles.hardware import Cluster
from autoparallel.profiles.load import device_names, load_cluster

_SPEC = re.compile(r"(?P<device>.+):\d+x\d+")


def resized(cluster: Cluster, devices: int, per_node: int) -> Cluster:
    """`cluster` with `devices` devices, `per_node` of them in a node.

    Raises UserError where it has several kinds of nodes, or a network of its own: which are left is not known then.
    """
    if cluster.devices == devices:
        return cluster
    spec = _SPEC.fullmatch(cluster.name)
    if spec and spec["device"] in device_names() and devices % per_node == 0:
        again = load_cluster(f"{spec['device']}:{devices // per_node}x{per_node}")
        return replace(again, failures=cluster.failures)
    if len(cluster.groups) > 1 or cluster.network is not None:
        raise UserError(
            f"{cluster.name} has {cluster.devices} devices of several kinds or places, and {devices} are here: which they "
            "are is not known; pass cluster= that says so"
        )
    group = cluster.groups[0]
    full, rest = divmod(devices, group.devices_per_node)
    if full:
        short = ((full, rest),) if rest else ()
        group = replace(group, nodes=full + bool(rest), short=short)
    else:
        group = replace(group, nodes=1, devices_per_node=rest, short=())
    return replace(cluster, name=f"{cluster.name}, {devices} devices", groups=(group,))
