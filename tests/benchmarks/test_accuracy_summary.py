"""What the accuracy benchmark says of rows is right on rows small enough to check by hand."""

from __future__ import annotations

import pytest

from benchmarks.accuracy import as_json, markdown, spread
from benchmarks.rows import Unscorable, chunk_layers, parse, read_rows
from benchmarks.summary import (
    Scored,
    error_summary,
    fit_summary,
    interval_summary,
    kendall_tau,
    picks_near_best,
)


def row(
    name: str,
    predicted: float,
    measured: float | None,
    *,
    outcome: str = "ok",
    feasible: bool = True,
    source: str = "s",
) -> Scored:
    return Scored(
        id=name, source=source, group="g", outcome=outcome, predicted_s=predicted, measured_s=measured,
        feasible=feasible, predicted_gib=1.0, measured_gib=None, memory_kind="",
    )  # fmt: skip


def test_errors_are_relative_to_the_measurement() -> None:
    summary = error_summary([0.1, -0.2, 0.0])
    assert summary["mean_absolute_error"] == pytest.approx(0.1)
    assert summary["bias"] == pytest.approx(-0.1 / 3)
    assert summary["p95_absolute_error"] == pytest.approx(0.2)


def test_order_counts_pairs_and_leaves_ties_out() -> None:
    rows = [row("a", 1.0, 1.0), row("b", 2.0, 3.0), row("c", 3.0, 2.0), row("d", 4.0, 3.001)]
    # b and d measure alike; of the other five pairs only (b, c) is reversed.
    assert kendall_tau(rows) == pytest.approx((4 - 1) / 5)
    assert picks_near_best(rows)


def test_a_run_that_died_must_not_be_called_feasible() -> None:
    fit = fit_summary(
        [row("a", 1, None, outcome="oom"), row("b", 1, None, outcome="oom", feasible=False), row("c", 1, 1)]
    )
    assert fit["oom_called_feasible"] == 0.5
    assert fit["accuracy"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("layers", "chunks", "expected"),
    [(8, 4, (2, 2, 2, 2)), (22, 8, (2, 3, 3, 3, 3, 3, 3, 2)), (7, 4, (2, 2, 2, 1)), (9, 4, (2, 3, 2, 2))],
)
def test_layers_that_do_not_divide_leave_the_ends_short(
    layers: int, chunks: int, expected: tuple[int, ...]
) -> None:
    assert chunk_layers(layers, chunks) == expected
    assert sum(chunk_layers(layers, chunks)) == layers


def test_a_spread_takes_both_ends() -> None:
    assert spread(10, 3) == [0, 4, 9]
    assert spread(2, 3) == [0, 1]


def test_rows_that_cannot_be_scored_say_why_and_are_kept() -> None:
    from pathlib import Path

    rows = read_rows([Path(__file__).parents[2] / "benchmarks" / "published" / "training_rows.csv"])
    adapters = next(r for r in rows if "LoRA" in r["note"])
    with pytest.raises(Unscorable, match="adapters"):
        parse(adapters)
    scored = [row("a", 1.0, 1.0)]
    skipped = [{"id": "b", "group": "g", "skipped": "no reason"}]
    assert [r["id"] for r in as_json(scored, skipped)["rows"]] == ["a", "b"]  # type: ignore[attr-defined, index]
    assert "1 rows are not scored" in markdown(scored, skipped)


def test_an_interval_counts_every_source_alike() -> None:
    near = [row(f"near{i}", 1.0, 1.01, source="many") for i in range(98)]
    far = [row("far", 1.0, 2.0, source="few"), row("fast", 2.0, 1.0, source="few")]
    found = interval_summary([*near, *far])
    assert found["covered"] == pytest.approx(0.5)
    assert found["nine_of_ten"] == pytest.approx(1.0)
