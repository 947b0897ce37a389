"""How far a prediction should be trusted: what kinds of figures it rests on, and intervals around its step time and its memory.

*Shares.* Every figure (a peak, a bandwidth, an efficiency, a latency) says how it is known. All figures of one kind
are made one percent slower together and the program is priced again; how much longer the step then takes, as a share
of the sum over the kinds, is what rests on that kind. A product's time rests on a peak (datasheet) and an efficiency
(fitted) alike.

*Interval.* Nine of ten steps lie within exp(+- q sd) of the predicted one, where

    sd^2 = KNOWN^2 + UNSEEN^2 [no training row decided the generation's constants] + (ON_LINKS l)^2

with l the share of the step that follows the speed of links; from rows of publishers whose rows no constant had seen. Of a device
that `calibrate` corrected sd comes of what its rows left unknown of the parts that this step rests on (`parts.py`).

*Memory.* Likewise a factor either way, and the probability that the step fits, from left-out rows that ran and that died.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import erf, exp, inf, log, sqrt

import numpy as np

from autoparallel.costmodel.calibrate import spread_of
from autoparallel.costmodel.parts import LINKS, PARTS, correct
from autoparallel.costmodel.prediction import Held
from autoparallel.costmodel.price import price_program
from autoparallel.costmodel.program import Program
from autoparallel.costmodel.timetable import Timetable, pipeline_times, prepare
from autoparallel.profiles.hardware import Cluster, Device, Level, Network, Provenance, ValueKind

SLOWER = 1.01
PROBE = 0.05  # log scale, of a part
STEP = "step"  # the residual of whole steps
COVERAGE = 0.9  # of an interval
# Kind: fitted. Source: `python -m benchmarks.scatter` on the rows of publishers left out (benchmarks/published/left_out.csv): the
# spreads by their likelihood, the quantiles so that nine of ten lie within, each source counting alike.
KNOWN, UNSEEN, ON_LINKS = 0.095, 0.28, 0.2
QUANTILE = 2.0
QUANTILE_CALIBRATED = 2.5
# Of memory: nine of ten measured peaks lie within this factor of the predicted one, each source counting alike. And
# p = LAPSE + (1 - 2 LAPSE) Phi((ROOM - log(peak / capacity)) / BLUR), the likelihood of what ran and what died.
MEMORY_FACTOR = 1.16
ROOM, BLUR, LAPSE = 0.07, 0.08, 0.02
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
    factor, basis = _interval(step_s, now_s, cluster)
    return Confidence(
        low_s=now_s / factor, high_s=now_s * factor, coverage=COVERAGE, basis=basis, shares=shares(step_s, now_s, cluster)
    )  # fmt: skip


def _interval(step_s: Callable[[Cluster], float], now_s: float, cluster: Cluster) -> tuple[float, str]:
    """The factor either way within which nine of ten steps lie, and what says so."""
    devices = [group.device for group in cluster.groups]

    def on(change: Callable[[Device], Device]) -> float:
        groups = tuple(replace(group, device=change(group.device)) for group in cluster.groups)
        return step_s(replace(cluster, groups=groups))

    learnt = [device.posterior for device in devices]
    if all(learnt):
        s = np.array(
            [
                -log(on(lambda d, n=part.name: correct(d, {n: exp(PROBE)}, "probe")) / now_s) / PROBE  # type: ignore[misc]
                for part in PARTS
            ]
        )
        widest = max(spread_of(one, s) for one in learnt)
        return exp(QUANTILE_CALIBRATED * widest), f"{min(one.rows for one in learnt if one)} measured steps"
    known = [residual for device in devices if (residual := device.residuals.get(STEP)) is not None]
    if len(known) == len(devices):
        width = max(one.p90_absolute_error for one in known)
        return 1.0 + width, f"{min(one.samples for one in known)} measured steps"
    faster = dict.fromkeys(LINKS, exp(PROBE))
    on_links = -log(on(lambda d: correct(d, faster, "probe")) / now_s) / PROBE
    seen = all(device.publishers or measured_kernels(device) for device in devices)
    where = "of these generations" if seen else "of other generations than these"
    return exp(QUANTILE * spread_unmeasured(on_links, seen=seen)), f"published runs on devices {where}"


def spread_unmeasured(on_links: float, *, seen: bool) -> float:
    """One standard deviation of the logarithm of a step of which nothing was measured; `on_links`: what follows links."""
    return sqrt(KNOWN**2 + (0.0 if seen else UNSEEN**2) + (ON_LINKS * on_links) ** 2)


def measured_kernels(device: Device) -> bool:
    """Whether products were measured on the device itself (`profile`)."""
    return any(family.startswith("gemm.") for family in device.residuals)


def fits(prediction: Held) -> float:
    """The probability that a step fits in the memory of its devices."""
    fullest = max(
        log(stage.peak / room) if stage.peak > 0 < room else (-inf if room > 0 else inf)
        for stage, room in zip(prediction.memory, prediction.capacities_bytes, strict=True)
    )
    return LAPSE + (1 - 2 * LAPSE) * 0.5 * (1 + erf((ROOM - fullest) / BLUR / sqrt(2)))


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
