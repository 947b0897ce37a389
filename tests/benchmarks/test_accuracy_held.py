"""The accuracy reached on published training runs: no source may lose more than half a point of it."""

from __future__ import annotations

import json

from benchmarks.held import REACHED, measured_errors

HALF_A_POINT = 0.005


def test_every_source_is_predicted_as_well_as_before() -> None:
    found, scored, skipped = measured_errors()
    reached = json.loads(REACHED.read_text())
    table = "\n".join(f"{row.id} {row.predicted_s:.3f} {row.measured_s}" for row in scored)
    assert len(skipped) <= 1, skipped
    assert set(found) == set(reached)
    worse = {s: (e, reached[s]) for s, e in found.items() if e > reached[s] + HALF_A_POINT}
    assert not worse, f"{worse}\n{table}"
