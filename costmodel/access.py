"""How often the rows of an embedding table are looked up, and how many distinct rows a batch needs.

A law gives the share of look-ups that fall on each row, rows ranked by it, the most wanted first:

    uniform                  every row alike
    zipf:EXPONENT            row k in proportion to k ** -EXPONENT
    steps:RANK=SHARE,…       the first RANK rows take that share of all look-ups; evenly between two of these

Of `n` look-ups, drawn one by one, row k is met at least once with probability 1 - (1 - p_k) ** n, so that a batch is
expected to need the sum of these over all rows. Kind: formula (occupancy of unequal boxes).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoparallel.errors import UserError

Floats = NDArray[np.float64]
BINS = 192  # geometric bins of rows that a sum runs over: rows of a bin count as alike. Kind: formula
EXACT_ROWS = 64  # rows at the head of a Zipf law that are summed one by one; an integral stands for the rest
MOST_EXPONENT = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessLaw:
    """A checked law: an exponent (0: uniform), or the steps of a histogram as (rank, cumulative share)."""

    exponent: float = 0.0
    steps: tuple[tuple[int, float], ...] = ()

    def cumulative(self, ranks: NDArray[np.int64], rows: int) -> Floats:
        """Share of look-ups that fall on the first `ranks` rows of a table with `rows`: 0 to 1."""
        if self.steps:
            known = [(0, 0.0), *((r, s) for r, s in self.steps if r < rows)]
            last = next((step for step in self.steps if step[0] >= rows), None)
            if (
                last is not None
            ):  # the histogram is of a longer table: what it says of the rows that are there
                before = known[-1]
                inside = (rows - before[0]) / (last[0] - before[0])
                top = before[1] + inside * (last[1] - before[1])
                known = [(r, s / top) for r, s in known]
            known.append((rows, 1.0))
            x, y = zip(*known, strict=True)
            return np.asarray(np.interp(ranks, x, y), dtype=np.float64)
        if not self.exponent:
            return ranks / rows
        whole = _zipf_sum(np.array([rows]), self.exponent)[0]
        return np.asarray(_zipf_sum(ranks, self.exponent) / whole)


def parse_law(text: str) -> AccessLaw:
    """A law from its text. Raises UserError."""
    kind, _, rest = text.partition(":")
    if text == "uniform":
        return AccessLaw()
    if kind == "zipf":
        try:
            exponent = float(rest)
        except ValueError:
            exponent = -1.0
        if not 0.0 <= exponent <= MOST_EXPONENT:
            raise UserError(f'"{text}": write zipf:EXPONENT with an exponent from 0 to {MOST_EXPONENT:g}')
        return AccessLaw(exponent=exponent)
    if kind == "steps":
        return AccessLaw(steps=_steps(rest, text))
    raise UserError(f'"{text}" is no law of access; write uniform, zipf:EXPONENT or the name of a .csv file')


def _steps(rest: str, text: str) -> tuple[tuple[int, float], ...]:
    found: list[tuple[int, float]] = []
    for item in rest.split(","):
        rank, _, share = item.partition("=")
        try:
            found.append((int(rank), float(share)))
        except ValueError:
            raise UserError(f'"{text}": write steps:RANK=SHARE,RANK=SHARE,…') from None
    check_steps(found, f'"{text}"')
    return tuple(found)


def check_steps(steps: list[tuple[int, float]], where: str) -> None:
    """Ranks grow from 1, cumulative shares grow to at most 1, and no step takes more per row than one before it.
    Raises UserError."""
    before, rate = (0, 0.0), float("inf")
    if not steps:
        raise UserError(f"{where}: no step; give rows as RANK,CUMULATIVE_SHARE")
    for rank, share in steps:
        if rank <= before[0] or not before[1] <= share <= 1.0 + 1e-9:
            raise UserError(
                f"{where}: {rank} = {share}: ranks must grow, and cumulative shares must grow from 0 to 1"
            )
        here = (share - before[1]) / (rank - before[0])
        if here > rate * (1 + 1e-6):
            raise UserError(
                f"{where}: the rows up to {rank} are looked up more often than those before them; rank rows by "
                "frequency, the most wanted first"
            )
        before, rate = (rank, share), here


def _zipf_sum(ranks: NDArray[np.int64], exponent: float) -> Floats:
    """Sum of k ** -exponent for k up to each rank: the first terms exactly, then the midpoint integral."""
    head = np.cumsum(np.arange(1, EXACT_ROWS + 1, dtype=np.float64) ** -exponent)
    start, end = EXACT_ROWS + 0.5, np.maximum(ranks, EXACT_ROWS) + 0.5
    if abs(exponent - 1.0) < 1e-9:
        tail = np.log(end / start)
    else:
        power = 1.0 - exponent
        tail = (end**power - start**power) / power
    few = head[np.clip(ranks, 1, EXACT_ROWS) - 1] * (ranks > 0)
    return np.asarray(few + tail)


def distinct_rows(law: AccessLaw, rows: int, hot: int, draws: int) -> float:
    """Expected number of rows after the first `hot` that `draws` look-ups meet at least once."""
    if draws <= 0 or hot >= rows:
        return 0.0
    edges = _edges(law, rows, hot)
    counts = np.diff(edges)
    each = np.clip(np.diff(law.cumulative(edges, rows)) / counts, 0.0, 1.0)
    with np.errstate(divide="ignore"):
        missed = draws * np.log1p(-each)
    return float(min(-np.sum(counts * np.expm1(missed)), draws))


def _edges(law: AccessLaw, rows: int, hot: int) -> NDArray[np.int64]:
    """Ranks between bins, from `hot` to `rows`: fixed ones, so that a longer hot part only cuts bins away."""
    grid = np.unique(np.round(np.geomspace(1, rows, BINS)).astype(np.int64)) if rows > 1 else np.array([1])
    marks = np.array([rank for rank, _ in law.steps if rank < rows], dtype=np.int64)
    inner = np.union1d(grid, marks)
    return np.concatenate([[hot], inner[(inner > hot) & (inner < rows)], [rows]])
