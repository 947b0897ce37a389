"""The accuracy reached on published training runs: no change may lose more than half a point of it."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from benchmarks.accuracy import Graphs, Scorer, score_rows
from benchmarks.rows import read_rows

PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "published" / "training_rows.csv"
EVERY = 41  # of 1,757 rows, so that all sources but the smallest are there
HALF_A_POINT = 0.005
REACHED_ERROR = 0.097  # mean absolute error of these rows
REACHED_BIAS = -0.031


def test_published_runs_are_predicted_as_well_as_before() -> None:
    rows = [row for row in read_rows([PUBLISHED]) if row["outcome"] == "ok"][::EVERY]
    scored, skipped = score_rows(rows, Scorer(Graphs(None)), ())
    errors = [row.error for row in scored if row.error is not None]
    table = "\n".join(f"{row.id} {row.predicted_s:.3f} {row.measured_s:.3f}" for row in scored)
    assert len(skipped) <= 1, skipped
    assert mean(abs(e) for e in errors) <= REACHED_ERROR + HALF_A_POINT, table
    assert abs(mean(errors)) <= abs(REACHED_BIAS) + HALF_A_POINT, table
