"""Calibration recovers what was changed, and no more than its rows can tell."""

from __future__ import annotations

from math import exp, sqrt

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autoparallel.costmodel.calibrate import UNTOLD, calibrate, most_telling, spread_of
from autoparallel.costmodel.parts import NOISE, PARTS, correct, covariance_of, prior_covariance
from autoparallel.profiles import load_device
from autoparallel.profiles.hardware import Device

A100 = load_device("a100-sxm-80gb")
NAMES = [part.name for part in PARTS]
# Shares of a step's time in products, links between nodes and launches, of four unlike runs.
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
    truth = correct(A100, {"products": kernels, "outer-links": network, "host": launch}, "truth")
    result = calibrate(A100, predict, predict(truth), source="test")
    before = max(abs(e) for e in result.errors_before)
    after = max(abs(e) for e in result.errors_after)
    assert after <= max(0.02, 0.5 * before), (result.factors, result.errors_before, result.errors_after)


def test_perfect_predictions_change_nothing_and_teach_all_the_same() -> None:
    result = calibrate(A100, predict, predict(A100), source="test")
    assert all(abs(one.factor - 1) < 1e-6 for one in result.learnt)
    assert max(abs(e) for e in result.errors_held_out) < 1e-6
    left = {one.name: one.left for one in result.learnt}
    assert left["products"] < 0.5
    assert left["overlap"] > UNTOLD  # no step follows it


def test_a_row_that_nothing_explains_does_not_bend_the_rest() -> None:
    measured = predict(A100)
    result = calibrate(A100, predict, [3.0 * measured[0], *measured[1:]], source="one hung for a while")
    assert max(abs(e) for e in result.errors_after[1:]) < 0.06, result.factors


def test_what_is_not_measured_follows_what_is_by_what_all_parts_share() -> None:
    slower = calibrate(A100, predict, [1.2 * t for t in predict(A100)], source="test")
    factors = dict(slower.factors)
    assert factors["products"] < factors["attention"] < 1.0


@settings(max_examples=10)
@given(rows=st.integers(1, 4))
def test_more_rows_leave_less_unknown_and_never_more_than_the_prior(rows: int) -> None:
    few = calibrate(A100, lambda d: predict(d)[:rows], predict(A100)[:rows], source="test").device.posterior
    assert few is not None
    assert few.rows == rows
    steps = np.random.default_rng(rows).uniform(0, 1, size=(5, len(PARTS)))
    before = [spread_of(None, s) for s in steps]
    after = [spread_of(few, s) for s in steps]
    assert all(NOISE <= a <= b + 1e-12 for a, b in zip(after, before, strict=True))
    assert spread_of(None, steps[0]) == pytest.approx(
        sqrt(steps[0] @ prior_covariance() @ steps[0] + NOISE**2)
    )


def test_the_run_to_measure_next_is_the_one_that_follows_what_is_not_known() -> None:
    posterior = calibrate(
        A100, lambda d: predict(d)[:1], [exp(0.05) * predict(A100)[0]], source="test"
    ).device.posterior
    units = np.eye(len(PARTS))
    products, links = units[NAMES.index("products")], units[NAMES.index("outer-links")]
    best, share = most_telling(posterior, np.stack([products, links]), np.stack([links, products]))
    assert best == 1
    assert 0 < share < 1
    assert covariance_of(posterior)[0, 0] < prior_covariance()[0, 0]


def test_a_corrected_figure_names_its_correction_and_what_it_was() -> None:
    corrected = correct(A100, {"products": 1.1}, "three runs")
    key = "gemm.efficiency.half"
    assert corrected.constants[key] == pytest.approx(1.1 * A100.constants[key])
    assert "three runs" in corrected.provenance[f"constants.{key}"].source
    assert corrected.constants["launch_s.eager"] == A100.constants["launch_s.eager"]
