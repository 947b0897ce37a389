"""Geometry of the report's pictures: data in, coordinates out. The template draws them as inline SVG.

Lengths are in SVG user units (pixels at natural size). Colours are CSS classes, so that the page's light and
dark themes both work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoparallel.costmodel.prediction import Span
from autoparallel.report.numbers import gib, seconds, tick_seconds

WIDTH = 920.0
LEFT = 64.0  # room for axis labels
BYTE_GIB = 2.0**-30
FAR_AWAY = 4.0  # a capacity that many times what is used would squeeze what there is to see
MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A filled rectangle with a tooltip, and a text inside it where there is room."""

    x: float
    y: float
    width: float
    height: float
    css: str
    tip: str
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A labelled position on an axis."""

    at: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A point of the scatter."""

    x: float
    y: float
    css: str
    tip: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A picture: boxes, dots, axes, and lines as SVG point lists."""

    width: float
    height: float
    boxes: tuple[Box, ...] = ()
    dots: tuple[Dot, ...] = ()
    x_ticks: tuple[Tick, ...] = ()
    y_ticks: tuple[Tick, ...] = ()
    line: str = ""  # the frontier
    limit: Tick | None = None  # capacity, as a y coordinate
    cut: Tick | None = None  # x where a timeline is cut
    left: float = LEFT
    bottom: float = 0.0  # y of the x axis


def breakdown_bar(breakdown_s: Mapping[str, float]) -> Chart:
    """One bar, a piece per key that takes time."""
    total = sum(breakdown_s.values())
    boxes, x, height = [], 0.0, 46.0
    for key, value in breakdown_s.items():
        width = WIDTH * value / total if total else 0.0
        if width <= 0:
            continue
        share = value / total
        text = f"{share * 100:.0f} %" if width > 46 else ""
        tip = f"{key}: {seconds(value)} ({share * 100:.1f} %)"
        boxes.append(Box(x=x, y=0, width=width, height=height, css=key, tip=tip, text=text))
        x += width
    return Chart(width=WIDTH, height=height, boxes=tuple(boxes), left=0.0)


def memory_bars(stages: Sequence[Mapping[str, Any]], capacity_gib: float | None) -> Chart:
    """A column per pipeline rank, stacked by what holds the memory, against the capacity."""
    top, height = 20.0, 250.0
    bottom = top + height
    peak = max((stage["peak"] for stage in stages), default=0.0)
    shown_gib = capacity_gib if capacity_gib and capacity_gib < FAR_AWAY * peak else None
    ceiling = max(peak, shown_gib or 0.0) * 1.05
    ceiling = ceiling if ceiling > BYTE_GIB else 1.0
    to_y = _linear(0.0, ceiling, bottom, top)
    pitch = min((WIDTH - LEFT) / max(len(stages), 1), 150.0)
    gap = pitch * 0.25
    boxes, ticks = [], []
    every = math.ceil(len(stages) / 24)
    for i, stage in enumerate(stages):
        x, y = LEFT + i * pitch + gap / 2, bottom
        for part in MEMORY_PARTS:
            part_height = bottom - to_y(stage[part])
            y -= part_height
            tip = f"stage {stage['stage']}, {part}: {gib(stage[part])} (peak of all: {gib(stage['peak'])})"
            if part_height > 0:
                boxes.append(Box(x=x, y=y, width=pitch - gap, height=part_height, css=f"mem-{part}", tip=tip))
        if i % every == 0:
            ticks.append(Tick(at=x + (pitch - gap) / 2, label=str(stage["stage"])))
    limit = _capacity_line(shown_gib, to_y)
    return Chart(
        width=WIDTH,
        height=bottom + 24,
        boxes=tuple(boxes),
        x_ticks=tuple(ticks),
        y_ticks=_ticks(0.0, ceiling, to_y, lambda v: f"{v:g}"),
        limit=limit,
        bottom=bottom,
    )


def line(points: Sequence[tuple[float, float]]) -> Chart:
    """A curve, both axes linear; of many points an even spread."""
    shown = points[:: max(len(points) // 800, 1)]
    low, high = min(y for _, y in shown), max(y for _, y in shown)
    pad = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    top, bottom = 8.0, 180.0
    to_x = _linear(shown[0][0], shown[-1][0], LEFT, WIDTH - 12)
    to_y = _linear(low - pad, high + pad, bottom, top)
    return Chart(
        width=WIDTH,
        height=bottom + 24,
        line=" ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in shown),
        x_ticks=_ticks(shown[0][0], shown[-1][0], to_x, lambda v: f"{v:g}"),
        y_ticks=_ticks(low - pad, high + pad, to_y, lambda v: f"{v:.3g}"),
        bottom=bottom,
    )


def timeline(
    spans: Sequence[Span], cut_s: tuple[float, float] | None, *, end_s: float | None = None
) -> Chart:
    """A row per pipeline rank; a long timeline shows its beginning and its end, with a break between. `end_s`: where the axis
    ends, so that two of them can be compared."""
    ranks = max((span.rank for span in spans), default=0) + 1
    row = 30.0 if ranks <= 16 else max(8.0, 480.0 / ranks)
    top, gap = 4.0, 26.0
    bottom = top + row * ranks
    end_s = end_s or max((span.end_s for span in spans), default=0.0) or 1.0
    to_x, break_x = _timeline_scale(end_s, cut_s, gap)
    boxes = []
    for span in spans:
        comm = span.label.endswith("_comm")
        start_s, stop_s = _clip(span, cut_s)
        x = to_x(start_s)
        width = max(to_x(stop_s) - x, 0.4)
        y = top + span.rank * row
        inner = row - 3.0
        stage, kind, micro = split_action(span.action)
        boxes.append(
            Box(
                x=x,
                y=y + inner * 0.78 if comm else y,
                width=width,
                height=inner * 0.22 if comm else inner * 0.76,
                css=_span_css(span.label, kind),
                tip=_span_tip(span, stage, kind, micro),
                text=micro if not comm and width > 7 * len(micro) + 3 and row >= 20 else "",
            )
        )
    every = math.ceil(ranks / 24)
    shown = [r for r in range(ranks) if r % every == 0]
    x_ticks = _ticks(0.0, cut_s[0] if cut_s else end_s, to_x, tick_seconds)
    if cut_s:
        x_ticks = (*x_ticks, Tick(at=WIDTH - 30.0, label=seconds(end_s)))
    return Chart(
        width=WIDTH,
        height=bottom + 24,
        boxes=tuple(boxes),
        x_ticks=x_ticks,
        y_ticks=tuple(Tick(at=top + r * row + row / 2, label=f"rank {r}") for r in shown),
        cut=Tick(at=break_x, label="…") if cut_s else None,
        bottom=bottom,
    )


def _timeline_scale(
    end_s: float, cut_s: tuple[float, float] | None, gap: float
) -> tuple[Callable[[float], float], float]:
    """Seconds to x; what lies inside the cut is drawn as `gap`."""
    if cut_s is None:
        return _linear(0.0, end_s, LEFT, WIDTH), 0.0
    shown_s = cut_s[0] + (end_s - cut_s[1])
    per_s = (WIDTH - LEFT - gap) / shown_s

    def to_x(value_s: float) -> float:
        if value_s <= cut_s[0]:
            return LEFT + value_s * per_s
        return LEFT + cut_s[0] * per_s + gap + max(value_s - cut_s[1], 0.0) * per_s

    return to_x, LEFT + cut_s[0] * per_s + gap / 2


def _clip(span: Span, cut_s: tuple[float, float] | None) -> tuple[float, float]:
    """A span that reaches into the cut ends where the cut begins."""
    if cut_s is None or span.start_s >= cut_s[1]:
        return span.start_s, span.end_s
    return span.start_s, min(span.end_s, cut_s[0])


def split_action(action: str) -> tuple[str, str, str]:
    """`2F0` to ("2", "F", "0"): stage, kind, micro-batch ("" where there is none)."""
    stage = action[: len(action) - len(action.lstrip("0123456789"))]
    rest = action[len(stage) :]
    kind = rest.rstrip("0123456789")
    return stage, kind, rest[len(kind) :]


def _span_css(label: str, kind: str) -> str:
    if kind in ("F", "B", "I", "W"):
        return {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}[kind]
    return label


def _span_tip(span: Span, stage: str, kind: str, micro: str) -> str:
    names = {
        "F": "forward", "B": "backward", "I": "backward (inputs)", "W": "backward (weights)",
        "STEP": "gather of updated parameters" if span.label == "dp_comm" else span.label.replace("_", " "),
    }  # fmt: skip
    what = f"{names.get(kind, kind.lower().replace('_', ' '))} of stage {stage}"
    if micro:
        what += f", micro-batch {micro}"
    return f"{what}: {seconds(span.end_s - span.start_s)}, from {seconds(span.start_s)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One strategy that the search priced."""

    step_time_s: float
    peak_gib: float
    fits: bool
    label: str


