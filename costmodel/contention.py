"""What two collectives that run at once take from each other on a level of the network that both cross.

A collective keeps its port of a level busy for a share of its time: its bytes over what the port carries, over the
seconds that it takes. Its own narrowest level it fills nearly, wider ones in part, and while it waits for latencies
none. Two that ask for more than a port has share it: each takes longer by what they ask for beyond all of it,

    excess = max over levels of max(0, share + share' - 1)

so that both together take at least as long as the longer one alone and at most as long as one after the other.
Kind: formula; fair sharing of a link, as max-min fairness gives two flows (Bertsekas and Gallager, Data Networks,
section 6.5).
"""

from __future__ import annotations

from collections.abc import Sequence

from autoparallel.costmodel.compression import wire_bytes
from autoparallel.costmodel.links import pattern_of
from autoparallel.costmodel.program import Axis, Collective, CollectiveOp
from autoparallel.costmodel.topology import Crossing, crossings
from autoparallel.profiles.hardware import Cluster

Shares = tuple[float, ...]  # by level of the cluster, innermost first


def port_shares(collective: Collective, axes: Sequence[Axis], cluster: Cluster, seconds: float) -> Shares:
    """The share of its `seconds` in which a collective keeps its port of each level busy; 0 where it crosses none."""
    found = [0.0] * len(cluster.levels)
    if seconds <= 0.0:
        return tuple(found)
    path = crossings(collective.axes, axes, cluster, pattern_of(collective))
    for crossing in path:
        ranks = path[-1].inside * path[-1].fan
        busy_s = _sent_bytes(collective, crossing, ranks) / crossing.port_bytes_per_s
        found[crossing.index] = min(1.0, busy_s / seconds)
    return tuple(found)


def _sent_bytes(collective: Collective, crossing: Crossing, ranks: int) -> float:
    """Bytes that a group sends through one of its ports of a level."""
    methods, index = collective.compression, crossing.index
    size = float(collective.size_bytes)
    if index < len(methods):
        size = wire_bytes(methods[index], size, collective.item_bytes)
    if collective.op is CollectiveOp.ALL_TO_ALL:  # each of the members inside sends of its own
        return crossing.inside * size * (ranks - crossing.inside) / ranks
    if collective.op in (CollectiveOp.SEND, CollectiveOp.BROADCAST):
        return size
    rounds = 2 if collective.op is CollectiveOp.ALL_REDUCE else 1
    return rounds * size * (ranks - 1) / ranks


def excess(one: Shares, other: Shares) -> float:
    """Further time, as a share, that each of two collectives takes while both run: between 0 and 1."""
    return max((max(0.0, a + b - 1.0) for a, b in zip(one, other, strict=False)), default=0.0)
