"""Fitting finds the constants that made the measurements, one disturbed among them or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.costmodel.fit import Sample, fit_constants, kernel_price, with_constants
from autoparallel.costmodel.fit_collectives import (
    CollectiveSample,
    GroupPlace,
    Machine,
    OverlapSample,
    fit_collectives,
    fit_overlap,
)
from autoparallel.costmodel.fit_device import fit_device
from autoparallel.costmodel.graph import OpKind
from autoparallel.costmodel.program import CollectiveOp, Kernel
from autoparallel.costmodel.streams import Interference, Segment, run_streams
from autoparallel.profiles import load_device
from autoparallel.profiles.build import cluster_of
from autoparallel.profiles.hardware import ValueKind
from autoparallel.profiles.write import changed_keys

BASE = load_device("cpu-gloo")
SIZES = (128, 192, 256, 384, 512, 1024)


def product(size: int) -> Kernel:
    moved = 3 * 4 * size * size
    return Kernel(
        kind=OpKind.GEMM, dtype="fp32", flops=2 * size**3, bytes_moved=moved, product=(1, size, size, size)
    )  # fmt: skip


def samples_of(device, *, disturbed: float = 1.0) -> list[Sample]:  # type: ignore[no-untyped-def]
    samples = [Sample(family="gemm.fp32", label=str(n), kernels=(product(n),), seconds=1.0) for n in SIZES]
    times = kernel_price(samples, "eager")(device)
    times = [times[0] * disturbed, *times[1:]]
    return [replace(s, seconds=t) for s, t in zip(samples, times, strict=True)]


@pytest.mark.parametrize("disturbed", [1.0, 3.0])
def test_an_efficiency_is_found_though_one_measurement_was_disturbed(disturbed: float) -> None:
    key = "gemm.efficiency.full"
    truth = with_constants(BASE, {key: 0.3})
    samples = samples_of(truth, disturbed=disturbed)
    price = kernel_price(samples, "eager")
    fitted, residual = fit_constants(BASE, [key], price, [s.seconds for s in samples], source="test")
    assert fitted.constants[key] == pytest.approx(0.3, rel=0.02)
    assert residual.samples == len(SIZES)
    assert fitted.provenance[f"constants.{key}"].kind is ValueKind.FITTED


def test_constants_that_nothing_measures_stay_as_they_are() -> None:
    truth = with_constants(BASE, {"gemm.efficiency.full": 0.3})
    fitted = fit_device(BASE, samples_of(truth), source="test", own_peaks=False)
    changed = {key.removeprefix("constants.") for key in changed_keys(BASE, fitted)}
    assert changed
    assert changed <= {"gemm.efficiency.full", "gemm.exposed", "gemm.fill_k_bytes"}
    assert fitted.peak_flops == BASE.peak_flops
    assert fitted.residuals["gemm.fp32"].mean_absolute_error < 0.02


def test_without_a_datasheet_the_peak_is_the_best_rate_seen() -> None:
    samples = samples_of(BASE)
    fitted = fit_device(BASE, samples, source="test", own_peaks=True)
    best = max(s.kernels[0].flops / s.seconds for s in samples)
    assert fitted.peak_flops["fp32"] == pytest.approx(best)
    assert fitted.provenance["peak_flops.fp32"].kind is ValueKind.MEASURED


def test_a_network_is_found_from_its_collectives() -> None:
    level, *others = BASE.levels
    truth = replace(BASE, levels=(replace(level, bytes_per_s=3e9, latency_s=2e-5), *others))
    cluster = cluster_of(truth, 1, 2, "truth")
    place = GroupPlace(size=2, stride=1)
    cases = [
        CollectiveSample(op=op, size_bytes=size, place=place, seconds=1.0, quickest_s=1.0)
        for op in (CollectiveOp.ALL_REDUCE, CollectiveOp.ALL_GATHER)
        for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24)
    ]
    cases = [replace(c, seconds=s, quickest_s=s / 2) for c in cases for s in [c.predicted_s(cluster)]]
    fitted = fit_collectives(BASE, cases, Machine(nodes=1, per_node=2), source="test")
    again = cluster_of(fitted, 1, 2, "again")
    for case in cases:
        assert case.predicted_s(again) == pytest.approx(case.seconds, rel=0.03), case
    assert set(fitted.residuals) >= {"collective.all_reduce", "collective.all_gather"}
    assert fitted.constants["collective.host_s"] == min(case.quickest_s for case in cases)


@given(compute=st.floats(0.0, 2.0), comm=st.floats(0.0, 2.0), longer=st.floats(1.0, 3.0))
def test_what_streams_cost_each_other_is_found_from_when_they_end(
    compute: float, comm: float, longer: float
) -> None:
    truth = Interference(compute_slowdown=compute, comm_slowdown=comm)
    both = run_streams([Segment(compute_s=1.0, reductions=((0.0, longer * (1 + compute)),))], truth)
    sample = OverlapSample(
        compute_s=1.0, collective_s=longer * (1 + compute), compute_beside_s=both.end_s, both_s=both.end_s + both.tail_s
    )  # fmt: skip
    fitted = fit_overlap(BASE, sample, source="test")
    assert fitted.constants["overlap.compute_slowdown"] == pytest.approx(compute, abs=1e-6)
    assert fitted.constants["overlap.comm_slowdown"] == pytest.approx(comm, abs=1e-6)
    assert fitted.provenance["constants.overlap.comm_slowdown"].kind is ValueKind.MEASURED


@pytest.mark.parametrize("both_s", [0.5, 1.0, 3.5, 9.0])
def test_disturbed_times_still_give_shares(both_s: float) -> None:
    sample = OverlapSample(compute_s=1.0, collective_s=1.5, compute_beside_s=0.9, both_s=both_s)
    assert all(0.0 <= share <= 4.0 for share in sample.slowdowns)


def test_a_figure_that_is_measured_again_counts_as_changed() -> None:
    again = with_constants(BASE, {"collective.host_s": 2 * BASE.constants["collective.host_s"]})
    assert changed_keys(BASE, again) == ("constants.collective.host_s",)