def scatter(
    candidates: Sequence[Candidate], chosen: Candidate | None, capacity_gib: float | None
) -> Chart | None:
    """Step time against peak memory, both logarithmic, with the frontier of what fits."""
    others = [c for c in candidates if c != chosen]  # which the search saw, too
    points = [*others, *([chosen] if chosen else [])]
    points = [c for c in points if c.step_time_s > 0 and c.peak_gib > 0]
    if not points:
        return None
    top, bottom = 12.0, 360.0
    times = [c.step_time_s for c in points]
    sizes = [c.peak_gib for c in points]
    shown_gib = capacity_gib if capacity_gib and capacity_gib < FAR_AWAY * max(sizes) else None
    sizes = [*sizes, *([shown_gib] if shown_gib else [])]
    to_x = _logarithmic(min(times) / 1.05, max(times) * 1.05, LEFT, WIDTH - 12)
    to_y = _logarithmic(min(sizes) / 1.1, max(sizes) * 1.1, bottom, top)
    dots = [
        Dot(x=to_x(c.step_time_s), y=to_y(c.peak_gib), css="fits" if c.fits else "too-big", tip=_tip(c))
        for c in sorted(others, key=lambda c: c.fits)
        if c.step_time_s > 0 and c.peak_gib > 0
    ]
    if chosen:
        dots.append(
            Dot(
                x=to_x(chosen.step_time_s),
                y=to_y(chosen.peak_gib),
                css="chosen",
                tip=f"chosen: {_tip(chosen)}",
            )
        )
    edge = frontier([c for c in points if c.fits])
    return Chart(
        width=WIDTH,
        height=bottom + 40,
        dots=tuple(dots),
        line=" ".join(f"{to_x(c.step_time_s):.1f},{to_y(c.peak_gib):.1f}" for c in edge),
        x_ticks=_log_ticks(min(times) / 1.05, max(times) * 1.05, to_x, tick_seconds),
        y_ticks=_log_ticks(min(sizes) / 1.1, max(sizes) * 1.1, to_y, lambda v: f"{v:g}"),
        limit=_capacity_line(shown_gib, to_y),
        bottom=bottom,
    )


