"""The last step for others to read: Prometheus' text format in a file, and TensorBoard, which also gets pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoparallel.errors import UserError

# The predicted timeline (`answer.timeline_table`) and that of a recorded step, as pixels: height, width, RGB.
Draw = Callable[[Mapping[str, Any], Sequence[Any]], NDArray[np.uint8]]

# Name, type, help, and where it stands in the record's step; a list is one value a rank.
_METRICS = (
    ("step", "counter", "Steps that are done", "step"),
    ("loss", "gauge", "Mean loss over the global batch", "loss"),
    ("step_seconds", "gauge", "Seconds of the last step", "seconds"),
    ("efficiency_ratio", "gauge", "Predicted over measured seconds of a step", "efficiency"),
    ("computing_seconds", "gauge", "Seconds that a rank computed in the last step", "computing_s"),
    ("communicating_seconds", "gauge", "Seconds that a rank communicated in the last step", "communicating_s"),
    ("waiting_seconds", "gauge", "Seconds that a rank waited for others in the last step", "waiting_s"),
    ("memory_bytes", "gauge", "Largest memory of a rank so far", "memory_bytes"),
    ("skipped_ratio", "gauge", "Share of the last 50 steps whose batch was left out", "skipped_share"),
)  # fmt: skip
# Likewise of each entry of a step's "collectives"; one value a kind and level.
_COLLECTIVES = (
    ("collective_bytes", "gauge", "Bytes that a rank sent in the last step, by kind of collective and level of the network", "bytes"),
    ("collective_seconds", "gauge", "Seconds that these collectives were under way in the last step", "seconds"),
    ("collective_bytes_per_second", "gauge", "Bandwidth that these collectives reached", "bytes_per_s"),
    ("collective_priced_bytes_per_second", "gauge", "Bandwidth that these collectives were priced at", "priced_bytes_per_s"),
)  # fmt: skip


def prometheus_text(step: Mapping[str, Any]) -> str:
    """A step of the record in Prometheus' text format (version 0.0.4)."""
    lines = []
    for name, kind, said, key in _METRICS:
        value = step.get(key)
        if value is None:
            continue
        full = f"autoparallel_{name}"
        lines += [f"# HELP {full} {said}", f"# TYPE {full} {kind}"]
        if isinstance(value, list):
            lines += [f'{full}{{rank="{rank}"}} {_number(one)}' for rank, one in enumerate(value)]
        else:
            lines.append(f"{full} {_number(value)}")
    for name, kind, said, key in _COLLECTIVES:
        full = f"autoparallel_{name}"
        values = [
            f'{full}{{op="{one["op"]}",level="{_label(one["level"])}"}} {_number(one[key])}'
            for one in step.get("collectives", ())
            if one.get(key) is not None
        ]
        if values:
            lines += [f"# HELP {full} {said}", f"# TYPE {full} {kind}", *values]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    text = repr(float(value))
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(text, text)


def _label(text: str) -> str:
    """A label's value, escaped as the format wants it."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def write_prometheus(path: Path, step: Mapping[str, Any]) -> None:
    """Write `prometheus_text` aside and rename, as node_exporter's textfile collector wants it."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(prometheus_text(step), encoding="utf-8")
    aside.replace(path)


class TensorBoard:
    """Scalars of each step for TensorBoard, and the timelines of some as a picture by `draw`, in `folder`. Raises UserError
    where tensorboard is not installed."""

    def __init__(self, folder: Path, draw: Draw | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                'tensorboard is not installed: pip install "autoparallel-planner[tensorboard]", or leave tensorboard= out'
            ) from None
        self._writer, self._draw = SummaryWriter(str(folder)), draw

    def add(self, step: Mapping[str, Any]) -> None:
        """One step of the record."""
        number = step["step"]
        for name, _, _, key in _METRICS[1:]:
            value = step.get(key)
            if isinstance(value, list):
                self._writer.add_scalars(name, {f"rank {r}": v for r, v in enumerate(value)}, number)
            elif value is not None:
                self._writer.add_scalar(name, value, number)
        for one in step.get("collectives", ()):
            for name, _, _, key in _COLLECTIVES:
                if one.get(key) is not None:
                    self._writer.add_scalar(f"{name}/{one['op']} {one['level']}", one[key], number)
        self._writer.flush()

    def add_timeline(self, step: int, predicted: Mapping[str, Any], measured: Sequence[Any]) -> None:
        """A step that was recorded action by action, below what was predicted."""
        if self._draw is not None:
            self._writer.add_image("timeline", self._draw(predicted, measured), step, dataformats="HWC")
            self._writer.flush()
