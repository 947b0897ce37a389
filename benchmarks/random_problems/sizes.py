"""Widths and depths of a transformer of about so many parameters, as people choose them."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A stack of equal layers."""

    hidden: int
    heads: int
    layers: int


def log_uniform(rng: Random, least: float, most: float) -> float:
    """A number whose logarithm is uniform."""
    return exp(rng.uniform(log(least), log(most)))


def rounded(value: float, unit: int) -> int:
    """The nearest multiple of `unit` above 0."""
    return max(1, round(value / unit)) * unit


def body(
    rng: Random, parameters: float, *, per_layer: float = 12.0, head: int = 0, most_layers: int = 128
) -> Body:
    """Hidden size and layers of `parameters` = layers * `per_layer` * hidden ** 2, a layer for about 128 of width."""
    head = head or rng.choice((64, 64, 80, 96, 128, 128, 128) if parameters > 5e8 else (32, 64, 64, 64))
    aspect = rng.uniform(60.0, 180.0)  # hidden / layers
    hidden = (parameters * aspect / per_layer) ** (1 / 3)
    even = 4 if hidden > 16 * head else 2
    heads = rounded(hidden / head, even)
    hidden = heads * head
    layers = max(2, min(most_layers, round(parameters / (per_layer * hidden**2))))
    if rng.random() < 0.6 and layers > 4:
        layers = rounded(layers, 4 if layers > 12 else 2)
    return Body(hidden=hidden, heads=heads, layers=layers)


def key_value_heads(rng: Random, heads: int) -> int:
    """As many as query heads, or a divisor of them."""
    return rng.choice([n for n in (1, 2, 4, 8, 8, 16, heads) if heads % n == 0 and n <= heads][-4:])