def _capacity_line(capacity_gib: float | None, to_y: Callable[[float], float]) -> Tick | None:
    return Tick(at=to_y(capacity_gib), label=f"capacity {gib(capacity_gib)}") if capacity_gib else None


def _tip(candidate: Candidate) -> str:
    fits = "" if candidate.fits else ", does not fit"
    return f"{candidate.label}: {seconds(candidate.step_time_s)}, {gib(candidate.peak_gib)}{fits}"


def frontier(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other beats in both time and memory, fastest first."""
    edge: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.step_time_s, c.peak_gib)):
        if not edge or candidate.peak_gib < edge[-1].peak_gib:
            edge.append(candidate)
    return edge


def _linear(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _logarithmic(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    scale = _linear(math.log(low), math.log(high), start, end)
    return lambda value: scale(math.log(value))


def _ticks(
    low: float, high: float, place: Callable[[float], float], show: Callable[[float], str]
) -> tuple[Tick, ...]:
    """Four to eight round numbers."""
    raw = (high - low) / 6
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw)
    first = math.ceil(low / step)
    values = [step * i for i in range(first, math.floor(high / step) + 1)]
    return tuple(Tick(at=place(value), label=show(value) if value else "0") for value in values)


def _log_ticks(
    low: float, high: float, place: Callable[[float], float], show: Callable[[float], str]
) -> tuple[Tick, ...]:
    """Round numbers at 1, 2, 5 of each decade; linear ticks where the range is too narrow for those."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [m * 10.0**d for d in decades for m in (1, 2, 5) if low <= m * 10.0**d <= high]
    if len(values) < 3:
        return _ticks(low, high, place, show)
    while len(values) > 9:
        values = values[::2]
    return tuple(Tick(at=place(value), label=show(value)) for value in values)
