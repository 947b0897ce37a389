from __future__ import annotations

import gc

from hypothesis import settings

# The same code gets the same answer every time, on machines that others use too.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    """What was imported is never garbage: every later collection would look at all of it again."""
    gc.collect()
    gc.freeze()
