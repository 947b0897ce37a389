"""From checked file tables to `Device` and `Cluster`, and the clusters that `DEVICE:NODESxPER_NODE` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from autoparallel.errors import UserError
from autoparallel.profiles.constants import CONSTANTS, UNLESS_SET
from autoparallel.profiles.hardware import Cluster, Device, Group, Level, Provenance, Residual, ValueKind
from autoparallel.profiles.schema import (
    ClusterFile,
    DeviceFile,
    FigureTable,
    LevelTable,
    ProvenanceTable,
    check_figure,
    nearest,
)

DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4")
# Constants that are time on a processor, which processes that share it wait for. Kind: formula.
HOST_TIMES = ("launch_s.", "kernel.start_s", "optimizer.tensor_s", "collective.start_s.", "collective.host_s", "collective.peer_s")  # fmt: skip
ANY_SIZE = 2**31  # a box's outermost level takes any number of devices


class _Figures:
    """Takes values out of figures, checks their range and keeps their provenance."""

    def __init__(self, where: str, listed: Sequence[ProvenanceTable] = ()) -> None:
        self.where = where
        self.provenance: dict[str, Provenance] = {}
        self.listed = {key: Provenance(kind=e.kind, source=e.source) for e in listed for key in e.keys}

    def take(self, key: str, figure: FigureTable, *, least: float = 0.0, above: bool = True) -> float:
        value = figure.value
        if value < least or (above and value == least) or not isfinite(value):
            bound = "more than" if above else "at least"
            raise UserError(f"{self.where}: `{key}` = {value:g} must be {bound} {least:g}")
        known = Provenance(kind=figure.kind, source=figure.source or self.where)
        self.provenance[key] = self.listed.get(key, known) if figure.kind is ValueKind.USER else known
        return value

    def whole(self, key: str, figure: FigureTable) -> int:
        value = self.take(key, figure)
        if value != int(value):
            raise UserError(f"{self.where}: `{key}` = {value:g} must be a whole number")
        return int(value)


def build_device(table: DeviceFile, inherited: Mapping[str, Any], where: str) -> Device:
    """The device of a checked file; `inherited` are the constants of its architecture."""
    figures = _Figures(where, table.provenance)
    for dtype in table.peak_flops:
        if dtype not in DTYPES:
            hint = nearest(dtype, DTYPES)
            raise UserError(f"{where}: `peak_flops.{dtype}`: unknown dtype{hint}; known: {', '.join(DTYPES)}")
    constants = _completed(_constants(inherited, where) | _constants(table.constants, where))
    missing = sorted(set(CONSTANTS) - set(constants))
    if missing:
        raise UserError(
            f"{where}: constants missing: {', '.join(missing[:5])}{' …' if missing[5:] else ''}; "
            "name an `architecture` that has them"
        )
    box = table.box
    return Device(
        name=table.name,
        memory_bytes=figures.take("memory.bytes", table.memory.bytes),
        reserve_bytes=figures.take("memory.reserve_bytes", table.memory.reserve_bytes, above=False),
        peak_flops={d: figures.take(f"peak_flops.{d}", f) for d, f in table.peak_flops.items()},
        hbm_bytes_per_s=figures.take("hbm_bytes_per_s", table.hbm_bytes_per_s),
        devices_per_node=figures.whole("box.devices_per_node", box.devices_per_node),
        levels=_levels(box.levels, "box.levels", figures),
        constants={
            key: figures.take(f"constants.{key}", figure, above=False)
            for key, figure in sorted(constants.items())
        },
        cores=figures.whole("box.cores", box.cores) if box.cores else 0,
        provenance=figures.provenance,
        residuals={name: Residual(**r.model_dump()) for name, r in table.residuals.items()},
    )


def constant_keys(tree: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The dotted keys of a file's constants."""
    return tuple(_constants(tree, where))


def build_cluster(table: ClusterFile, devices: Sequence[Device], where: str) -> Cluster:
    """The cluster of a checked file whose groups hold `devices`."""
    figures = _Figures(where, table.provenance)
    groups = []
    for index, (group, device) in enumerate(zip(table.group, devices, strict=True)):
        key = f"group.{index}"
        price = group.price_per_device_hour
        per_node = figures.whole(f"{key}.devices_per_node", group.devices_per_node)
        groups.append(
            Group(
                device=shared_device(device, per_node),
                nodes=figures.whole(f"{key}.nodes", group.nodes),
                devices_per_node=per_node,
                price_per_device_hour=figures.take(f"{key}.price_per_device_hour", price, above=False)
                if price
                else None,
            )
        )
    count = sum(group.devices for group in groups)
    if table.level:
        levels = _levels(table.level, "level", figures)
        if levels[-1].size < count:
            raise UserError(
                f"{where}: the outermost level `{levels[-1].name}` joins {levels[-1].size} devices, "
                f"but the cluster has {count}; raise its size, or leave it out"
            )
        levels = _bounded(levels, count)
    else:
        levels = _box_levels(devices[0], groups[0].devices_per_node, count)
    return Cluster(
        name=table.name or where, groups=tuple(groups), levels=levels, provenance=figures.provenance
    )


