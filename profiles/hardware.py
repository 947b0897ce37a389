"""Devices, network levels and clusters, as frozen data in SI units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class ValueKind(StrEnum):
    """How a figure is known."""

    DATASHEET = "datasheet"
    MEASURED = "measured"
    FITTED = "fitted"
    FORMULA = "formula"
    USER = "user"  # written bare in a user's own file


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Kind and source of one figure."""

    kind: ValueKind
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of the network, innermost first: `size` devices below one port of it."""

    name: str
    size: int
    bytes_per_s: float  # per device and direction
    latency_s: float
    oversubscription: float = 1.0
    in_network_reduction: bool = False  # NVLink SHARP: the switch reduces
    nics: int = 0  # ports by which the devices of a unit inside reach this level; 0: one each


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """How well fitted figures say what was measured: relative errors of `samples` of one family."""

    samples: int
    mean_absolute_error: float
    p90_absolute_error: float
    bias: float


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, whole: memory, peaks, and the constants of the operator cost model.

    `constants` holds the cost model's own figures by dotted key (`gemm.sm_count`, `launch_s.eager`); each is
    documented where it is read. `provenance` has an entry for every figure.
    """

    name: str
    memory_bytes: float
    reserve_bytes: float
    peak_flops: Mapping[str, float] = field(hash=False)  # dense, by execution dtype
    hbm_bytes_per_s: float
    devices_per_node: int
    levels: tuple[Level, ...]  # of its usual box and network; the outermost takes any number of devices
    constants: Mapping[str, float] = field(default_factory=dict, hash=False)
    provenance: Mapping[str, Provenance] = field(default_factory=dict, compare=False)
    residuals: Mapping[str, Residual] = field(
        default_factory=dict, compare=False
    )  # by family of measurements
    cores: int = 0  # more devices in a node than this share its compute; 0: each has its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Equal nodes of one device."""

    device: Device
    nodes: int
    devices_per_node: int
    price_per_device_hour: float | None = None

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Groups of devices, and the network levels that join them, innermost first."""

    name: str
    groups: tuple[Group, ...]
    levels: tuple[Level, ...]
    provenance: Mapping[str, Provenance] = field(
        default_factory=dict, compare=False
    )  # of the levels' figures

    @property
    def devices(self) -> int:
        return sum(group.devices for group in self.groups)

    @property
    def device(self) -> Device:
        """The device of a cluster that has one kind of device; the slowest in bf16 otherwise."""
        return min((g.device for g in self.groups), key=lambda d: max(d.peak_flops.values()))
