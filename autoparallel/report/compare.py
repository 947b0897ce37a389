"""The page of a what-if: cases side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoparallel.costmodel.prediction import BREAKDOWN_KEYS
from autoparallel.labels import counted
from autoparallel.report.charts import WIDTH, Box, Chart, breakdown_bar
from autoparallel.report.numbers import gib, significant
from autoparallel.report.page import environment, resource

BAR = 20.0


def render_comparison(model: str, rows: Sequence[Mapping[str, Any]], tokens: float | None = None) -> str:
    """One self-contained HTML page for the cases of a what-if (`answer.outcome_table`, with `tokens`), fastest first."""
    planned = sorted((r for r in rows if "reason" not in r), key=lambda r: -r["tokens_per_s"])
    fastest = planned[0]["tokens_per_s"] if planned else 1.0
    what = counted(planned[0]["sample"]) if planned else "tokens"
    context = {
        "style": resource("style.css"),
        "model": model,
        "name": planned[0]["model"]["name"] if planned else model,
        "settings": list(rows[0]["settings"]),
        "tokens": tokens,
        "counted": what,
        "priced": any("price_per_trillion_tokens" in row for row in planned),
        "planned": [
            {
                **row,
                "title": " · ".join(
                    value if key == "cluster" else f"{key} {value}" for key, value in row["settings"].items()
                ),
                "speed": _share_bar(
                    row["tokens_per_s"] / fastest, f"{significant(row['tokens_per_s'])} {what}/s"
                ),
                "fill": _share_bar(
                    row["peak_memory_gib"] / row["capacity_gib"],
                    f"{gib(row['peak_memory_gib'])} of {gib(row['capacity_gib'])}",
                ),
                "bar": breakdown_bar(row["breakdown_s"]),
            }
            for row in planned
        ],
        "failed": [row for row in rows if "reason" in row],
        "parts": [key for key in BREAKDOWN_KEYS if any(row["breakdown_s"][key] > 0 for row in planned)],
    }
    return environment().get_template("compare.html.j2").render(context)


def _share_bar(share: float, tip: str) -> Chart:
    """A bar filled to `share` of its width."""
    full = WIDTH / 4
    boxes = (
        Box(x=0, y=0, width=full, height=BAR, css="bubble", tip=tip),
        Box(x=0, y=0, width=full * min(share, 1.0), height=BAR, css="forward", tip=tip),
    )
    return Chart(width=full, height=BAR, boxes=boxes, left=0.0)
