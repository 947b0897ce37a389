"""How far a prediction should be trusted: what kinds of figures it rests on, and an interval around its step time.

*Shares.* Every figure (a peak, a bandwidth, an efficiency, a latency) says how it is known. All figures of one kind
are made one percent slower together and the program is priced again; how much longer the step then takes, as a share
of the sum over the kinds, is what rests on that kind. A product's time rests on a peak (datasheet) and an efficiency
(fitted) alike.

*Interval.* Half its width is the error that nine of ten steps stayed within: of the rows held out when the device was
calibrated (`residuals.step` of its profile), else of published runs of sources that no constant was fitted to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import log

from autoparallel.costmodel.price import price_program
from autoparallel.costmodel.program import Program
from autoparallel.costmodel.timetable import Timetable, pipeline_times, prepare
from autoparallel.profiles.hardware import Cluster, Device, Level, Network, Provenance, Residual, ValueKind

SLOWER = 1.01
STEP = "step"  # the residual of whole steps
COVERAGE = 0.9  # of an interval
# Kind: measured. Source: benchmarks/accuracy.py on benchmarks/published/further_rows.csv: sources that constants were not
# fitted to, as a user's own cluster is, each counting alike. Those they were fitted to are nine of ten within 13 %.
PUBLISHED = Residual(samples=360, mean_absolute_error=0.089, p90_absolute_error=0.24, bias=-0.043)
# Constants that are rates or shares of one, and those that are times or stretch them. What is neither (counts, tile
# sizes) is no figure that time is proportional to.
_RATES = ("gemm.efficiency", "gemm.memory", "gemm.conv", "gemm.grouped_eff", "gemm.tile.", "attention.forward", "attention.backward", "memory.efficiency", "collective.efficiency", "collective.nvls_eff", "collective.tree", "collective.all_to_all_eff", "collective.send_eff", "collective.bandwidth", "host.bytes", "host.memory_bytes_per_s")  # fmt: skip
_TIMES = ("launch_s.", "kernel.start_s", "optimizer.tensor_s", "collective.start_s", "collective.host_s", "collective.peer_s", "collective.factor", "collective.latency", "collective.in_step", "collective.nvls_rank_s", "gemm.grouped_expert_s", "overlap.")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """The step time lies between `low_s` and `high_s` in `coverage` of cases like those behind `basis`.

    `shares`: of the prediction, by kind of the figures that it rests on; they sum to 1.
    """

    low_s: float
    high_s: float
    coverage: float
    basis: str
    shares: tuple[tuple[str, float], ...]


def confidence(program: Program, cluster: Cluster, timetable: Timetable | None = None) -> Confidence:
    """Confidence in the step time that `simulate` predicts; a caller who has the program's timetable passes it."""
    order = timetable or prepare(
        program.ranks,
        overlap=program.overlap,
        blocking_sends=program.blocking_sends,
        late_gathers=program.late_gathers,
    )

    def step_s(of: Cluster) -> float:
        return pipeline_times(order, price_program(program, of)).step_time_s

    now_s = step_s(cluster)
    residual, basis = step_residual(cluster)
    width = 1.0 + residual.p90_absolute_error
    return Confidence(
        low_s=now_s / width, high_s=now_s * width, coverage=COVERAGE, basis=basis, shares=shares(step_s, now_s, cluster)
    )  # fmt: skip


def step_residual(cluster: Cluster) -> tuple[Residual, str]:
    """The widest of the devices' residuals of whole steps, and where it is from."""
    known = [group.device.residuals.get(STEP) for group in cluster.groups]
    calibrated = [residual for residual in known if residual is not None]
    if len(calibrated) < len(known):
        return PUBLISHED, "published runs on devices of these generations"
    widest = max(calibrated, key=lambda r: r.p90_absolute_error)
    return widest, f"{widest.samples} measured steps"


def shares(
    step_s: Callable[[Cluster], float], now_s: float, cluster: Cluster
) -> tuple[tuple[str, float], ...]:
    """By kind of figure, the share of the step time that rests on it, largest first."""
    weights = {str(kind): max(0.0, log(step_s(slowed(cluster, kind)) / now_s)) for kind in kinds_of(cluster)}
    total = sum(weights.values())
    if not total:
        return ()
    found = ((kind, weight / total) for kind, weight in weights.items() if weight > 0)
    return tuple(sorted(found, key=lambda pair: -pair[1]))


def kinds_of(cluster: Cluster) -> tuple[ValueKind, ...]:
    """The kinds that occur among the cluster's figures."""
    found = {known.kind for group in cluster.groups for known in group.device.provenance.values()}
    found |= {known.kind for known in cluster.provenance.values()}
    return tuple(kind for kind in ValueKind if kind in found)


def slowed(cluster: Cluster, kind: ValueKind) -> Cluster:
    """The cluster with every figure of one kind made a little slower."""
    groups = tuple(replace(g, device=_slowed_device(g.device, kind)) for g in cluster.groups)
    levels = tuple(
        _slowed_level(level, f"level.{i}", cluster.provenance, kind) for i, level in enumerate(cluster.levels)
    )
    return replace(cluster, groups=groups, levels=levels, network=_slowed_network(cluster, kind))


def _slowed_network(cluster: Cluster, kind: ValueKind) -> Network | None:
    network = cluster.network
    if network is None:
        return None
    links = tuple(
        replace(
            link,
            bytes_per_s=link.bytes_per_s / _slower(cluster, f"network.{i}.bytes_per_s", kind),
            latency_s=link.latency_s * _slower(cluster, f"network.{i}.latency_s", kind),
        )
        for i, link in enumerate(network.fabric.links)
    )
    return replace(network, fabric=replace(network.fabric, links=links))


def _slower(cluster: Cluster, key: str, kind: ValueKind) -> float:
    return SLOWER if _kind(cluster.provenance, key) is kind else 1.0


def _slowed_device(device: Device, kind: ValueKind) -> Device:
    def is_kind(key: str) -> bool:
        return _kind(device.provenance, key) is kind

    constants = dict(device.constants)
    for key in constants:
        if is_kind(f"constants.{key}"):
            if key.startswith(_RATES):
                constants[key] /= SLOWER
            elif key.startswith(_TIMES):
                constants[key] *= SLOWER
    return replace(
        device,
        constants=constants,
        peak_flops={d: f / SLOWER if is_kind(f"peak_flops.{d}") else f for d, f in device.peak_flops.items()},
        hbm_bytes_per_s=device.hbm_bytes_per_s / (SLOWER if is_kind("hbm_bytes_per_s") else 1.0),
    )


def _slowed_level(level: Level, key: str, provenance: Mapping[str, Provenance], kind: ValueKind) -> Level:
    rate = SLOWER if _kind(provenance, f"{key}.bytes_per_s") is kind else 1.0
    time = SLOWER if _kind(provenance, f"{key}.latency_s") is kind else 1.0
    return replace(level, bytes_per_s=level.bytes_per_s / rate, latency_s=level.latency_s * time)


def _kind(provenance: Mapping[str, Provenance], key: str) -> ValueKind:
    known = provenance.get(key)
    return known.kind if known else ValueKind.USER
