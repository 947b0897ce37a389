"""The accuracy that a test holds: `python benchmarks/held.py` measures it anew and writes `reached.json`.

A few rows of each source, evenly spread, so that the test takes seconds; the whole is `benchmarks/accuracy.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.accuracy import DEVICES, Graphs, Scorer, score_rows, spread
from benchmarks.rows import SET_ASIDE, Row, read_rows
from benchmarks.summary import Scored, by

REACHED = Path(__file__).parent / "reached.json"
PUBLISHED = Path(__file__).parent / "published"
ROWS = {
    "": PUBLISHED / "training_rows.csv",
    " (released)": PUBLISHED / "released_rows.csv",
}  # by what follows a source's name
ROWS_A_SOURCE = 3


def sampled(rows: Sequence[Row]) -> list[Row]:
    """An even spread of each source's rows that ran."""
    sources: dict[str, list[Row]] = {}
    for row in rows:
        if row["outcome"] == "ok":
            sources.setdefault(row["source"], []).append(row)
    return [group[i] for group in sources.values() for i in spread(len(group), ROWS_A_SOURCE)]


def errors_by_source(scored: Sequence[Scored]) -> dict[str, float]:
    """Mean absolute relative error of the step time."""
    return {
        source: mean(abs(r.error) for r in rows if r.error is not None)
        for source, rows in by(lambda r: r.source, scored).items()
    }


def measured_errors() -> tuple[dict[str, float], list[Scored], list[dict[str, str]]]:
    """The error of each source's spread, its rows, and those that were skipped."""
    errors: dict[str, float] = {}
    rows, missing = [], []
    for ending, path in ROWS.items():
        scored, skipped = score_rows(sampled(read_rows([path])), Scorer(Graphs(None)), (DEVICES,))
        errors |= {f"{source}{ending}": error for source, error in errors_by_source(scored).items()}
        rows += scored
        missing += [one for one in skipped if one["id"] not in SET_ASIDE]
    return errors, rows, missing


def main() -> None:
    reached = {source: round(error, 4) for source, error in measured_errors()[0].items()}
    REACHED.write_text(json.dumps(reached, indent=1) + "\n")
    print(REACHED.read_text())


if __name__ == "__main__":
    main()
