"""Does the model flatter what a planner would pick? `python benchmarks/winners.py ROWS.csv … [--cache DIR]`.

A planner takes the strategy with the highest predicted rate, so that errors in its favour are picked more often than others
(the winner's curse). For each device and dtype: the highest model FLOPs utilisation that anybody measured, and the error of
the tenth of the rows with the highest predicted one (at least three), beside that of all rows; positive errors are too slow.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.accuracy import DEVICES, Graphs, Scorer, score_rows
from benchmarks.rows import Row, read_rows
from benchmarks.summary import Scored

LEAST, SHARE = 3, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Winners:
    """Rows of one device and dtype: how high their MFU was measured, and how far off those are that look best."""

    rows: int
    measured_mfu: float
    predicted_mfu: float
    bias: float
    winners_bias: float


def measured_mfu(row: Scored) -> float:
    """The predicted utilisation at the measured step."""
    assert row.measured_s
    return row.mfu * row.predicted_s / row.measured_s


def winners(rows: Sequence[Scored]) -> Winners:
    """What is said of the rows of one device and dtype."""
    best = sorted(rows, key=lambda row: -row.mfu)[: max(LEAST, round(SHARE * len(rows)))]
    return Winners(
        rows=len(rows),
        measured_mfu=max(map(measured_mfu, rows)),
        predicted_mfu=best[0].mfu,
        bias=mean(row.error or 0.0 for row in rows),
        winners_bias=mean(row.error or 0.0 for row in best),
    )


def by_device(rows: Sequence[Row], scored: Sequence[Scored]) -> dict[tuple[str, str], Winners]:
    """Winners of each device and dtype that has enough rows."""
    place = {row["id"]: (row["device"], row["dtype"]) for row in rows}
    groups: dict[tuple[str, str], list[Scored]] = {}
    for one in scored:
        if one.outcome == "ok" and one.measured_s:
            groups.setdefault(place[one.id], []).append(one)
    return {key: winners(group) for key, group in sorted(groups.items()) if len(group) >= LEAST}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="+", type=Path)
    parser.add_argument("--cache", type=Path, help="keep captured graphs in this folder")
    options = parser.parse_args()
    rows = read_rows(options.rows)
    scored, _ = score_rows(rows, Scorer(Graphs(options.cache)), (DEVICES,))
    print(
        "| device | dtype | rows | highest MFU measured | highest predicted | bias | bias of those that look best |"
    )
    print("|---|---|---|---|---|---|---|")
    for (device, dtype), w in by_device(rows, scored).items():
        print(
            f"| {device} | {dtype} | {w.rows} | {w.measured_mfu:.0%} | {w.predicted_mfu:.0%} | {w.bias:+.1%} | {w.winners_bias:+.1%} |"
        )


if __name__ == "__main__":
    main()
