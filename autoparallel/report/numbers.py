"""Numbers as people read them."""

from __future__ import annotations

import math

_COUNT_UNITS = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))


def seconds(value: float) -> str:
    """`3.42 s`, `45.1 ms`, `12 µs`, `2 h 5 min`."""
    if value >= 7200:
        return f"{value // 3600:.0f} h {value % 3600 / 60:.0f} min"
    if value >= 1:
        return f"{significant(value)} s"
    if value >= 1e-3:
        return f"{significant(value * 1e3)} ms"
    return f"{significant(value * 1e6)} µs"


def tick_seconds(value: float) -> str:
    """A round number of seconds, on an axis: `1.5 s`, `200 ms`, `50 µs`."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value * 1e6:g} µs"


def significant(value: float, digits: int = 3) -> str:
    """`value` to that many significant digits, with thousands separated and never in exponents."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def gib(value: float) -> str:
    """`61.3 GiB`."""
    return f"{significant(value)} GiB"


def gigabytes(value: float) -> str:
    """`1.2 GB`, `34.5 MB`: bytes that are sent, which go by SI rates."""
    for size, unit in ((1e9, "GB"), (1e6, "MB")):
        if value >= size:
            return f"{significant(value / size)} {unit}"
    return f"{significant(value / 1e3)} kB"


def percent(share: float) -> str:
    """`4.2 %`; `<0.1 %` for what is there but small."""
    if 0 < share < 0.001:
        return "<0.1 %"
    return f"{share * 100:.1f} %" if share < 0.995 else f"{share * 100:.0f} %"


def count(value: float) -> str:
    """`8.03 billion`, `512`."""
    for size, word in _COUNT_UNITS:
        if value >= size:
            return f"{significant(value / size)} {word}"
    return f"{value:,.0f}"


def times(number: int, noun: str, plural: str = "") -> str:
    """`1 block`, `32 blocks`; `plural` where it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def bandwidth(bytes_per_s: float) -> str:
    """`450 GB/s`; SI."""
    return f"{significant(bytes_per_s / 1e9)} GB/s"
