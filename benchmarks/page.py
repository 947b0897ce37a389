"""Bring the tables of docs/accuracy.md up to what was measured: `python -m benchmarks.page ACCURACY.json [--check]`.

`ACCURACY.json` is what `benchmarks/accuracy.py … --json` wrote for all files of rows; what was left out is `published/left_out.csv`.
Tables of sources and of publishers are rewritten line by line; what else stands in a line (`blind`) and lines that are not named stay.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from math import exp
from pathlib import Path
from statistics import mean

from benchmarks.fit import ROWS
from benchmarks.publishers import publisher_of, publishers
from benchmarks.rows import read_rows
from benchmarks.scatter import LeftOut, read_left_out, timed
from benchmarks.summary import Scored, by, error_summary, order_summary, quantile

PAGE = Path(__file__).resolve().parents[1] / "docs" / "accuracy.md"
# The names of sources that the page shortens, or tells apart by file.
SHOWN = {
    ("released", "MosaicML llm-foundry benchmarking README"): "MosaicML llm-foundry on H100",
    (
        "released",
        "Decentralized-FM notes: Megatron-LM GPT-3 XL on V100 16 GB",
    ): "Decentralized-FM, V100 16 GB",
    (
        "released",
        "Decentralized-FM notes: one V100 per node, 10 Gbit/s",
    ): "Decentralized-FM, one V100 a node, 10 Gbit/s",
}
HEADS = {
    "mean_absolute_error": "mean abs. error",
    "p95_absolute_error": "95th percentile",
    "bias": "bias",
}  # of columns
Figures = Mapping[str, str]


def source_figures(scored: Sequence[Scored]) -> dict[str, Figures]:
    """By the page's name of a source: its figures by the heads of columns."""
    return {
        name: {"rows": str(len(rows)), **_errors(_of(rows)), **_order(rows)}
        for name, rows in by(lambda row: row.source, _timed(scored)).items()
    }


def file_figures(scored: Sequence[Scored]) -> Figures:
    """The means over the sources of one file."""
    rows = _timed(scored)
    sources = [error_summary(_of(group)) for group in by(lambda row: row.source, rows).values()]
    means = {key: mean(source[key] for source in sources) for key in HEADS}
    return {"rows": str(len(rows)), **_cells(means), **_order(rows)}


def _timed(scored: Sequence[Scored]) -> list[Scored]:
    return [row for row in scored if row.outcome == "ok" and row.error is not None]


def _of(rows: Sequence[Scored]) -> list[float]:
    return [row.error for row in rows if row.error is not None]


def _errors(errors: Sequence[float]) -> Figures:
    return _cells(error_summary(errors))


def _cells(found: Mapping[str, float]) -> Figures:
    return {head: f"{found[key]:{'+' if key == 'bias' else ''}.1%}" for key, head in HEADS.items()}


def _order(rows: Sequence[Scored]) -> Figures:
    found = order_summary(rows)
    if not found["groups"]:
        return {}
    return {
        "order (Kendall's tau)": f"{found['kendall_tau']:.2f}",
        "fastest found": f"{found['fastest_within_3_percent']:.0%}",
    }


def read_scored(path: Path) -> dict[str, list[Scored]]:
    """The rows of an ACCURACY.json by the file that they are from, their sources named as on the page."""
    known = {row["id"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}
    found: dict[str, list[Scored]] = {}
    for file in ROWS:
        name = file.name.split("_")[0]
        for row in read_rows([file]):
            one = known.get(row["id"], {"skipped": ""})
            if "skipped" not in one:
                scored = Scored(
                    id=row["id"], source=SHOWN.get((name, row["source"]), row["source"]), group=one["group"],
                    outcome=row["outcome"] or "ok", predicted_s=one["predicted_step_time_s"],
                    measured_s=one["measured_step_time_s"], feasible=one["feasible"],
                    predicted_gib=one["predicted_peak_memory_gib"], measured_gib=one["measured_peak_memory_gib"],
                    memory_kind="", fits_judged=True, mfu=0.0,
                )  # fmt: skip
                found.setdefault(name, []).append(scored)
    return found


def publisher_figures(rows: Sequence[LeftOut]) -> dict[str, Figures]:
    """By publisher, each of its sources counting alike, and of all, each publisher counting alike."""
    found: dict[str, tuple[int, float, float, float]] = {}
    for publisher in dict.fromkeys(row.publisher for row in rows):
        own = [row for row in rows if row.publisher == publisher]
        errors = {
            source: [exp(row.missed) - 1 for row in own if row.source == source]
            for source in {row.source for row in own}
        }
        found[publisher] = (
            len(own),
            mean(mean(map(abs, of)) for of in errors.values()),
            quantile([abs(error) for of in errors.values() for error in of], 0.95),
            mean(mean(of) for of in errors.values()),
        )
    every = (len(rows), *(mean(one[i] for one in found.values()) for i in (1, 2, 3)))
    return {
        name: {"rows": str(n), "left out": f"{off:.1%}", "95th percentile": f"{p95:.1%}", "bias": f"{bias:+.1%}"}
        for name, (n, off, p95, bias) in {**found, "**mean over publishers**": every}.items()
    }  # fmt: skip


def shipped_figures(scored: Sequence[Scored]) -> dict[str, Figures]:
    """By publisher: what the shipped constants say of its rows."""
    known = publishers() | {shown: publishers()[source] for (_, source), shown in SHOWN.items()}
    of_source = by(lambda row: row.source, _timed(scored))
    errors: dict[str, list[float]] = {}
    for source, rows in of_source.items():
        errors.setdefault(publisher_of(source, known), []).append(mean(map(abs, _of(rows))))
    means = {name: mean(sources) for name, sources in errors.items()}
    means["**mean over publishers**"] = mean(means.values())
    return {name: {"shipped constants": f"{value:.1%}"} for name, value in means.items()}


def rewritten(page: str, tables: Mapping[str, Mapping[str, Figures]], among: Sequence[str] = ()) -> str:
    """The page with the cells of every table whose first head is one of `tables`, by first cell and head of column;
    `among`: only of tables whose first line is one of these."""
    lines = page.split("\n")
    heads: list[str] = []
    ours = False
    for i, line in enumerate(lines):
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not cells:
            heads = []
        elif not heads:
            heads = cells
            first = lines[i + 2].split("|")[1].strip() if i + 2 < len(lines) and "|" in lines[i + 2] else ""
            ours = heads[0] in tables and (not among or first in among)
        elif ours and (figures := tables[heads[0]].get(cells[0])):
            new = [figures.get(head, cell) for head, cell in zip(heads, cells, strict=True)]
            lines[i] = "|" + "|".join(f" {cell} " if cell else " " for cell in new) + "|"
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("accuracy", type=Path)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where the page differs")
    options = parser.parse_args()
    scored = read_scored(options.accuracy)
    before = PAGE.read_text(encoding="utf-8")
    shipped = shipped_figures([row for rows in scored.values() for row in rows])
    left_out = publisher_figures(timed(read_left_out()))
    tables = {"publisher": {name: {**left_out[name], **shipped.get(name, {})} for name in left_out}}
    after = rewritten(before, tables)
    for rows in scored.values():
        figures = {**source_figures(rows), "**mean over sources**": file_figures(rows)}
        after = rewritten(after, {"source": figures}, among=[row.source for row in rows])
    if options.check:
        sys.exit(f"{PAGE}: run python -m benchmarks.page {options.accuracy}" if before != after else 0)
    PAGE.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
