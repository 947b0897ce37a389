"""What would have been predicted of a publisher, or of a generation of devices, that no constant was fitted to.

Every constant that rows decide (`families.py`) is fitted anew without them, and they are predicted with what the others say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from statistics import mean
from typing import TypedDict

import numpy as np

from autoparallel.profiles import load_device
from benchmarks.accuracy import DEVICES, Graphs, with_device
from benchmarks.families import Priors, a_device, moved, read_priors, unknown_of
from benchmarks.fit import ROWS_A_SOURCE, priced, solve
from benchmarks.publishers import generation_of, publisher_of, publishers
from benchmarks.rows import Row, Run
from benchmarks.sensitivity import Sensitive, timed_runs
from benchmarks.summary import Scored, by, error_summary, quantile


class PublisherSummary(TypedDict):
    """Errors by publisher, and their means."""

    publishers: dict[str, dict[str, float]]
    mean: dict[str, float]


Moves = dict[tuple[str, str], float]
LEAVES = ("publisher", "generation")


def shipped(priors: Priors) -> Moves:
    """The factors of the constants that the profiles hold now."""
    found: Moves = {}
    for home in priors.homes.values():
        if unknown_of(priors, home.name) != home.name:
            continue
        device = load_device(a_device(home.files[0]), dirs=(DEVICES,))
        families = [family for family in priors.families if priors.states(home.name, family)]
        holds = np.array([[float(family.holds(key)) for family in families] for key in home.prior])
        ratios = [log(device.constants[key] / figure.value) for key, figure in home.prior.items()]
        factors = np.linalg.lstsq(holds, np.array(ratios))[0]
        found |= {(family.name, home.name): float(x) for family, x in zip(families, factors, strict=True)}
    return found


def left_out(
    rows: Sequence[Row], runs: Sequence[Run], what: str, dirs: Sequence[Path], cache: Path | None
) -> list[Run]:
    """The runs on devices whose constants are fitted to all rows but those of their own publisher, or generation."""
    priors, known = read_priors(), publishers()
    at = shipped(priors)
    sample = priced(timed_runs(rows, known, dirs, ROWS_A_SOURCE), priors, at, Graphs(cache))

    def of(run: Run) -> str:
        if what == "generation":
            return generation_of(run.cluster.device.name, dirs)
        return publisher_of(run.source, known)

    labels = {(run.source, run.cluster.device.name): of(run) for run in runs}
    moves = {label: _without(sample, priors, at, what, label) for label in sorted(set(labels.values()))}
    found = []
    for run in runs:
        label = labels[run.source, run.cluster.device.name]
        device = moved(run.cluster.device, priors, moves[label], dirs)
        found.append(replace(run, cluster=with_device(run.cluster, device)))
    return found


def _without(sample: Sequence[Sensitive], priors: Priors, at: Moves, what: str, label: str) -> Moves:
    kept = [
        row
        for row in sample
        if (row.timed.generation if what == "generation" else row.timed.publisher) != label
    ]
    return solve(kept, priors, at)


def publisher_summary(scored: Sequence[Scored]) -> PublisherSummary:
    """Errors by publisher (each of its sources counting alike), and their means: each publisher counts alike."""
    known = publishers()
    timed = [row for row in scored if row.error is not None and row.outcome == "ok"]
    found: dict[str, dict[str, float]] = {}
    for publisher, group in by(lambda row: publisher_of(row.source, known), timed).items():
        sources = [
            error_summary([row.error for row in rows if row.error is not None])
            for rows in by(lambda row: row.source, group).values()
        ]
        found[publisher] = {"rows": len(group)} | {
            key: mean(source[key] for source in sources) for key in ("mean_absolute_error", "bias")
        }
        found[publisher]["p95_absolute_error"] = quantile([abs(row.error or 0.0) for row in group], 0.95)
    keys = ("mean_absolute_error", "p95_absolute_error", "bias")
    return {
        "publishers": found,
        "mean": {key: mean(one[key] for one in found.values()) for key in keys} if found else {},
    }
