"""Layers that training leaves out by chance are kept: the number that decides is as large as it can be."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_KEPT = 1.0 - 2.0**-24  # the largest random number of single precision


@contextmanager
def undropped() -> Iterator[None]:
    """While inside, a single random number from 0 to 1 that Python's or NumPy's generator is asked for is just below 1; torch's
    own are `MetaMode`'s."""
    places = [(random, "random"), (random, "uniform")]
    if (numpy := sys.modules.get("numpy")) is not None:
        places += [(numpy.random, name) for name in ("random", "rand", "uniform")]
    own = [getattr(of, name) for of, name in places]
    try:
        for (of, name), drawn in zip(places, own, strict=True):
            setattr(of, name, _kept(drawn))
        yield
    finally:
        for (of, name), drawn in zip(places, own, strict=True):
            setattr(of, name, drawn)


def _kept(drawn: Callable[..., Any]) -> Callable[..., Any]:
    def single(*args: Any, **kwargs: Any) -> Any:
        return _KEPT if args in ((), (0, 1)) and not kwargs else drawn(*args, **kwargs)

    return single
