"""Where the numbers come from: every figure of a device or a cluster with its kind and source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autoparallel.profiles.hardware import Cluster, Device, Level, Provenance
from autoparallel.report.numbers import bandwidth, seconds, significant

_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure as text, and how it is known; `main` ones are not the cost model's inner constants."""

    name: str
    value: str
    kind: str
    source: str
    main: bool


def device_figures(device: Device) -> tuple[Figure, ...]:
    """Every figure of a device, what its data sheet is known for first."""
    known = device.provenance
    figures = [
        _figure("memory", f"{significant(device.memory_bytes / _GB)} GB", known, "memory.bytes"),
        _figure(
            "memory kept in reserve",
            f"{significant(device.reserve_bytes / _GB)} GB",
            known,
            "memory.reserve_bytes",
        ),
        _figure("memory bandwidth", bandwidth(device.hbm_bytes_per_s), known, "hbm_bytes_per_s"),
    ]
    for dtype, peak in device.peak_flops.items():
        text = f"{significant(peak / 1e12)} Tflop/s"
        figures.append(_figure(f"dense peak, {dtype}", text, known, f"peak_flops.{dtype}"))
    for key, value in device.constants.items():
        figures.append(_figure(key, f"{value:g}", known, f"constants.{key}", main=False))
    return tuple(figures)


def cluster_figures(cluster: Cluster) -> tuple[Figure, ...]:
    """The figures of a cluster's network levels; of an irregular network, those of its links."""
    levels = cluster.levels if cluster.network is None else cluster.levels[:-1]
    found = [f for i, level in enumerate(levels) for f in _level_figures(i, level, cluster.provenance)]
    return (*found, *_link_figures(cluster))


def _link_figures(cluster: Cluster) -> Iterator[Figure]:
    if cluster.network is None:
        return
    fabric, known = cluster.network.fabric, cluster.provenance
    for i, link in enumerate(fabric.links):
        name, key = " - ".join(map(fabric.name, link.ends)), f"network.{i}"
        rate = bandwidth(link.bytes_per_s)
        yield _figure(f"{name}: bandwidth in each direction", rate, known, f"{key}.bytes_per_s")
        yield _figure(f"{name}: latency", seconds(link.latency_s), known, f"{key}.latency_s")


def _level_figures(index: int, level: Level, known: Mapping[str, Provenance]) -> Iterator[Figure]:
    key = f"level.{index}"
    rate = bandwidth(level.bytes_per_s)
    yield _figure(f"{level.name}: bandwidth per device and direction", rate, known, f"{key}.bytes_per_s")
    yield _figure(f"{level.name}: latency", seconds(level.latency_s), known, f"{key}.latency_s")
    if level.oversubscription != 1.0:
        text = f"{level.oversubscription:g} : 1"
        yield _figure(f"{level.name}: oversubscription", text, known, f"{key}.oversubscription")


def _figure(name: str, value: str, known: Mapping[str, Provenance], key: str, main: bool = True) -> Figure:
    origin = known.get(key)
    kind = str(origin.kind) if origin else "user"
    return Figure(name=name, value=value, kind=kind, source=origin.source if origin else "", main=main)


def kinds(cluster: Cluster) -> Mapping[str, int]:
    """How many figures of the devices and the network are of each kind."""
    counts: dict[str, int] = {}
    devices = {group.device.name: group.device for group in cluster.groups}
    for figure in (*cluster_figures(cluster), *(f for d in devices.values() for f in device_figures(d))):
        counts[figure.kind] = counts.get(figure.kind, 0) + 1
    return dict(sorted(counts.items()))
