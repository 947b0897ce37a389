"""From checked file tables to `Device` and `Cluster`, and the clusters that `DEVICE:NODESxPER_NODE` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd
from typing import Any

from autoparallel.errors import UserError
from autoparallel.profiles.constants import CONSTANTS, DIVISORS, UNLESS_SET, UNSTATED
from autoparallel.profiles.figures import Figures
from autoparallel.profiles.hardware import (
    ANY_SIZE,
    Cluster,
    Device,
    Failures,
    Group,
    Level,
    Posterior,
    Residual,
    ValueKind,
)
from autoparallel.profiles.network import with_network
from autoparallel.profiles.parts import at_nodes, bounded, evenly_filled
from autoparallel.profiles.schema import (
    ClusterFile,
    DeviceFile,
    FailuresTable,
    FigureTable,
    GroupTable,
    LevelTable,
    PosteriorTable,
    check_figure,
    nearest,
)

DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4")
# More than any machine has: planning for so many takes ten seconds, for a thousand times as many no machine's memory.
MOST_DEVICES = 2**20
# Constants that are time on a processor, which processes that share it wait for. Kind: formula.
HOST_TIMES = ("launch_s.", "kernel.start_s", "optimizer.tensor_s", "collective.start_s.", "collective.host_s", "collective.peer_s")  # fmt: skip


def build_device(
    table: DeviceFile, inherited: Sequence[Mapping[str, Any]], where: str, *, publishers: int = 0
) -> Device:
    """The device of a checked file; `inherited` are the constants of its architecture, which saw rows of so many
    `publishers`, and of those that it is like, nearest first."""
    figures = Figures(where, table.provenance)
    for dtype in table.peak_flops:
        if dtype not in DTYPES:
            hint = nearest(dtype, DTYPES)
            raise UserError(f"{where}: `peak_flops.{dtype}`: unknown dtype{hint}; known: {', '.join(DTYPES)}")
    stated: dict[str, FigureTable] = {}
    for tree in (*reversed(inherited), table.constants):
        stated |= _constants(tree, where)
    constants = _completed(stated)
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
        peak_flops={d: figures.rate(f"peak_flops.{d}", f) for d, f in table.peak_flops.items()},
        hbm_bytes_per_s=figures.rate("hbm_bytes_per_s", table.hbm_bytes_per_s),
        devices_per_node=figures.whole("box.devices_per_node", box.devices_per_node),
        levels=_levels(box.levels, "box.levels", figures),
        constants={
            key: figures.take(
                f"constants.{key}", figure, above="efficiency" in key or key.startswith(DIVISORS)
            )
            for key, figure in sorted(constants.items())
        },
        cores=figures.whole("box.cores", box.cores) if box.cores else 0,
        provenance=figures.provenance,
        residuals={name: Residual(**r.model_dump()) for name, r in table.residuals.items()},
        posterior=_posterior(table.posterior),
        publishers=publishers,
    )


def _posterior(table: PosteriorTable | None) -> Posterior | None:
    """What `calibrate` wrote."""
    if table is None:
        return None
    return Posterior(
        parts=tuple(table.parts),
        covariance=tuple(map(tuple, table.covariance)),
        rows=table.rows,
        noise=table.noise,
    )


def constant_keys(tree: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The dotted keys of a file's constants."""
    return tuple(_constants(tree, where))


def build_cluster(table: ClusterFile, devices: Sequence[Device], where: str) -> Cluster:
    """The cluster of a checked file whose groups hold `devices`."""
    figures = Figures(where, table.provenance)
    groups = tuple(
        _group(group, device, f"group.{index}", figures)
        for index, (group, device) in enumerate(zip(table.group, devices, strict=True))
    )
    if len({group.device.name for group in groups}) > 1 and any(group.short for group in groups):
        raise UserError(
            f"{where}: `short` among several kinds of device is not planned; give the short nodes a [[group]] of "
            "their own with fewer devices_per_node"
        )
    count = sum(group.devices for group in groups)
    irregular = bool(table.switch or table.link)
    if table.level:
        levels = _inside_nodes(_levels(table.level, "level", figures), groups)
        if levels[-1].size < count and not irregular:
            raise UserError(
                f"{where}: the outermost level `{levels[-1].name}` joins {levels[-1].size} devices, "
                f"but the cluster has {count}; raise its size, or leave it out"
            )
    else:
        common = gcd(*(group.devices_per_node for group in groups))
        levels = _box_levels(devices[0], common, count)
        groups = tuple(group if group.devices_per_node == common else _joined(group) for group in groups)
    failures = _failures(table.failures, figures) if table.failures is not None else None
    cluster = Cluster(
        name=table.name or where,
        groups=groups,
        levels=levels,
        provenance=figures.provenance,
        failures=failures,
    )
    if irregular:
        return with_network(cluster, table, figures)
    if table.nics is not None:
        raise UserError(
            f"{where}: `nics` here counts a node's ports to [[switch]]es and [[link]]s; there is none"
        )
    return replace(cluster, levels=bounded(levels, count))


