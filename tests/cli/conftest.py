from __future__ import annotations

from collections.abc import Iterator

import pytest

from autoparallel.planner.explain import alternatives


@pytest.fixture(autouse=True, scope="module")
def _rivals_are_looked_for_briefly() -> Iterator[None]:
    """They take most of the time of a small plan: how good they are is for the planner's own tests, what is said of them for these."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WORK", "EXPLAINED_WORK"):
            patch.setattr(alternatives, name, 15.0)
        yield
