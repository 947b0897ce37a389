"""Laws of access: how many distinct rows a batch needs."""

from __future__ import annotations

from math import expm1, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel.costmodel.access import (
    AccessLaw,
    check_steps,
    distinct_rows,
    parse_law,
)
from autoparallel.errors import UserError

SETTINGS = settings(max_examples=50, deadline=None)
LAWS = st.one_of(
    st.just("uniform"),
    st.floats(0.1, 3.0).map(lambda exponent: f"zipf:{exponent}"),
    st.sampled_from(["steps:10=0.5,1000=0.9", "steps:1=0.2", "steps:7=0.7,100000=1.0"]),
)
ROWS, DRAWS, SHARE = st.integers(1, 1_000_000), st.integers(0, 100_000), st.floats(0.0, 1.0)


def cold_share(law: AccessLaw, rows: int, hot: int) -> float:
    """Share of look-ups that fall on rows after the first `hot`."""
    return float(1.0 - law.cumulative(np.array([min(hot, rows)]), rows)[0])


def uniform_distinct_rows(rows: int, draws: int) -> float:
    """Expected distinct rows under the uniform law, in closed form."""
    return -rows * expm1(draws * log(1.0 - 1.0 / rows)) if rows > 1 else float(min(rows, draws))


def exact(shares: np.ndarray, hot: int, draws: int) -> float:
    return float((1.0 - (1.0 - shares[hot:]) ** draws).sum())


@pytest.mark.parametrize("exponent", [0.6, 1.0, 1.2, 2.0])
@pytest.mark.parametrize("hot", [0, 1, 1000])
def test_a_zipf_law_is_summed_row_by_row_to_a_percent(exponent: float, hot: int) -> None:
    shares = np.arange(1, 200_001) ** -exponent
    expected = exact(shares / shares.sum(), hot, 5000)
    assert distinct_rows(parse_law(f"zipf:{exponent}"), 200_000, hot, 5000) == pytest.approx(
        expected, rel=0.01
    )


@SETTINGS
@given(rows=ROWS, draws=DRAWS)
def test_a_uniform_law_has_the_closed_form(rows: int, draws: int) -> None:
    assert distinct_rows(AccessLaw(), rows, 0, draws) == pytest.approx(
        uniform_distinct_rows(rows, draws), rel=1e-6, abs=1e-6
    )


@SETTINGS
@given(law=LAWS, rows=ROWS, draws=DRAWS, few=SHARE, many=SHARE)
def test_more_hot_rows_never_leave_more_cold_ones_to_fetch(
    law: str, rows: int, draws: int, few: float, many: float
) -> None:
    few, many = sorted((few, many))
    read = parse_law(law)
    fetched = [distinct_rows(read, rows, round(share * rows), draws) for share in (0.0, few, many, 1.0)]
    assert fetched == sorted(fetched, reverse=True) or np.all(np.diff(fetched) <= 1e-9 * fetched[0])
    assert fetched[0] <= min(rows, draws) * (1 + 1e-9)
    assert fetched[-1] == 0.0


@SETTINGS
@given(rows=ROWS, draws=DRAWS, hot=SHARE, low=st.floats(0.0, 2.0), high=st.floats(0.0, 2.0))
def test_a_steeper_law_never_needs_more_rows(
    rows: int, draws: int, hot: float, low: float, high: float
) -> None:
    low, high = sorted((low, high))
    even, steep = (distinct_rows(AccessLaw(exponent=e), rows, round(hot * rows), draws) for e in (low, high))
    assert steep <= even * (1 + 1e-3) + 1e-9  # a thousandth: bins stand for rows


@SETTINGS
@given(law=LAWS, rows=ROWS, draws=DRAWS, more=DRAWS)
def test_more_lookups_never_need_fewer_rows(law: str, rows: int, draws: int, more: int) -> None:
    read = parse_law(law)
    assert distinct_rows(read, rows, 0, draws) <= distinct_rows(read, rows, 0, draws + more) * (1 + 1e-9)


def test_steps_say_what_share_of_lookups_is_cold() -> None:
    law = parse_law("steps:10=0.5,1000=0.9")
    assert cold_share(law, 100_000, 10) == pytest.approx(0.5)
    assert cold_share(law, 100_000, 1000) == pytest.approx(0.1)
    assert cold_share(law, 1000, 10) == pytest.approx(
        1 - 0.5 / 0.9
    )  # a table of which only these rows are there


@pytest.mark.parametrize(
    "text", ["zipf", "zipf:-1", "zipf:x", "steps:", "steps:1=2", "pareto:1", "steps:5=0.5,3=0.6"]
)
def test_what_is_no_law_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_law(text)


def test_rows_must_be_ranked() -> None:
    with pytest.raises(UserError, match="rank rows by frequency"):
        check_steps([(10, 0.1), (20, 0.9)], "here")
