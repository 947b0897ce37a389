"""Several columns of numbers as one."""

from __future__ import annotations

import numpy as np

from autoparallel.planner.search.space.meshes import Ints


def joined(first: Ints, *others: Ints) -> Ints:
    """One number per row that is the same where all columns are, ordered as they are; none may be negative."""
    numbers = first
    for column in others:
        numbers = numbers * (int(column.max(initial=0)) + 1) + column
    return np.asarray(numbers)
