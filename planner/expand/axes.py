"""The mesh axes of a strategy on the topology, and the groups that expert parallelism makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from autoparallel.costmodel.program import Axis
from autoparallel.costmodel.topology import crossings
from autoparallel.planner.strategy.types import Mesh, Strategy
from autoparallel.profiles.hardware import Cluster

EXPERTS = "ep"  # ranks that hold different experts
EXPERT_SHARD = "expert_shard"  # ranks that hold the same experts, which ZeRO shards over
SECONDARY = "secondary"  # ranks of dp_shard that share a second copy of the parameters
INNER = ("tp", "cp", EXPERTS)
EXPERT_AXES = ("tp", "cp", "dp_shard")  # in the order in which ranks of different experts are taken from them


def expert_parts(mesh: Mesh) -> dict[str, int]:
    """How many ranks of each axis hold different experts: as much of the first of `EXPERT_AXES` as divides ep, then of the
    next. They are the innermost ranks of the axis; those further out hold the same experts."""
    rest, parts = mesh.ep, {}
    for name in EXPERT_AXES:
        parts[name] = gcd(rest, getattr(mesh, name))
        rest //= parts[name]
    return parts


def mesh_axes(strategy: Strategy) -> tuple[Axis, ...]:
    """The axes of a strategy's mesh, and the derived axis `secondary` where it has one."""
    axes, ranks = axes_of(strategy.mesh), strategy.shard.secondary
    if ranks < 2:
        return axes
    shared = next(axis for axis in axes if axis.name == "dp_shard")
    return (*axes, Axis(name=SECONDARY, size=ranks, stride=shared.stride, derived=True))


def axes_of(mesh: Mesh) -> tuple[Axis, ...]:
    """The mesh axes, outermost first, with their strides: the innermost axis joins neighbouring devices. With
    mesh.ep > 1 the derived axes `ep` and `expert_shard` follow, inner parts first."""
    parts = expert_parts(mesh) if mesh.ep > 1 else {}
    stride, found, derived = 1, list[Axis](), list[Axis]()
    for name in reversed(mesh.order):
        size = getattr(mesh, name)
        found.append(Axis(name=name, size=size, stride=stride))
        if name in parts:
            inner = parts[name]
            both = ((EXPERTS, inner, stride), (EXPERT_SHARD, size // inner, stride * inner))
            derived += [Axis(name=n, size=s, stride=d, derived=True) for n, s, d in both if s > 1]
        stride *= size
    return (*reversed(found), *derived)


def inner_axes(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """Those along which a block communicates while it computes."""
    return tuple(axis for axis in axes if axis.name in INNER and axis.size > 1)


def nearest_axes(mesh: Mesh, *, ordered: bool) -> tuple[Axis, ...]:
    """The inner axes where they cost least: neighbours, and cp right outside tp, unless the user `ordered` the axes."""
    axes = (("tp", mesh.tp, 1), ("cp", mesh.cp, 1 if ordered else mesh.tp), (EXPERTS, mesh.ep, 1))
    return inner_axes(
        [Axis(name=name, size=size, stride=stride, derived=name == EXPERTS) for name, size, stride in axes]
    )


def nearest_stride(axis: Axis, cluster: Cluster) -> int:
    """The smallest distance between neighbours along an axis that places it alike: its collectives then cost the
    same, and one tensor plan serves all such meshes."""
    there = crossings((axis.name,), (axis,), cluster)
    for stride in range(1, axis.stride):
        if (
            axis.stride % stride == 0
            and crossings((axis.name,), (replace(axis, stride=stride),), cluster) == there
        ):
            return stride
    return axis.stride


def tensor_stride(mesh: Mesh, cluster: Cluster) -> int:
    """`nearest_stride` of tensor parallelism; 1 without it."""
    axis = next(axis for axis in axes_of(mesh) if axis.name == "tp")
    return nearest_stride(axis, cluster) if axis.size > 1 else 1
