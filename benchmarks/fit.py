"""From published rows to the constants of devices: `python -m benchmarks.fit [ROWS.csv …] [--write]`.

For rows i of publishers p, families f and homes h (`families.py`):

    minimise  sum_i w_i huber(log measured_i - log predicted_i(x))
              + sum_fh ((x[f, h] - x[f, parent of h]) / between_f)^2 + sum_f (x[f] / shared_f)^2

Rows of one publisher err together, so that n of them weigh no more than n / (1 + (n - 1) ALIKE) rows would, shared out
evenly among its sources. Starts at the priors, whatever the files hold, and linearises the logarithm of each predicted step a fixed
number of times: equal rows give equal files.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.accuracy import DEVICES, Graphs, Scorer
from benchmarks.families import ROOT, Home, Moves, Priors, means, read_priors, unknown_of, values
from benchmarks.publishers import publishers
from benchmarks.rows import read_rows
from benchmarks.sensitivity import Repricer, Sensitive, Timed, sensitive, timed_runs

PUBLISHED = Path(__file__).parent / "published"
ROWS = tuple(PUBLISHED / f"{name}_rows.csv" for name in ("training", "further", "released"))
ROWS_A_SOURCE = 12  # an even spread of each source and device
PASSES = 3  # linearisations
# What the forms leave of a row (log scale), and how alike the errors of a publisher's rows are. Kind: measured, on the
# rows themselves: errors scatter by 0.08, half of it between publishers.
NOISE, ALIKE = 0.08, 0.3
REWEIGHTINGS = 30

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknowns:
    """The columns of the fit: the shared factor of each family, then those of each home that has it."""

    names: tuple[tuple[str, str], ...]  # (family, home); home "" is what all generations share
    spreads: tuple[float, ...]
    parents: tuple[int, ...]  # the column that each lies near; -1: zero

    def place(self, family: str, home: str) -> int:
        return self.names.index((family, home))


def unknowns(priors: Priors) -> Unknowns:
    """All factors that rows may move, each with its prior."""
    names: list[tuple[str, str]] = []
    spreads: list[float] = []
    parents: list[int] = []
    for family in priors.families:
        first = len(names)
        names.append((family.name, ""))
        spreads.append(family.shared)
        parents.append(-1)
        for home in priors.homes.values():
            if priors.states(home.name, family) and not home.follows:
                above = (family.name, home.parent)
                parents.append(names.index(above) if above in names else first)
                names.append((family.name, home.name))
                spreads.append(family.between)
    return Unknowns(names=tuple(names), spreads=tuple(spreads), parents=tuple(parents))


def weights(rows: Sequence[Sensitive]) -> Vector:
    """What each row counts."""
    of_publisher: dict[str, list[Sensitive]] = {}
    of_source: dict[str, int] = {}
    for row in rows:
        of_publisher.setdefault(row.timed.publisher, []).append(row)
        of_source[row.timed.run.source] = of_source.get(row.timed.run.source, 0) + 1
    found = []
    for row in rows:
        mates = of_publisher[row.timed.publisher]
        sources = len({mate.timed.run.source for mate in mates})
        worth = len(mates) / (1 + (len(mates) - 1) * ALIKE / sources)
        found.append(worth / sources / of_source[row.timed.run.source])
    return np.array(found)


def solve(rows: Sequence[Sensitive], priors: Priors, at: Moves) -> dict[tuple[str, str], float]:
    """The factors that rows ask for, linearised at `at`, where they were priced."""
    columns = unknowns(priors)
    slopes = np.zeros((len(rows), len(columns.names)))
    missed = np.zeros(len(rows))
    for i, row in enumerate(rows):
        missed[i] = np.log(row.measured_s / row.predicted_s)
        for family, slope in zip(priors.families, row.slopes, strict=True):
            home = priors.home_of(family, row.timed.run.cluster.device.name, row.timed.generation)
            if home is not None:
                own = unknown_of(priors, home)
                slopes[i, columns.place(family.name, own)] = slope
                missed[i] += slope * at.get((family.name, own), 0.0)
    return dict(zip(columns.names, _least(slopes, missed, weights(rows), columns).tolist(), strict=True))


def _least(slopes: Vector, missed: Vector, weight: Vector, columns: Unknowns) -> Vector:
    """Huber's minimum with the priors, by reweighted least squares."""
    size = len(columns.names)
    tied = np.eye(size)
    for i, parent in enumerate(columns.parents):
        if parent >= 0:
            tied[i, parent] = -1.0
    prior = tied.T @ np.diag(1 / np.square(columns.spreads)) @ tied
    x = np.zeros(size)
    for _ in range(REWEIGHTINGS):
        left = (missed - slopes @ x) / NOISE
        scale = weight / np.maximum(np.abs(left), 1.0) / NOISE**2
        x = np.linalg.solve(slopes.T @ (scale[:, None] * slopes) + prior, slopes.T @ (scale * missed))
    return x


