"""The timelines of a step as pixels, for who shows no HTML. Needs Pillow, which tensorboard needs, too."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autoparallel.report.charts import LEFT, WIDTH, Chart
from autoparallel.report.timelines import KINDS, timelines

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

    Font = FreeTypeFont | ImageFont

_MARGIN, _TITLE, _LEGEND = 10.0, 24.0, 26.0  # pixels
_FONT, _SMALL = 12.0, 11.0
_APART = 6.0  # the least width of boxes between which a pixel stays free


def draw_step(
    table: Mapping[str, Any], ranks: Sequence[Sequence[tuple[str, int, float, float]]]
) -> NDArray[np.uint8]:
    """The predicted timeline above the measured one, as the page of a run has them: height, width, RGB. Arguments are those of
    `timelines`."""
    from PIL import Image, ImageDraw, ImageFont

    both = timelines(table, ranks)
    shown = [
        (f"{title}{', its middle left out' if both.cut_s and title == 'predicted' else ''}", chart)
        for title, chart in (("predicted", both.predicted_chart), ("measured", both.measured_chart))
        if chart is not None
    ]
    height = sum(_TITLE + chart.height for _, chart in shown) + _LEGEND + 2 * _MARGIN
    colours = _colours()
    image = Image.new("RGB", (round(WIDTH + 2 * _MARGIN), round(height)), colours["card"])
    draw = ImageDraw.Draw(image)
    font, small = ImageFont.load_default(_FONT), ImageFont.load_default(_SMALL)
    y = _MARGIN
    for title, chart in shown:
        draw.text((_MARGIN, y), title, fill=colours["ink"], font=font)
        _draw_chart(draw, chart, y + _TITLE, colours, small)
        y += _TITLE + chart.height
    _draw_legend(draw, y + _LEGEND / 2, colours, small)
    return np.asarray(image, dtype=np.uint8)


def _colours() -> dict[str, str]:
    """Colours of the page's light theme, by their names and by the kinds of action."""
    css = (files("autoparallel.report") / "style.css").read_text(encoding="utf-8")
    named = dict(re.findall(r"--(\w+): (#\w{6});", css.partition("@media")[0]))
    kinds = re.findall(r"^\.(\w+) \{ fill: var\(--(\w+)\)", css, re.MULTILINE)
    return {**named, **{kind: named[name] for kind, name in kinds}}


def _draw_chart(draw: ImageDraw, chart: Chart, top: float, colours: Mapping[str, str], font: Font) -> None:
    left, soft, bottom = _MARGIN, colours["soft"], top + chart.bottom
    for tick in chart.y_ticks:
        draw.text((left + LEFT - 8, top + tick.at), tick.label, fill=soft, font=font, anchor="rm")
    for tick in chart.x_ticks:
        draw.line((left + tick.at, bottom, left + tick.at, bottom + 4), fill=colours["line"])
        draw.text((left + tick.at, bottom + 6), tick.label, fill=soft, font=font, anchor="mt")
    for box in chart.boxes:
        x, y = left + box.x, top + box.y
        # Pillow draws right and lower edges, too; a pixel stays free, so that actions of one kind are told apart.
        corner = (max(x + box.width - (2 if box.width > _APART else 1), x), max(y + box.height - 1, y))
        draw.rectangle((x, y, *corner), fill=colours.get(box.css, colours["other"]))
        if box.text:
            middle = (x + box.width / 2, y + box.height / 2)
            draw.text(middle, box.text, fill=colours["card"], font=font, anchor="mm")
    draw.line((left + LEFT, bottom, left + chart.width, bottom), fill=colours["line"])
    if chart.cut:
        draw.text((left + chart.cut.at, top + chart.bottom / 2), "…", fill=soft, font=font, anchor="mm")


def _draw_legend(draw: ImageDraw, y: float, colours: Mapping[str, str], font: Font) -> None:
    x = _MARGIN + LEFT
    for kind, words in KINDS.items():
        draw.rectangle((x, y - 5, x + 9, y + 4), fill=colours[kind])
        draw.text((x + 14, y), words, fill=colours["soft"], font=font, anchor="lm")
        x += 14 + font.getlength(words) + 16
