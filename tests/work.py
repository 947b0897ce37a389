"""How much work something is, told alike on a busy machine and an idle one."""

from __future__ import annotations

import cProfile
from collections.abc import Callable


def calls(run: Callable[[], object]) -> int:
    """The calls of functions, Python's and C's, that `run` makes: what the time of interpreted code grows with."""
    profile = cProfile.Profile()
    profile.enable()
    try:
        run()
    finally:
        profile.disable()
    return sum(entry.callcount for entry in profile.getstats())
