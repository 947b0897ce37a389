"""Laws of access as a user gives them: checked, and histograms read from their files into the strategy itself."""

from __future__ import annotations

import csv
from pathlib import Path

from autoparallel.costmodel.access import check_steps, parse_law
from autoparallel.errors import UserError

MOST_STEPS = 64  # of a histogram that a strategy file keeps; a longer one is thinned, evenly in log(rank)


def checked_law(text: str, name: str) -> str:
    """The law as the strategy keeps it: a file's name becomes its steps. `name` begins the error message."""
    if text.endswith(".csv"):
        return _steps_of(Path(text), name)
    try:
        parse_law(text)
    except UserError as error:
        raise UserError(f"{name}: [embedding_access] {error}") from None
    return text


def _steps_of(path: Path, name: str) -> str:
    """`steps:…` of a file with two columns, rank of a row (1 is the most wanted) and cumulative share of look-ups."""
    where = f"{name}: [embedding_access] {path}"
    try:
        with path.open(newline="", encoding="utf-8") as handle:
            lines = [line for line in csv.reader(handle) if line]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: cannot be read ({error})") from None
    if lines and not lines[0][0].strip().isdigit():
        lines = lines[1:]  # the header
    try:
        steps = [(int(rank), float(share)) for rank, share in lines]
    except ValueError:
        raise UserError(f"{where}: each line must be RANK,CUMULATIVE_SHARE, two numbers") from None
    check_steps(steps, where)
    return "steps:" + ",".join(f"{rank}={share!r}" for rank, share in _thinned(steps))


def _thinned(steps: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most `MOST_STEPS` of the steps, the last one among them."""
    if len(steps) <= MOST_STEPS:
        return steps
    growth = (steps[-1][0] / steps[0][0]) ** (1.0 / (MOST_STEPS - 1))
    kept, wanted = [], float(steps[0][0])
    for step in steps[:-1]:
        if step[0] >= wanted:
            kept.append(step)
            wanted = max(wanted * growth, step[0] * growth)
    return [*kept, steps[-1]]
