from __future__ import annotations

import pytest

from autoparallel.planner.strategy.runs import runs


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((), "[]"),
        ((12, 12, 10), "[12, 12, 10]"),
        ((12,) * 8 + (10,) * 3, "[8 × 12, 3 × 10]"),
        ((0, *(1,) * 126, 0), "[0, 126 × 1, 0]"),
        (tuple(range(128)), "[0 … 127]"),
        ((*range(16, 32), *range(16)), "[16 … 31, 0 … 15]"),
        (tuple(i * 7 % 128 for i in range(128)), "[0, 7, 14, 21, 28, 35, 42, … 128 in all]"),
        ((1, 2) * 64, "[1, 2, 1, 2, 1, 2, 1, … 128 in all]"),
    ],
)
def test_a_sentence_never_lists_a_hundred_numbers(numbers: tuple[int, ...], said: str) -> None:
    assert runs(numbers) == said