def cluster_of(device: Device, nodes: int, per_node: int, spec: str) -> Cluster:
    """`DEVICE:NODESxPER_NODE`: nodes of the device's usual box and network.

    With fewer devices per node than the box holds, each keeps its own share of the node's NICs.
    """
    if nodes < 1 or per_node < 1:
        raise UserError(
            f"cluster `{spec}`: needs at least one node of one device, such as `{device.name}:1x1`"
        )
    if per_node > device.devices_per_node:
        usual = device.devices_per_node
        raise UserError(
            f"cluster `{spec}`: a box of {device.name} holds {usual} devices, not {per_node}; write "
            f"`{device.name}:{-(-nodes * per_node // usual)}x{usual}`, or describe the box in a cluster file"
        )
    group = Group(device=shared_device(device, per_node), nodes=nodes, devices_per_node=per_node)
    levels = _box_levels(device, per_node, nodes * per_node)
    provenance = {
        key.replace("box.levels", "level"): value
        for key, value in device.provenance.items()
        if key.startswith("box.levels")
    }
    return Cluster(name=spec, groups=(group,), levels=levels, provenance=provenance)


def only_group(cluster: Cluster, index: int) -> Cluster:
    """One device group of a cluster, joined by the levels that it needs."""
    group = cluster.groups[index]
    return replace(cluster, groups=(group,), levels=_bounded(cluster.levels, group.devices))


def grown(cluster: Cluster, nodes: int, per_node: int) -> Cluster:
    """A cluster of one node as `nodes` nodes of `per_node` of its devices: its own levels, then those of the
    device's usual network."""
    (group,) = cluster.groups
    count = nodes * per_node
    inside = tuple(
        replace(level, size=per_node) if level is cluster.levels[-1] else level for level in cluster.levels
    )
    usual = [
        replace(level, size=max(level.size // group.device.devices_per_node, 1) * per_node)
        for level in group.device.levels
        if level.size > group.device.devices_per_node
    ]
    bigger = replace(group, nodes=nodes, devices_per_node=per_node)
    return replace(cluster, groups=(bigger,), levels=_bounded((*inside, *usual), count))


def shared_device(device: Device, per_node: int) -> Device:
    """A node's devices that outnumber its cores share its compute and memory bandwidth evenly.

    What takes the host's time takes longer likewise, and a collective beside computation takes its time from it.
    """
    if not device.cores or per_node <= device.cores:
        return device
    share = device.cores / per_node
    return replace(
        device,
        peak_flops={dtype: peak * share for dtype, peak in device.peak_flops.items()},
        hbm_bytes_per_s=device.hbm_bytes_per_s * share,
        constants={key: _shared_constant(key, value, share) for key, value in device.constants.items()},
        cores=0,
    )


def _shared_constant(key: str, value: float, share: float) -> float:
    if key.startswith("overlap."):
        return max(value, 1.0)
    return value / share if key.startswith(HOST_TIMES) else value


def _levels(tables: Sequence[LevelTable], prefix: str, figures: _Figures) -> tuple[Level, ...]:
    levels: list[Level] = []
    for index, table in enumerate(tables):
        key = f"{prefix}.{index}"
        if table.size is None and index + 1 < len(tables):
            raise UserError(f"{figures.where}: `{key}.size` is missing; only the outermost level may lack it")
        size = figures.whole(f"{key}.size", table.size) if table.size else ANY_SIZE
        if levels and (size <= levels[-1].size or (table.size and size % levels[-1].size)):
            raise UserError(
                f"{figures.where}: `{key}.size` = {size} must be a multiple of the size of the level "
                f"inside it, {levels[-1].size}"
            )
        over = table.oversubscription
        levels.append(
            Level(
                name=table.name,
                size=size,
                bytes_per_s=figures.take(f"{key}.bytes_per_s", table.bytes_per_s),
                latency_s=figures.take(f"{key}.latency_s", table.latency_s, above=False),
                oversubscription=figures.take(f"{key}.oversubscription", over, least=1.0, above=False)
                if over
                else 1.0,
                in_network_reduction=table.in_network_reduction,
                nics=figures.whole(f"{key}.nics", table.nics) if table.nics else 0,
            )
        )
    return tuple(levels)


def _box_levels(device: Device, per_node: int, count: int) -> tuple[Level, ...]:
    """The box's levels for nodes that hold `per_node` devices: a level of whole nodes keeps its nodes.

    Processes that outnumber their node's cores also take turns to communicate.
    """
    box = device.devices_per_node
    share = min(1.0, device.cores / per_node) if device.cores else 1.0
    scaled = [
        replace(level, size=min(level.size, per_node) if level.size <= box else level.size // box * per_node)
        for level in device.levels
    ]
    turns = [
        replace(level, bytes_per_s=level.bytes_per_s * share, latency_s=level.latency_s / share)
        for level in scaled
    ]
    return _bounded(tuple(turns), count)


def _bounded(levels: tuple[Level, ...], count: int) -> tuple[Level, ...]:
    """Levels up to the first that holds all `count` devices, which then holds just these."""
    kept: list[Level] = []
    for level in levels:
        if kept and (kept[-1].size >= count or level.size <= kept[-1].size):
            continue
        kept.append(level)
    return (*kept[:-1], replace(kept[-1], size=count))


def _completed(constants: dict[str, FigureTable]) -> dict[str, FigureTable]:
    """With the constants that no file sets but that have a value then."""
    found = dict(constants)
    for key, default in UNLESS_SET.items():
        if key in found:
            continue
        if not isinstance(default, str):
            found[key] = FigureTable(value=default, kind=ValueKind.FORMULA, source="not set")
        elif default in found:
            found[key] = found[default].model_copy()
    return found


def _constants(tree: Mapping[str, Any], where: str, prefix: str = "") -> dict[str, FigureTable]:
    """Nested tables of figures, by dotted key."""
    found: dict[str, FigureTable] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and "value" not in value:
            found |= _constants(value, where, f"{key}.")
            continue
        if key not in CONSTANTS:
            raise UserError(f"{where}: unknown key `constants.{key}`{nearest(key, CONSTANTS)}")
        found[key] = check_figure(value, f"{where}: `constants.{key}`")
    return found