def _failures(table: FailuresTable, figures: Figures) -> Failures:
    given = {name: getattr(table, name) for name in FailuresTable.model_fields}
    return Failures(**{n: figures.take(f"failures.{n}", f) for n, f in given.items() if f is not None})


def _joined(group: Group) -> Group:
    """The group with its box's levels as its own, where it states none: those of the cluster are of smaller nodes."""
    own = group.levels or _box_levels(group.device, group.devices_per_node, group.devices)
    return replace(group, levels=own)


def _inside_nodes(levels: tuple[Level, ...], groups: Sequence[Group]) -> tuple[Level, ...]:
    """The levels of a file whose nodes hold fewer devices than their usual box: a level no larger than that box ends at
    the node, for it is the box's own (NVLink, PCI Express) and joins no two nodes."""
    box = min(group.device.devices_per_node for group in groups)
    most = max(group.devices_per_node for group in groups)
    inner = tuple(replace(level, size=most) if most < level.size <= box else level for level in levels[:-1])
    return (*inner, levels[-1])


def _group(table: GroupTable, device: Device, key: str, figures: Figures) -> Group:
    price, nodes = table.price_per_device_hour, figures.whole(f"{key}.nodes", table.nodes)
    per_node = figures.whole(f"{key}.devices_per_node", table.devices_per_node)
    _check_count(nodes * per_node, f"{figures.where}: `{key}`")
    short: dict[int, int] = {}
    for name, figure in table.short.items():
        if not name.isdecimal() or int(name) >= nodes:
            raise UserError(
                f"{figures.where}: `{key}.short.{name}`: the group has the nodes 0 to {nodes - 1}; write for "
                f"instance short = {{ {nodes - 1} = {per_node - 1} }}"
            )
        left = figures.whole(f"{key}.short.{name}", figure, above=False)
        if left > per_node:
            raise UserError(
                f"{figures.where}: `{key}.short.{name}` = {left} is more than a node's {per_node} devices"
            )
        short |= {int(name): left} if left < per_node else {}
    own = bounded(_levels(table.level, f"{key}.level", figures), nodes * per_node) if table.level else ()
    return Group(
        device=shared_device(device, per_node),
        nodes=nodes,
        devices_per_node=per_node,
        price_per_device_hour=figures.take(f"{key}.price_per_device_hour", price, above=False)
        if price
        else None,
        short=tuple(sorted(short.items())),
        levels=own,
    )


def cluster_of(device: Device, nodes: int, per_node: int, spec: str) -> Cluster:
    """`DEVICE:NODESxPER_NODE`: nodes of the device's usual box and network.

    With fewer devices per node than the box holds, each keeps its own share of the node's NICs.
    """
    if nodes < 1 or per_node < 1:
        raise UserError(
            f"cluster `{spec}`: needs at least one node of one device, such as `{device.name}:1x1`"
        )
    _check_count(nodes * per_node, f"cluster `{spec}`")
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


def _check_count(devices: int, where: str) -> None:
    if devices > MOST_DEVICES:
        raise UserError(
            f"{where}: {devices:,} devices are more than the {MOST_DEVICES:,} that can be planned for; name a part of them"
        )


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


def _levels(tables: Sequence[LevelTable], prefix: str, figures: Figures) -> tuple[Level, ...]:
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
                bytes_per_s=figures.rate(f"{key}.bytes_per_s", table.bytes_per_s),
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
    share = min(1.0, device.cores / per_node) if device.cores else 1.0
    turns = [
        replace(level, bytes_per_s=level.bytes_per_s * share, latency_s=level.latency_s / share)
        for level in at_nodes(device.levels, device.devices_per_node, per_node)
    ]
    return bounded(evenly_filled(turns, count), count)


def _completed(constants: dict[str, FigureTable]) -> dict[str, FigureTable]:
    """With the constants that no file sets but that have a value then."""
    found = dict(constants)
    for key, default in UNLESS_SET.items():
        if key in found:
            continue
        if not isinstance(default, str):
            found[key] = FigureTable(value=default, kind=ValueKind.FORMULA, source=UNSTATED)
        elif default in found:
            found[key] = found[default].model_copy()
            if found[key].kind is ValueKind.USER:  # a bare number, whose source is listed under its own key
                found[key] = FigureTable(
                    value=found[key].value, kind=ValueKind.FORMULA, source=f"as {default}"
                )
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
