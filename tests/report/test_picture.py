"""The picture of a step: the predicted timeline above the measured one, in the colours of the page."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from autoparallel.answer import timeline_table
from autoparallel.costmodel.prediction import Span
from autoparallel.report.charts import LEFT

pytest.importorskip("PIL")
from autoparallel.report.picture import draw_step

FORWARD, BACKWARD, DATA = (0x3F, 0x7F, 0xD0), (0x2A, 0xA1, 0x98), (0xB0, 0x8B, 0x2E)
EDGE = 10 + int(LEFT)  # where axes begin
MEASURED: list[Any] = [[["DATA", 0, 0.0, 0.1], ["F0", 0, 0.1, 0.5], ["B0", 0, 0.5, 2.0]]]
PREDICTED = timeline_table(
    [
        Span(rank=0, action="0F0", start_s=0.0, end_s=0.4, label="forward"),
        Span(rank=0, action="0B0", start_s=0.4, end_s=1.0, label="backward"),
    ],
    1.0,
)


def _of(image: NDArray[np.uint8], colour: tuple[int, int, int]) -> NDArray[np.bool_]:
    """Where a picture, its legend aside, has a colour."""
    found: NDArray[np.bool_] = (image[:-40] == np.array(colour)).all(axis=-1)
    return found


def test_the_predicted_timeline_is_above_the_measured_one_on_the_same_axis() -> None:
    image = draw_step(PREDICTED, MEASURED)
    assert (image.dtype, image.ndim, image.shape[2]) == (np.uint8, 3, 3)
    rows = np.flatnonzero(_of(image, BACKWARD).any(axis=1))
    (gap,) = np.flatnonzero(np.diff(rows) > 1)
    ends = [int(np.flatnonzero(_of(image, BACKWARD)[row]).max()) - EDGE for row in (rows[gap], rows[-1])]
    assert abs(ends[1] / ends[0] - 2.0) < 0.02, "one axis: what is measured takes twice as long"
    assert _of(image, DATA)[rows[-1]].any()
    assert not _of(image, DATA)[rows[gap]].any()
    assert _of(image, FORWARD)[rows[gap]].sum() > 100


def test_what_is_not_known_is_left_out() -> None:
    both, one = draw_step(PREDICTED, MEASURED), draw_step({}, MEASURED)
    assert one.shape[0] < both.shape[0]
    assert one.shape[1] == both.shape[1]
    cut = draw_step({**PREDICTED, "cut_us": [300_000, 700_000]}, MEASURED)
    assert cut.shape == both.shape
