"""Predicted against measured step time as a scatter plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go


def write_scatter(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One self-contained HTML page: a point a row, a colour a source, lines at equality and at 10 %."""
    figure = go.Figure()
    measured = [r["measured_s"] for r in rows if r["measured_s"]]
    for source in dict.fromkeys(r["source"] for r in rows):
        own = [r for r in rows if r["source"] == source and r["measured_s"]]
        figure.add_scatter(
            x=[r["measured_s"] for r in own],
            y=[r["predicted_s"] for r in own],
            text=[r["id"] for r in own],
            mode="markers",
            name=source[:40],
        )
    if measured:
        ends = [min(measured), max(measured)]
        for factor, dash in ((1.0, "solid"), (1.1, "dot"), (1 / 1.1, "dot")):
            line = {"color": "grey", "dash": dash, "width": 1}
            figure.add_scatter(
                x=ends, y=[factor * e for e in ends], mode="lines", line=line, showlegend=False
            )
    figure.update_xaxes(type="log", title="measured step time (s)")
    figure.update_yaxes(type="log", title="predicted step time (s)")
    partial = path.with_suffix(".partial")
    figure.write_html(partial, include_plotlyjs=True)
    partial.replace(path)
