"""Where each mesh axis sits, and what of the network its groups get there."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoparallel.costmodel.links import CHAIN, RING, narrowest
from autoparallel.costmodel.topology import crossings
from autoparallel.planner.expand.axes import EXPERTS, mesh_axes
from autoparallel.planner.strategy.machines import machines
from autoparallel.planner.strategy.runs import runs
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles.hardware import Cluster, Level
from autoparallel.report.numbers import bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a mesh axis sits: `size` ranks, neighbours `stride` devices apart, that talk over `level`; on an irregular
    network `link` is what its groups fill first."""

    axis: str
    size: int
    stride: int
    level: Level
    link: tuple[str, str] | None = None


def places(strategy: Strategy, cluster: Cluster) -> tuple[Place, ...]:
    """The axes larger than one, outermost first, with the network level that each one's traffic crosses; then `ep`, whose
    ranks are the innermost ones of tp, cp and dp_shard."""
    cluster, strategy = machines(cluster, strategy)
    stride, found = 1, []
    for axis in reversed(strategy.mesh.order):
        size: int = getattr(strategy.mesh, axis)
        if size > 1:
            place = Place(axis=axis, size=size, stride=stride, level=_level(size * stride, cluster))
            found.append(_on_links(place, strategy, cluster))
        stride *= size
    return (*reversed(found), *_experts(strategy, cluster))


def _experts(strategy: Strategy, cluster: Cluster) -> tuple[Place, ...]:
    parts = [axis for axis in mesh_axes(strategy) if axis.name == EXPERTS and axis.size > 1]
    if not parts:
        return ()
    span = max(part.size * part.stride for part in parts)
    near = min(part.stride for part in parts)
    place = Place(axis=EXPERTS, size=strategy.mesh.ep, stride=near, level=_level(span, cluster))
    return (_on_links(place, strategy, cluster),)


def _level(span: int, cluster: Cluster) -> Level:
    return next((level for level in cluster.levels if level.size >= span), cluster.levels[-1])


def _on_links(place: Place, strategy: Strategy, cluster: Cluster) -> Place:
    """The place with what the links that it crosses leave each device."""
    network = cluster.network
    if network is None or len(network.placement) == 1 or place.level is not cluster.levels[-1]:
        return place
    axes = tuple(a for a in mesh_axes(strategy) if a.name == place.axis)
    pattern = CHAIN if place.axis == "pp" else RING
    far = crossings((place.axis,), axes, cluster, pattern)[-1]
    if far.index < len(cluster.levels) - 1:
        return place
    link = narrowest(network, axes, far.inside, pattern)
    return replace(place, level=far.level, link=link)


def placement_setting(strategy: Strategy) -> str:
    """The keys that say which nodes take part."""
    mesh = strategy.mesh
    words = [f"placement = {runs(mesh.placement)}"] if mesh.placement else []
    return ", ".join([*words, f"per_node = {mesh.per_node}"] if mesh.per_node else words)


def placement_words(strategy: Strategy, cluster: Cluster) -> str:
    """Which nodes take the mesh in which order, and the narrowest link of each axis that leaves a node; "" where
    nothing had to be placed."""
    mesh = strategy.mesh
    if not mesh.placement and not mesh.per_node:
        return ""
    each = f"{mesh.per_node} devices of " if mesh.per_node else ""
    nodes = runs(mesh.placement)[1:-1] or "all"
    found = [
        f"{place.axis} at {bandwidth(place.level.bytes_per_s)} per device, held by {' - '.join(place.link)}"
        for place in places(strategy, cluster)
        if place.link is not None
    ]
    return "; ".join([f"{each}nodes {nodes} in rank order", *found])