def priced(runs: Sequence[Timed], priors: Priors, at: Moves, graphs: Graphs) -> list[Sensitive]:
    """Every run under `at`."""
    repricer = Repricer(Scorer(graphs))
    found = (sensitive(run, priors, at, repricer) for run in runs)
    return [row for row in found if row is not None]


def fit(runs: Sequence[Timed], priors: Priors, graphs: Graphs) -> dict[tuple[str, str], float]:
    """The factors after all passes, from the priors."""
    at: dict[tuple[str, str], float] = {}
    for number in range(PASSES):
        rows = priced(runs, priors, at, graphs)
        at = solve(rows, priors, at)
        errors = [abs(row.predicted_s / row.measured_s - 1) for row in rows]
        print(f"pass {number + 1}: {len(rows)} rows, {sum(errors) / len(errors):.1%} off before it")
    return at


def rewritten(text: str, constants: Mapping[str, tuple[float, str]]) -> str:
    """A profile's text with other constants: value and source by dotted key. Keys that it does not hold are added."""
    section, left, lines = "", dict(constants), []
    for line in text.splitlines():
        if head := re.fullmatch(r"\[constants\.(.+)\]", line):
            section = head[1]
        elif line.startswith("["):
            section = ""
        key = f"{section}.{line.split(' = ')[0]}"
        if section and key in left:
            value, source = left.pop(key)
            line = f'{line.split(" = ")[0]} = {{ value = {value:g}, kind = "fitted", source = "{source}" }}'
        lines.append(line)
    for key, (value, source) in sorted(left.items()):
        table, name = key.rsplit(".", 1)
        entry = f'{name} = {{ value = {value:g}, kind = "fitted", source = "{source}" }}'
        at = lines.index(f"[constants.{table}]") if f"[constants.{table}]" in lines else -1
        if at >= 0:
            lines.insert(at + 1, entry)
        else:
            lines += ["", f"[constants.{table}]", entry]
    return "\n".join(lines) + "\n"


def write_home(home: Home, priors: Priors, at: Moves, rows: Sequence[Timed]) -> None:
    """The constants of a home into its files."""
    devices = {path.stem for path in home.files}
    own = [r for r in rows if r.generation == home.name or r.run.cluster.device.name in devices]
    said = f"rows of {len({r.publisher for r in own})} publishers" if own else "rows of other generations"
    between = " and ".join(home.between)
    source = f"benchmarks/fit.py: the mean of {between}, whose kernels are published"
    found = {key: (value, source) for key, value in means(priors, home.name).items()}
    for key, value in values(priors, at, home.name).items():
        figure = home.prior[key]
        source = f"benchmarks/fit.py: {said}, from {figure.value:g} ({figure.kind}: {figure.source})"
        found[key] = (value, source)
    for path in home.files:
        path.write_text(rewritten(path.read_text(encoding="utf-8"), found), encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


def print_moves(priors: Priors, at: Moves) -> None:
    """The factors as a table: families by homes."""
    homes = ["", *priors.homes]
    print(f"{'':20}" + "".join(f"{home or 'all':>15}" for home in homes))
    for family in priors.families:
        cells = [at.get((family.name, home)) for home in homes]
        print(
            f"{family.name:20}" + "".join(f"{np.exp(c):15.3f}" if c is not None else " " * 15 for c in cells)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", type=Path, default=list(ROWS))
    parser.add_argument("--write", action="store_true", help="write the constants into the profiles")
    parser.add_argument("--cache", type=Path, help="keep captured graphs in this folder")
    options = parser.parse_args()
    priors = read_priors()
    runs = timed_runs(read_rows(options.rows), publishers(), (DEVICES,), ROWS_A_SOURCE)
    at = fit(runs, priors, Graphs(options.cache))
    print_moves(priors, at)
    if options.write:
        for home in priors.homes.values():
            write_home(home, priors, at, runs)


if __name__ == "__main__":
    main()
