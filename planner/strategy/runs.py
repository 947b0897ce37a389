"""Long lists of numbers, as a sentence can hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

SHORT_LIST = 8  # numbers that a sentence may list one by one


def runs(numbers: Sequence[int]) -> str:
    """A list, long ones with their runs told once: `[8 × 12, 3 × 10]`, `[0 … 15]`; what has no runs is cut short."""
    if len(numbers) <= SHORT_LIST:
        return f"[{', '.join(map(str, numbers))}]"
    parts = [list(same) for _, same in groupby(numbers)]
    told = [f"{len(same)} × {same[0]}" if len(same) > 1 else str(same[0]) for same in parts]
    if len(parts) == len(numbers):
        told = list(_counted_up(numbers))
    if len(told) > SHORT_LIST:
        told = [*map(str, numbers[: SHORT_LIST - 1]), f"… {len(numbers)} in all"]
    return f"[{', '.join(told)}]"


def _counted_up(numbers: Sequence[int]) -> Iterator[str]:
    """`0 … 15` for neighbours that go up by one."""
    first = 0
    for i in range(1, len(numbers) + 1):
        if i < len(numbers) and numbers[i] == numbers[i - 1] + 1:
            continue
        yield str(numbers[first]) if i == first + 1 else f"{numbers[first]} … {numbers[i - 1]}"
        first = i
