"""Calibration on random rows: what the benchmark says of runs whose truth is known."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.costmodel.parts import PARTS, correct
from autoparallel.profiles import load_device
from benchmarks.triples import Sensitive, factors_of, held_out_error

A100 = load_device("a100-sxm-80gb")
RUNS = [
    Sensitive(measured_s=t, predicted_s=t, slopes=(-kernels, 0.0, 0.0, -0.1, 0.0, -0.9 + kernels, 0.0, 0.0))
    for t, kernels in ((1.0, 0.9), (2.0, 0.8), (0.5, 0.7), (3.0, 0.6), (1.5, 0.5))
]


@given(st.lists(st.floats(0.5, 2.0), min_size=len(PARTS), max_size=len(PARTS)))
def test_the_factors_of_a_corrected_device_are_those_it_was_corrected_by(factors: list[float]) -> None:
    names = [part.name for part in PARTS]
    device = correct(A100, dict(zip(names, factors, strict=True)), "law")
    assert factors_of(device, A100) == pytest.approx(factors)


def test_a_machine_that_is_slower_throughout_is_told_from_three_rows() -> None:
    slower = [replace(run, measured_s=run.at((0.9,) + (1.0,) * (len(PARTS) - 1))) for run in RUNS]
    before, after = held_out_error(slower, A100, 20, random.Random(0))
    assert after < 0.5 * before


def test_three_rows_of_exact_predictions_spoil_nothing() -> None:
    before, after = held_out_error(RUNS, A100, 20, random.Random(0))
    assert before == 0.0
    assert after < 1e-6
