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

from benchmarks.accuracy import Graphs, Scorer, score_rows, spread
from benchmarks.rows import Row, read_rows
from benchmarks.summary import Scored, by

REACHED = Path(__file__).parent / "reached.json"
ROWS = Path(__file__).parent / "published" / "training_rows.csv"
ROWS_A_SOURCE = 10


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


def main() -> None:
    scored, _ = score_rows(sampled(read_rows([ROWS])), Scorer(Graphs(None)), ())
    reached = {source: round(error, 4) for source, error in errors_by_source(scored).items()}
    REACHED.write_text(json.dumps(reached, indent=1) + "\n")
    print(REACHED.read_text())


if __name__ == "__main__":
    main()
