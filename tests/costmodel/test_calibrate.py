"""Calibration recovers what was changed, and no more than its rows can tell."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autoparallel.costmodel.calibrate import calibrate, correct
from autoparallel.profiles import load_device
from autoparallel.profiles.hardware import Device

A100 = load_device("a100-sxm-80gb")
# Shares of a step's time in kernels, network and launches, of four unlike runs.
MIXES = ((0.9, 0.08, 0.02), (0.5, 0.45, 0.05), (0.3, 0.1, 0.6), (0.7, 0.2, 0.1))


def predict(device: Device) -> list[float]:
    kernels = A100.constants["gemm.efficiency.half"] / device.constants["gemm.efficiency.half"]
    network = A100.constants["collective.efficiency_outer"] / device.constants["collective.efficiency_outer"]
    launch = device.constants["launch_s.eager"] / A100.constants["launch_s.eager"]
    return [a * kernels + b * network + c * launch for a, b, c in MIXES]


@settings(max_examples=20)
@given(st.floats(0.85, 1.15), st.floats(0.7, 1.4), st.floats(0.7, 1.4))
@example(0.90625, 1.375, 1.0)  # two changes that look alike in these steps
def test_a_known_change_is_mostly_recovered(kernels: float, network: float, launch: float) -> None:
    truth = correct(A100, {"kernels": kernels, "network": network, "launch": launch}, "truth")
    result = calibrate(A100, predict, predict(truth), source="test", held_out=False)
    before = max(abs(e) for e in result.errors_before)
    after = max(abs(e) for e in result.errors_after)
    assert after <= max(0.02, 0.5 * before), (result.factors, result.errors_before, result.errors_after)


@pytest.mark.parametrize(("rows", "corrections"), [(1, 0), (2, 1), (3, 2), (4, 3)])
def test_there_are_always_fewer_corrections_than_rows(rows: int, corrections: int) -> None:
    result = calibrate(
        A100,
        lambda d: predict(d)[:rows],
        [1.1 * t for t in predict(A100)[:rows]],
        source="test",
        held_out=False,
    )
    assert len(result.factors) == corrections


def test_perfect_predictions_change_nothing() -> None:
    result = calibrate(A100, predict, predict(A100), source="test")
    assert all(abs(factor - 1) < 1e-3 for _, factor in result.factors)
    assert max(abs(e) for e in result.errors_held_out) < 1e-3


def test_a_row_that_nothing_explains_does_not_bend_the_rest() -> None:
    measured = predict(A100)
    result = calibrate(
        A100, predict, [3.0 * measured[0], *measured[1:]], source="one hung for a while", held_out=False
    )
    assert max(abs(e) for e in result.errors_after[1:]) < 0.06, result.factors


def test_a_corrected_figure_names_its_correction_and_what_it_was() -> None:
    corrected = correct(A100, {"kernels": 1.1}, "three runs")
    key = "gemm.efficiency.half"
    assert corrected.constants[key] == pytest.approx(1.1 * A100.constants[key])
    assert "three runs" in corrected.provenance[f"constants.{key}"].source
    assert corrected.constants["launch_s.eager"] == A100.constants["launch_s.eager"]
