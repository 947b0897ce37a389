"""The published kernels and collectives stay as well predicted as docs/accuracy.md says."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import mean

import pytest

from benchmarks import chunked_kernels, collectives, kernels

PUBLISHED = Path(kernels.PUBLISHED).parent


def rows(name: str) -> list[dict[str, str]]:
    with (PUBLISHED / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_kernels_are_within_eight_percent_on_average() -> None:
    scored = kernels.score(rows("kernels"))
    assert len(scored) == 905
    assert mean(abs(predicted / measured - 1) for _, predicted, measured in scored) < 0.08


def test_collectives_are_within_twelve_percent_on_average_and_the_rest_say_why() -> None:
    published = rows("collectives")
    scored, skipped = collectives.score(published)
    assert len(scored) + sum(skipped.values()) == len(published)
    assert len(scored) >= 200
    assert mean(abs(predicted / measured - 1) for _, predicted, measured in scored) < 0.12


def test_kernels_in_chunks_are_within_eight_percent_on_average() -> None:
    errors = [error for _, error in chunked_kernels.scored()]
    assert len(errors) == 126
    assert mean(map(abs, errors)) < 0.08


@pytest.mark.parametrize("name", ["kernels", "chunked_kernels", "collectives", "nccl_tuning"])
def test_every_published_row_says_where_it_was_read(name: str) -> None:
    assert all(row["origin"] for row in rows(name))
