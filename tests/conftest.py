from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import settings

# Imports, tracing and planning make many objects that stay for a while: looking at them as often as usual takes 15 % of the time of
# the ones, and 7 % of dry runs'.
gc.set_threshold(50_000)
# The same code gets the same answer every time, on machines that others use too.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take minutes come first, so that nobody waits for them alone in the end; of the others, those whose processes wait
    for each other and those that only compute come by turns, so that the ones use the time of the others."""
    long, waiting = (
        {item.path for item in items if item.get_closest_marker(marker) is not None}
        for marker in ("long", "distributed")
    )
    files = list(dict.fromkeys(item.path for item in items))
    at: dict[Path, float] = {}
    for kind in ([path for path in files if (path in waiting) == waits] for waits in (True, False)):
        at |= {path: number / len(kind) for number, path in enumerate(kind)}
    items.sort(key=lambda item: (item.path not in long, at[item.path], item.path))


def pytest_collection_finish() -> None:
    """What was imported is never garbage: every later collection would look at all of it again."""
    gc.collect()
    gc.freeze()
