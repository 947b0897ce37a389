"""Devices, network levels and clusters, as frozen data in SI units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

ANY_SIZE = 2**31  # a box's outermost level takes any number of devices


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """What measured steps left unknown of a device: the covariance of the logarithms of its parts' factors
    (`costmodel/parts.py`), after so many rows, each with so much noise."""

    parts: tuple[str, ...]
    covariance: tuple[tuple[float, ...], ...]
    rows: int
    noise: float


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
    posterior: Posterior | None = field(default=None, compare=False)  # of `calibrate`
    publishers: int = field(default=0, compare=False)  # whose training rows its architecture's constants saw
    cores: int = 0  # more devices in a node than this share its compute; 0: each has its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Equal nodes of one device; `short` names those that lack some, and how many devices they have."""

    device: Device
    nodes: int
    devices_per_node: int
    price_per_device_hour: float | None = None
    short: tuple[tuple[int, int], ...] = ()  # (node of the group, its devices), ascending
    levels: tuple[Level, ...] = ()  # its own network, where it is used alone; empty: the cluster's

    @property
    def devices(self) -> int:
        return sum(self.devices_of_nodes)

    @property
    def devices_of_nodes(self) -> tuple[int, ...]:
        short = dict(self.short)
        return tuple(short.get(node, self.devices_per_node) for node in range(self.nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A cable, both ways alike: `ends` are nodes 0, 1, … of the cluster and, after them, switches."""

    ends: tuple[int, int]
    bytes_per_s: float  # in each direction, of the whole cable
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """An irregular network: nodes and switches, and what joins them."""

    nodes: int
    switches: tuple[str, ...]
    links: tuple[Link, ...]

    def name(self, end: int) -> str:
        """`node-3`, or the name of a switch."""
        return f"node-{end}" if end < self.nodes else self.switches[end - self.nodes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The most that any placement gives so many groups of `fan` nodes that talk in a `pattern`
    (costmodel/links.py)."""

    pattern: str
    fan: int
    groups: int
    bytes_per_s: float  # of one flow between neighbours
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A fabric with the devices on it: `placement` names the node of each block of devices, in rank order, and
    `devices` the size of each block.

    `reach` says what the best placement gives; `unplaced`, for bounds, that this counts and no placement.
    """

    fabric: Fabric
    placement: tuple[int, ...]
    devices: tuple[int, ...]
    reach: tuple[Reach, ...] = ()
    unplaced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """How often devices fail (hours between failures of one), and what goes on from there: the storage's bandwidth for the
    whole cluster, seconds until a failure is noticed, until processes run again, and until a failed node is back."""

    mtbf_hours_per_device: float
    storage_bytes_per_s: float
    detect_s: float = 30.0  # Kind: chosen; the time-out of a long action
    restart_s: float = 60.0  # Kind: chosen; starting processes and connecting them
    replace_s: float = 1800.0  # Kind: chosen; a reboot, or a node from the pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Groups of devices, and the network levels that join them, innermost first."""

    name: str
    groups: tuple[Group, ...]
    levels: tuple[Level, ...]
    provenance: Mapping[str, Provenance] = field(
        default_factory=dict, compare=False
    )  # of the levels' figures
    network: Network | None = None  # what stands behind the outermost level, where that is irregular
    failures: Failures | None = None
    crossed: dict[object, Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )  # what `costmodel.topology.crossings` found: every price of a collective asks for it

    @property
    def nodes(self) -> int:
        return sum(group.nodes for group in self.groups)

    @property
    def devices(self) -> int:
        return sum(group.devices for group in self.groups)

    @property
    def device(self) -> Device:
        """The device of a cluster that has one kind of device; the slowest in bf16 otherwise."""
        return min((g.device for g in self.groups), key=lambda d: max(d.peak_flops.values()))
