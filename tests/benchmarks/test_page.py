"""docs/accuracy.md says what was measured."""

from __future__ import annotations

from benchmarks.page import PAGE, publisher_figures, rewritten
from benchmarks.scatter import read_left_out, timed

TWO = """
| source | rows | blind | bias |
|---|---|---|---|
| A | 1 | 30% | |
| B | 2 | 20% | +1% |

| source | bias |
|---|---|
| C | +3% |
| A | +4% |
"""


def test_cells_are_found_by_source_and_head_and_others_stay() -> None:
    after = rewritten(TWO, {"source": {"A": {"rows": "7", "bias": "-2%"}}}, among=["A"])
    assert after == TWO.replace("| A | 1 | 30% | |", "| A | 7 | 30% | -2% |")


def test_the_page_has_the_publishers_that_were_left_out() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == rewritten(page, {"publisher": publisher_figures(timed(read_left_out()))})
