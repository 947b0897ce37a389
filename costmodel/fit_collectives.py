"""Fits the network's constants to measured collectives.

What is fitted: bandwidth and hop latency of every level that a measured group crosses, the start of a collective
(the same for all protocols: measurements do not say which ran), what a send reaches of a ring's bandwidth, and for
each operation but all-reduce how the library's own way of doing it relates to the form that prices it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoparallel.costmodel.collectives import alone_collective_s
from autoparallel.costmodel.fit import Vector, least_logs, residual, with_constants
from autoparallel.costmodel.program import Axis, Collective, CollectiveOp
from autoparallel.costmodel.topology import crossings
from autoparallel.profiles.build import cluster_of
from autoparallel.profiles.constants import PROTOCOLS
from autoparallel.profiles.hardware import Cluster, Device, Level, Provenance, Residual, ValueKind

MOST_SLOWDOWN = 4.0  # what hardly moves beside the other may as well wait for it
STARTS = tuple(f"collective.start_s.{protocol}" for protocol in PROTOCOLS)


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """A group of `size` ranks, `stride` apart."""

    size: int
    stride: int

    def axis(self) -> Axis:
        """It as a mesh axis."""
        return Axis(name="all", size=self.size, stride=self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSample:
    """A measured collective: `size_bytes` is the full tensor, as in `program.Collective`.

    `seconds`: what a call of it takes in a training step; `quickest_s`: the quickest single call.
    """

    op: CollectiveOp
    size_bytes: int
    place: GroupPlace
    seconds: float
    quickest_s: float

    def predicted_s(self, cluster: Cluster) -> float:
        """Seconds by the cost model."""
        collective = Collective(op=self.op, axes=("all",), size_bytes=self.size_bytes)
        return alone_collective_s(collective, (self.place.axis(),), cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSample:
    """Computation and a longer queue of collectives, each alone and both started at once: seconds.

    `compute_beside_s`: until the computation ends where both are under way, all of it beside collectives; `both_s`: until
    the collectives end, too, the last of them alone.
    """

    compute_s: float
    collective_s: float
    compute_beside_s: float
    both_s: float

    @property
    def slowdowns(self) -> tuple[float, float]:
        """Further time of computation, and of the collectives, per second beside the other, as a share."""
        beside_s = self.compute_beside_s
        left_s = max(self.both_s - beside_s, 0.0)  # of the collectives, when the computation ends
        done_s = self.collective_s - left_s
        return _share(beside_s, self.compute_s), _share(beside_s, done_s)


def _share(beside_s: float, alone_s: float) -> float:
    """How much longer, between 0 and `MOST_SLOWDOWN`."""
    return min(max(beside_s - alone_s, 0.0) / max(alone_s, beside_s / (1 + MOST_SLOWDOWN)), MOST_SLOWDOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Nodes and processes on each of them that took part."""

    nodes: int
    per_node: int


def fit_collectives(
    device: Device, samples: Sequence[CollectiveSample], machine: Machine, *, source: str
) -> Device:
    """`device` with the constants of its network fitted, and their residuals by operation."""
    crossed = _crossed(device, samples, machine)
    factors = [f"collective.factor.{op}" for op in _operations(samples) if op != CollectiveOp.ALL_REDUCE]
    base = np.log(
        [
            *(device.levels[i].bytes_per_s for i in crossed),
            *(device.levels[i].latency_s for i in crossed),
            device.constants[STARTS[0]],
            *(device.constants[key] for key in factors),
        ]
    )

    def at(x: Vector) -> Device:
        values = [float(v) for v in np.exp(x)]
        levels = {i: (values[n], values[len(crossed) + n]) for n, i in enumerate(crossed)}
        rest = values[2 * len(crossed) :]
        constants = dict.fromkeys(STARTS, rest[0]) | dict(zip(factors, rest[1:], strict=True))
        return with_constants(replace(device, levels=_levels(device, levels)), constants)

    def predict(x: Vector) -> list[float]:
        cluster = cluster_of(at(x), machine.nodes, machine.per_node, "profiled")
        return [sample.predicted_s(cluster) for sample in samples]

    x = least_logs(base, predict, [s.seconds for s in samples])
    fitted = at(x)
    known = Provenance(kind=ValueKind.FITTED, source=f"{source}; {len(samples)} measurements of collectives")
    names = [f"box.levels.{i}.{key}" for i in crossed for key in ("bytes_per_s", "latency_s")]
    keys = [*names, *(f"constants.{key}" for key in (*STARTS, *factors))]
    fitted = replace(
        fitted,
        provenance={**fitted.provenance, **dict.fromkeys(keys, known)},
        residuals={**device.residuals, **_residuals(samples, predict(x))},
    )
    host_s = min(s.quickest_s for s in samples)
    quickest = f"{source}; the quickest collective"
    return with_constants(fitted, {"collective.host_s": host_s}, source=quickest, kind=ValueKind.MEASURED)


def fit_overlap(device: Device, sample: OverlapSample, *, source: str) -> Device:
    """`device` with what computation and collectives were measured to cost each other."""
    compute, comm = sample.slowdowns
    values = {"overlap.compute_slowdown": compute, "overlap.comm_slowdown": comm}
    beside = f"{source}; a queue of all-reduces beside products"
    return with_constants(device, values, source=beside, kind=ValueKind.MEASURED)


def _crossed(device: Device, samples: Sequence[CollectiveSample], machine: Machine) -> tuple[int, ...]:
    """Levels of the device's box that some group crosses."""
    cluster = cluster_of(device, machine.nodes, machine.per_node, "profiled")
    names = {level.name: i for i, level in enumerate(device.levels)}
    found = {
        names[crossing.level.name]
        for sample in samples
        for crossing in crossings(("all",), (sample.place.axis(),), cluster)
    }
    return tuple(sorted(found))


def _levels(device: Device, changed: Mapping[int, tuple[float, float]]) -> tuple[Level, ...]:
    return tuple(
        replace(level, bytes_per_s=changed[i][0], latency_s=changed[i][1]) if i in changed else level
        for i, level in enumerate(device.levels)
    )


def _operations(samples: Sequence[CollectiveSample]) -> tuple[CollectiveOp, ...]:
    return tuple(dict.fromkeys(sample.op for sample in samples))


def _residuals(samples: Sequence[CollectiveSample], predicted_s: Sequence[float]) -> dict[str, Residual]:
    found = {}
    for op in _operations(samples):
        pairs = [(p, s.seconds) for p, s in zip(predicted_s, samples, strict=True) if s.op == op]
        found[f"collective.{op}"] = residual([p for p, _ in pairs], [m for _, m in pairs])
    return found
