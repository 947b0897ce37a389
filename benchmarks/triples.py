"""How well three rows calibrate: `python benchmarks/triples.py ROWS.csv … [--draws 100] [--cache DIR]`.

For every source and device, three random rows correct the device and the others are predicted, many times over. So that this
takes minutes, each run is simulated as it is and once with each part of the device a tenth faster, and the logarithm of its step
is taken to be linear in those of the parts.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autoparallel.costmodel.calibrate import Predict, calibrate
from autoparallel.costmodel.parts import PARTS, Part, correct
from autoparallel.errors import UserError
from autoparallel.profiles.hardware import Device
from benchmarks.accuracy import DEVICES, Graphs, Scorer, spread, with_device
from benchmarks.rows import Run, Unscorable, parse, read_rows

ROWS_A_SOURCE = 40  # an even spread of them
TRIPLE = 3
STRONGER = 0.1  # log scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitive:
    """A run's measured and predicted step, and by how much each part's logarithm moves the predicted one's."""

    measured_s: float
    predicted_s: float
    slopes: tuple[float, ...]

    def at(self, factors: Sequence[float]) -> float:
        """The predicted step with the parts' factors, seconds."""
        moves = (slope * log(factor) for slope, factor in zip(self.slopes, factors, strict=True))
        return self.predicted_s * exp(sum(moves))


def sensitive(run: Run, scorer: Scorer) -> Sensitive:
    """Simulate a run as it is and with each part faster."""
    assert run.step_time_s
    device = run.cluster.device

    def step_s(factors: dict[str, float]) -> float:
        return scorer.predict(run, with_device(run.cluster, correct(device, factors, "probe"))).step_time_s

    predicted_s = step_s({})
    slopes = tuple(log(step_s({p.name: exp(STRONGER)}) / predicted_s) / STRONGER for p in PARTS)
    return Sensitive(measured_s=run.step_time_s, predicted_s=predicted_s, slopes=slopes)


def factors_of(device: Device, base: Device) -> tuple[float, ...]:
    """By how much each part was corrected to `base`: one constant of each tells."""

    def factor(part: Part) -> float:
        keys = [k for k in base.constants if k.startswith(part.prefixes) and base.constants[k]]
        ratio = device.constants[keys[0]] / base.constants[keys[0]] if keys else 1.0
        return 1 / ratio if part.inverse else ratio

    return tuple(map(factor, PARTS))


def predictor(runs: Sequence[Sensitive], base: Device) -> Predict:
    """Predicted steps of the runs on a corrected `base`."""
    return lambda device: [run.at(factors_of(device, base)) for run in runs]


def held_out_error(
    runs: Sequence[Sensitive], base: Device, draws: int, rng: random.Random
) -> tuple[float, float]:
    """Mean absolute errors as shipped, and of the rows that were not among the three drawn."""
    before = mean(abs(run.predicted_s / run.measured_s - 1) for run in runs)
    after = []
    for _ in range(draws):
        chosen = rng.sample(range(len(runs)), min(TRIPLE, len(runs) - 1))
        three = [runs[i] for i in chosen]
        rest = [run for i, run in enumerate(runs) if i not in chosen]
        measured_s = [run.measured_s for run in three]
        device = calibrate(base, predictor(three, base), measured_s, source="three").device
        predicted_s = predictor(rest, base)(device)
        after.append(mean(abs(p / r.measured_s - 1) for p, r in zip(predicted_s, rest, strict=True)))
    return before, mean(after)


def timed_runs(paths: Sequence[Path]) -> dict[str, list[Run]]:
    """Runs that ended and have a measured step, by source: an even spread of each."""
    found: dict[str, list[Run]] = {}
    for row in read_rows(paths):
        try:
            run = parse(row, (DEVICES,))
        except (Unscorable, UserError):
            continue
        if run.outcome == "ok" and run.step_time_s:
            found.setdefault(run.source, []).append(run)
    return {source: [runs[i] for i in spread(len(runs), ROWS_A_SOURCE)] for source, runs in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="+", type=Path)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--cache", type=Path, help="keep captured graphs in this folder")
    options = parser.parse_args()
    scorer, totals = Scorer(Graphs(options.cache)), []
    for source, runs in timed_runs(options.rows).items():
        rng = random.Random(0)
        devices: dict[str, list[Run]] = {}
        for run in runs:
            devices.setdefault(run.cluster.device.name, []).append(run)
        errors = []
        for group in devices.values():
            if len(group) > 1:
                known = [sensitive(run, scorer) for run in group]
                found = held_out_error(known, group[0].cluster.device, options.draws, rng)
                errors.append((len(group), *found))
        if errors:
            rows = sum(n for n, _, _ in errors)
            before, after = (sum(e[0] * e[k] for e in errors) / rows for k in (1, 2))
            totals.append((before, after))
            print(f"{source[:70]:70} {rows:4} {before:6.1%} {after:6.1%}", flush=True)
    before, after = (mean(t[k] for t in totals) for k in (0, 1))
    print(f"{'mean over sources':75} {before:6.1%} {after:6.1%}")


if __name__ == "__main__":
    main()
