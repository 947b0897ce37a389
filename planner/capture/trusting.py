"""Distributions that do not look at the values of their parameters, which a trace has not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def trusting() -> Iterator[None]:
    """While inside, `torch.distributions` take what they are given to be valid."""
    kind = torch.distributions.Distribution
    before = kind._validate_args
    kind.set_default_validate_args(False)
    try:
        yield
    finally:
        kind.set_default_validate_args(before)
