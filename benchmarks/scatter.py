"""How far publishers lie apart of whom no constant knew: `python -m benchmarks.scatter [--write]`.

`published/left_out.csv` has, of every row, what is predicted with constants fitted to all other publishers (`leave_out.py`), and how
its step follows each part of a device (`costmodel/parts.py`). From it come the widths of intervals (`costmodel/confidence.py`), the
priors of calibration, and what three rows of a source leave. `--write` makes the file anew (minutes).
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import erf, exp, log, sqrt
from pathlib import Path
from statistics import mean

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autoparallel.costmodel.calibrate import posterior_covariance, solved
from autoparallel.costmodel.confidence import (
    BLUR,
    COVERAGE,
    LAPSE,
    QUANTILE,
    QUANTILE_CALIBRATED,
    ROOM,
    spread_unmeasured,
)
from autoparallel.costmodel.parts import LINKS, NOISE, PARTS, Vector, correct
from autoparallel.errors import UserError
from benchmarks.accuracy import DEVICES, Graphs, Scorer, spread
from benchmarks.beside import held_bytes, shown_bytes
from benchmarks.fit import ROWS
from benchmarks.leave_out import left_out
from benchmarks.publishers import generation_of, publisher_of, publishers
from benchmarks.rows import Run, Unscorable, parse, read_rows
from benchmarks.sensitivity import Repricer

LEFT_OUT = Path(__file__).parent / "published" / "left_out.csv"
STRONGER = 0.1  # log scale
NAMES = tuple(part.name for part in PARTS)
COLUMNS = (
    "id", "publisher", "source", "device", "seen", "outcome", "judged", "measured_s", "predicted_s", "room", "memory_kind",
    "memory", *NAMES,
)  # fmt: skip
GIB = 2**30
ALLOCATED = (
    "torch-allocated",
    "nvidia-smi",
)  # what predictions speak of, alone or with what the device sets aside


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """One row. `seen`: other publishers have rows on its generation of devices. `room`: log(peak / capacity). `memory`: measured
    over predicted peak, 0 where nothing was measured. `slopes`: by how much its step falls as each part gets faster."""

    id: str
    publisher: str
    source: str
    device: str
    seen: bool
    outcome: str
    judged: bool
    measured_s: float
    predicted_s: float
    room: float
    memory_kind: str
    memory: float
    slopes: Vector

    @property
    def missed(self) -> float:
        """log(predicted / measured)."""
        return log(self.predicted_s / self.measured_s)


def read_left_out(path: Path = LEFT_OUT) -> list[LeftOut]:
    """The rows of the file."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            LeftOut(
                id=row["id"], publisher=row["publisher"], source=row["source"], device=row["device"],
                seen=row["seen"] == "True", outcome=row["outcome"], judged=row["judged"] == "True",
                measured_s=float(row["measured_s"] or 0), predicted_s=float(row["predicted_s"]),
                room=float(row["room"]), memory_kind=row["memory_kind"], memory=float(row["memory"] or 0),
                slopes=np.array([float(row[name] or 0) for name in NAMES]),
            )
            for row in csv.DictReader(file)
        ]  # fmt: skip


def timed(rows: Sequence[LeftOut]) -> list[LeftOut]:
    """Those that ran and whose step was measured."""
    return [row for row in rows if row.outcome == "ok" and row.measured_s]


