"""What is said of rows whose publishers no constant knew: intervals that hold, probabilities that come true."""

from __future__ import annotations

from math import exp, log, sqrt

import numpy as np

from autoparallel.costmodel.confidence import (
    COVERAGE,
    MEMORY_FACTOR,
    QUANTILE,
    QUANTILE_CALIBRATED,
)
from benchmarks.scatter import (
    ALLOCATED,
    calibrated,
    coverage,
    fit_probability,
    publisher_mean,
    quantile,
    read_left_out,
    spreads,
    timed,
    weights,
)

EVERY = read_left_out()
ROWS = timed(EVERY)


def test_nine_of_ten_left_out_steps_lie_within_their_intervals() -> None:
    missed = np.array([row.missed for row in ROWS])
    covered, width = coverage(missed, spreads(ROWS), weights(ROWS), QUANTILE)
    assert 0.88 <= covered <= 0.92
    assert width < 0.25
    assert publisher_mean(ROWS, [abs(exp(row.missed) - 1) for row in ROWS]) < 0.108


def test_three_rows_of_a_source_teach_what_they_did() -> None:
    after = calibrated(ROWS, 3)
    errors = np.abs(np.exp(after.missed) - 1).tolist()
    before = publisher_mean(after.rows, [abs(exp(row.missed) - 1) for row in after.rows])
    assert publisher_mean(after.rows, errors) < min(0.068, 0.65 * before)
    covered, width = coverage(after.missed, after.spread, weights(after.rows), QUANTILE_CALIBRATED)
    assert 0.87 <= covered <= 0.93
    assert width < 0.18


def test_runs_fit_as_often_as_is_said() -> None:
    judged = [row for row in EVERY if row.judged]
    for low, high in ((0.5, 0.9), (0.9, 1.0), (1.0, 1.11), (1.11, 1.35), (1.35, 1e9)):
        some = [row for row in judged if log(low) <= row.room < log(high)]
        ran = sum(row.outcome == "ok" for row in some) / len(some)
        said = sum(fit_probability(row.room) for row in some) / len(some)
        scatter = 1.5 * sqrt(said * (1 - said) / len(some))  # of so few runs
        assert abs(ran - said) < max(0.1, scatter), (low, high, ran, said)


def test_nine_of_ten_peaks_lie_within_what_is_said_of_memory() -> None:
    held = [row for row in EVERY if row.memory and row.memory_kind.startswith(ALLOCATED)]
    sizes = np.abs(np.log([row.memory for row in held]))
    assert exp(quantile(sizes, weights(held), COVERAGE)) <= MEMORY_FACTOR + 0.005
