from __future__ import annotations

import gc

import pytest
from hypothesis import settings

# The same code gets the same answer every time, on machines that others use too.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that wait for minutes come first, so that nobody waits for them alone in the end."""
    long = {item.path for item in items if item.get_closest_marker("long") is not None}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """What was imported is never garbage: every later collection would look at all of it again."""
    gc.collect()
    gc.freeze()
