from __future__ import annotations

import gc

import pytest
from hypothesis import settings

# The same code gets the same answer every time, on machines that others use too.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that wait for minutes come first, so that nobody waits for them alone in the end. Others that start processes, which wait
    for each other, are spread evenly among those that compute."""
    files = list(dict.fromkeys(item.path for item in items))
    long, starts = (
        {item.path for item in items if item.get_closest_marker(name) is not None}
        for name in ("long", "distributed")
    )
    kinds = [[path for path in files if (path in starts) == both] for both in (True, False)]
    place = {path: number / len(kind) for kind in kinds for number, path in enumerate(kind)}
    items.sort(key=lambda item: -1.0 if item.path in long else place[item.path])


def pytest_collection_finish() -> None:
    """What was imported is never garbage: every later collection would look at all of it again."""
    gc.collect()
    gc.freeze()
