from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.harness import Processes


@pytest.fixture(scope="session")
def gloo() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    processes.stop()