def weights(rows: Sequence[LeftOut], of: Callable[[LeftOut], str] = lambda row: row.source) -> Vector:
    """What each row counts, so that each source (or publisher, and each of its sources) counts alike; they sum to 1."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[of(row)] = counts.get(of(row), 0) + 1
    return np.array([1 / counts[of(row)] for row in rows]) / len(counts)


def publisher_mean(rows: Sequence[LeftOut], values: Sequence[float]) -> float:
    """The mean over publishers of means over their sources."""
    found: dict[str, dict[str, list[float]]] = {}
    for row, value in zip(rows, values, strict=True):
        found.setdefault(row.publisher, {}).setdefault(row.source, []).append(value)
    return mean(mean(mean(v) for v in sources.values()) for sources in found.values())


def quantile(sizes: Vector, weight: Vector, share: float) -> float:
    """The value that so large a share of the weight is not above."""
    order = np.argsort(sizes)
    reached = np.cumsum(weight[order]) / weight.sum()
    return float(sizes[order][min(np.searchsorted(reached, share), len(sizes) - 1)])


def spreads(rows: Sequence[LeftOut]) -> Vector:
    """One standard deviation of each row's logarithm, as predictions state it."""
    links = [NAMES.index(name) for name in LINKS]
    return np.array([spread_unmeasured(float(row.slopes[links].sum()), seen=row.seen) for row in rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """Rows of sources of which `rows` others were measured: their errors (relative) and standard deviations (log)."""

    rows: tuple[LeftOut, ...]
    missed: Vector  # log(predicted / measured)
    spread: Vector


def calibrated(rows: Sequence[LeftOut], count: int) -> Calibrated:
    """Each source and device after an even spread of `count` of its rows was measured, linearised."""
    groups: dict[tuple[str, str], list[LeftOut]] = {}
    for row in rows:
        groups.setdefault((row.source, row.device), []).append(row)
    rest: list[LeftOut] = []
    missed: list[float] = []
    deviation: list[float] = []
    for group in groups.values():
        if len(group) <= count:
            continue
        chosen = spread(len(group), count)
        s = np.stack([group[i].slopes for i in chosen])
        x, weight = solved(s, np.array([group[i].missed for i in chosen]))
        covariance = posterior_covariance(s, weight)
        for i, row in enumerate(group):
            if i not in chosen:
                rest.append(row)
                missed.append(row.missed - float(row.slopes @ x))
                deviation.append(sqrt(float(row.slopes @ covariance @ row.slopes) + NOISE**2))
    return Calibrated(rows=tuple(rest), missed=np.array(missed), spread=np.array(deviation))


def fit_probability(room: float) -> float:
    """As `confidence.fits`."""
    return LAPSE + (1 - 2 * LAPSE) * 0.5 * (1 + erf((ROOM - room) / BLUR / sqrt(2)))


def coverage(missed: Vector, spread_: Vector, weight: Vector, q: float) -> tuple[float, float]:
    """The share of steps within their intervals, and the mean half-width of these."""
    return float(weight[np.abs(missed) <= q * spread_].sum()), float(
        (weight * (np.exp(q * spread_) - 1)).sum()
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="make the file of left-out rows anew")
    parser.add_argument("--cache", type=Path, help="keep captured graphs in this folder")
    options = parser.parse_args()
    if options.write:
        write_left_out(options.cache)
    every = read_left_out()
    rows = timed(every)
    missed, sd, weight = np.array([row.missed for row in rows]), spreads(rows), weights(rows)
    errors = [abs(exp(row.missed) - 1) for row in rows]
    print(f"left out: {publisher_mean(rows, errors):.1%} in the mean over publishers")
    print(
        f"quantile of errors in standard deviations: {quantile(np.abs(missed) / sd, weight, COVERAGE):.2f} (states {QUANTILE})"
    )
    kinds = {"all": lambda _: True, "seen": lambda row: row.seen, "unseen": lambda row: not row.seen}
    for name, chosen in kinds.items():
        which = np.array([chosen(row) for row in rows])
        own = weights([row for row in rows if chosen(row)])
        covered, width = coverage(missed[which], sd[which], own, QUANTILE)
        print(f"  {name:8} {which.sum():5} rows: {covered:.0%} within, mean half-width {width:.0%}")
    for count in (1, 2, 3, 5):
        after = calibrated(rows, count)
        own = weights(after.rows)
        left = publisher_mean(after.rows, np.abs(np.exp(after.missed) - 1).tolist())
        before = publisher_mean(after.rows, [abs(exp(row.missed) - 1) for row in after.rows])
        covered, width = coverage(after.missed, after.spread, own, QUANTILE_CALIBRATED)
        asked = quantile(np.abs(after.missed) / after.spread, own, COVERAGE)
        print(
            f"after {count} rows: {left:.1%} (was {before:.1%}); {covered:.0%} within, mean half-width {width:.0%} (quantile {asked:.2f})"
        )
    judged = [row for row in every if row.judged]
    for low, high in ((-9, -0.3), (-0.3, -0.1), (-0.1, 0), (0, 0.1), (0.1, 0.3), (0.3, 9)):
        some = [row for row in judged if low <= row.room < high]
        said = mean(fit_probability(row.room) for row in some)
        print(
            f"peak / capacity from {exp(low):5.2f} to {exp(high):5.2f}: {len(some):5} runs, {mean(r.outcome == 'ok' for r in some):.0%} ran, {said:.0%} said"
        )
    held = [row for row in every if row.memory and row.memory_kind.startswith(ALLOCATED)]
    sizes = np.abs(np.log([row.memory for row in held]))
    print(
        f"memory: {len(held)} rows, nine of ten within a factor of {exp(quantile(sizes, weights(held), COVERAGE)):.2f}"
    )


def write_left_out(cache: Path | None) -> None:
    """Predict every row without its publisher's, and write what came of it."""
    table, known = read_rows(ROWS), publishers()
    runs = []
    for row in table:
        try:
            runs.append(parse(row, (DEVICES,)))
        except (Unscorable, UserError):
            continue
    runs = left_out(table, runs, "publisher", (DEVICES,), cache)
    behind: dict[str, set[str]] = {}
    for run in runs:
        generation = generation_of(run.cluster.device.name, (DEVICES,))
        behind.setdefault(generation, set()).add(publisher_of(run.source, known))
    repricer = Repricer(Scorer(Graphs(cache)))
    found = []
    for run in runs:
        publisher = publisher_of(run.source, known)
        generation = generation_of(run.cluster.device.name, (DEVICES,))
        cells = _cells(run, repricer)
        if cells is not None:
            seen = bool(behind[generation] - {publisher})
            found.append({"publisher": publisher, "seen": str(seen), **cells})
    partial = LEFT_OUT.with_suffix(".partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    partial.replace(LEFT_OUT)


def _cells(run: Run, repricer: Repricer) -> dict[str, str] | None:
    """What of a row is written; None where it cannot be priced."""
    try:
        strategy, prediction = repricer.scorer.chosen(run, run.cluster)
        program, prepared = repricer.of_strategy(strategy)
    except UserError:
        return None
    device, label = run.cluster.device, f"{run.source}|{run.cluster.device.name}"
    slopes = {}
    if run.outcome == "ok" and run.step_time_s:
        now_s = repricer.step_s(program, prepared, label, device)
        for name in NAMES:
            faster = correct(device, {name: exp(STRONGER)}, "probe")
            moved_s = repricer.step_s(program, prepared, f"{label}|{name}", faster)
            slopes[name] = f"{-log(moved_s / now_s) / STRONGER:.3f}"
    held = held_bytes(prediction, strategy, run.beside(strategy), run.shape)
    shown = shown_bytes(held, run.memory_kind, device) / GIB
    return {
        "id": run.id,
        "source": run.source,
        "device": device.name,
        "outcome": run.outcome,
        "judged": str(run.fits_judged),
        "measured_s": f"{run.step_time_s:.6g}" if run.step_time_s else "",
        "predicted_s": f"{prediction.step_time_s:.6g}",
        "room": f"{log(prediction.peak_bytes / prediction.capacity_bytes):.4f}",
        "memory_kind": run.memory_kind,
        "memory": f"{run.peak_memory_gib / shown:.4f}" if run.peak_memory_gib else "",
        **slopes,
    }


if __name__ == "__main__":
    main()
