"""Where the group of a collective sits on the network levels of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from autoparallel.costmodel.links import RING, linked, meets_again
from autoparallel.costmodel.program import Axis
from autoparallel.errors import UserError
from autoparallel.profiles.hardware import Cluster, Level


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A level that the group crosses.

    `inside` members share one port of it, `fan` of its ports take part. `device_bytes_per_s` is one device's
    share of its port while every device of the node communicates; a group's members in a port add up.
    """

    index: int
    level: Level
    inside: int
    fan: int
    device_bytes_per_s: float

    @property
    def port_bytes_per_s(self) -> float:
        """What the group may send through one port."""
        return self.device_bytes_per_s * self.inside


def ranks_of(names: Sequence[str], axes: Sequence[Axis]) -> int:
    """Number of ranks in a group along the named axes."""
    return prod(axis.size for axis in axes if axis.name in names)


def crossings(
    names: Sequence[str],
    axes: Sequence[Axis],
    cluster: Cluster,
    pattern: str = RING,
) -> tuple[Crossing, ...]:
    """The levels that a group along the named axes crosses, innermost first; none for one rank.

    An axis of stride s has as many neighbours in a unit of L devices as the largest divisor d of its size
    with d * s dividing L: where groups do not line up with units, the worst placed group counts. What an
    irregular network gives depends on who talks to whom (`pattern`).
    """
    members = tuple(axis for axis in axes if axis.name in names and axis.size > 1)
    key = (*((axis.size, axis.stride) for axis in members), pattern)
    if (known := cluster.crossed.get(key)) is None:
        known = cluster.crossed[key] = _crossings(members, cluster, pattern)
    return known


def _crossings(members: Sequence[Axis], cluster: Cluster, pattern: str) -> tuple[Crossing, ...]:
    found: list[Crossing] = []
    inside = 1
    for index, level in enumerate(cluster.levels):
        within = 1
        outermost = index == len(cluster.levels) - 1
        for axis in members:
            whole = outermost and axis.stride * axis.size <= level.size
            within *= axis.size if whole else _aligned(axis, level.size)
        within = max(within, inside)
        if within > inside:
            rate = _device_rate(cluster, index)
            found.append(
                Crossing(
                    index=index, level=level, inside=inside, fan=within // inside, device_bytes_per_s=rate
                )
            )
            inside = within
    names = [axis.name for axis in members]
    total = ranks_of(names, members)
    if inside < total:
        last = cluster.levels[-1]
        raise UserError(
            f"a group of {total} ranks over {'+'.join(names)} does not fit in cluster `{cluster.name}`: "
            f"its outermost level `{last.name}` joins {last.size} devices"
        )
    if cluster.network is not None and found and found[-1].index == len(cluster.levels) - 1:
        found[-1] = _on_links(found[-1], members, cluster, pattern)
    return tuple(found)


def _on_links(far: Crossing, members: Sequence[Axis], cluster: Cluster, pattern: str) -> Crossing:
    """The crossing of an irregular network, over the links that the groups really use."""
    assert cluster.network is not None
    ports = min(far.level.nics or max(cluster.network.devices), max(cluster.network.devices))
    found = linked(cluster.network, members, far.inside, far.fan, pattern, ports)
    if found is None or found.bytes_per_s == float("inf"):
        return far
    share = cluster.device.constants["collective.efficiency_outer"]
    level = replace(far.level, latency_s=found.latency_s, bytes_per_s=found.bytes_per_s)
    rate = found.bytes_per_s * share
    if far.index and meets_again(cluster.network, members, far.inside, pattern):
        rate = min(rate, _device_rate(cluster, len(cluster.levels) - 2))  # of the level that joins a node
    return replace(far, level=level, device_bytes_per_s=rate)


def _device_rate(cluster: Cluster, index: int) -> float:
    """What a collective gets of a level for each device, while all of them communicate."""
    level, constants = cluster.levels[index], cluster.device.constants
    share = constants["collective.efficiency_inner" if index == 0 else "collective.efficiency_outer"]
    return level.bytes_per_s * share / level.oversubscription


def message_bytes_per_s(far: Crossing, names: Sequence[str], axes: Sequence[Axis], cluster: Cluster) -> float:
    """What one device may send to its neighbour along the named axes, across `far`, their outermost level.

    Of a unit inside that level (a node) only those send whose neighbour is in another one: as many as the ranks
    that are inside the axis. They share the unit's ports, each at most one port: total / max(senders, ports).
    """
    if cluster.network is not None and far.index == len(cluster.levels) - 1:
        return far.device_bytes_per_s  # an irregular network has been asked for just that
    stride = min(axis.stride for axis in axes if axis.name in names and axis.size > 1)
    unit = cluster.levels[far.index - 1].size if far.index else 1
    ports = min(far.level.nics or unit, unit)
    return far.device_bytes_per_s * unit / max(min(stride, unit), ports)


def _aligned(axis: Axis, unit: int) -> int:
    if unit % (axis.stride * axis.size) == 0:
        return axis.size
    return max(
        (d for d in range(1, axis.size + 1) if axis.size % d == 0 and unit % (axis.stride * d) == 0),
        default=1,
    )


def best_placed(cluster: Cluster) -> Cluster:
    """The cluster as bounds see it: nobody has chosen which devices of an irregular network work together, and no level is slower
    than one further out, as the bus of a node is whose devices have fast links of their own."""
    network = cluster.network and replace(cluster.network, unplaced=True)
    levels: list[Level] = []
    for level in reversed(cluster.levels):
        outer = levels[0] if levels else level
        faster = replace(
            level, bytes_per_s=max(_rate(level), _rate(outer)), oversubscription=1.0,
            latency_s=min(level.latency_s, outer.latency_s),
            in_network_reduction=level.in_network_reduction or outer.in_network_reduction,
        )  # fmt: skip
        same = replace(level, bytes_per_s=_rate(level), oversubscription=1.0) == faster
        levels.insert(0, level if same else faster)
    return replace(cluster, levels=tuple(levels), network=network)


def slow_unit(cluster: Cluster) -> int:
    """Devices of the largest unit that is slower inside than some level further out; 0 where none is."""
    pairs = zip(cluster.levels, best_placed(cluster).levels, strict=True)
    return max((level.size for level, best in pairs if level != best), default=0)


def _rate(level: Level) -> float:
    """Bytes per second of each of many devices that reach through a level at once."""
    return level.bytes_per_s / level.oversubscription
