"""Predicted against measured: step time and memory of the cases that ran."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from autoparallel.planner.score import score
from autoparallel.profiles import load_cluster
from benchmarks.one_device.cases import graph_of, read_cases


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case that ran: errors relative to what was measured, and how much longer ours took than plain PyTorch (None: not
    comparable)."""

    id: str
    told: str
    predicted_s: float
    measured_s: float
    predicted_bytes: float
    measured_bytes: float
    overhead: float | None

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def rows_of(folder: Path, measured: Path, device: str) -> list[Row]:
    """The cases of a folder that `measured` has steps of, as `device` is predicted now."""
    cluster, found = load_cluster(f"{device}:1x1"), []
    by_id = {row["id"]: row for row in map(json.loads, measured.read_text(encoding="utf-8").splitlines())}
    for case in read_cases(folder):
        row = by_id.get(case.id, {})
        if "step_s" not in row:
            continue
        predicted = score(graph_of(folder, case), cluster, case.strategy)
        plain_s = row.get("plain_step_s")
        found.append(
            Row(
                id=case.id, told=case.told, predicted_s=predicted.step_time_s, measured_s=row["step_s"],
                predicted_bytes=predicted.peak_bytes, measured_bytes=row["peak_bytes"],
                overhead=row["step_s"] / plain_s - 1 if plain_s else None,
            )
        )  # fmt: skip
    return found


def page(rows: Sequence[Row], *, every: bool) -> str:
    """What people read."""
    lines = []
    for row in rows if every else ():
        ours = "" if row.overhead is None else f"   {row.overhead:+.1%} beside plain"
        lines.append(
            f"{row.id:7}{row.measured_s * 1e3:9.1f} ms {row.error:+7.1%}{row.measured_bytes / 2**30:8.2f} GiB {row.memory_error:+7.1%}"
            f"   {row.told}{ours}"
        )
    for name, errors in (
        ("step time", [row.error for row in rows]),
        ("peak memory", [row.memory_error for row in rows]),
    ):
        sizes = [abs(error) for error in errors]
        lines.append(
            f"{name}: {len(sizes)} cases, mean error {mean(sizes):.1%}, median {median(sizes):.1%}, bias {mean(errors):+.1%}"
        )
    beside = [row.overhead for row in rows if row.overhead is not None]
    if beside:
        lines.append(f"beside plain PyTorch: {median(beside):+.1%} in the median of {len(beside)}")
    return "\n".join(lines)
