"""What several runtime tests share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from autoparallel.runtime.stages import cut
from autoparallel.runtime.stages.outer_graph import OuterGraph

_GRAPHS: dict[Hashable, OuterGraph] = {}


def no_program() -> Any:
    """For tests that never ask a module for its program."""
    raise AssertionError("no test asked for a program")


@contextmanager
def remembered_cuts(*key: Hashable) -> Iterator[None]:
    """Inside, what `torch.export` makes of a model is what it made the last time of an equal one (of the same `key`) in
    this process: it takes most of the time of a pipeline's test, on every rank. (test_cut.py does without.)"""
    trace: Callable[..., OuterGraph] = cut.outer_graph

    def remembered(*args: Any, **kwargs: Any) -> OuterGraph:
        if key not in _GRAPHS:
            _GRAPHS[key] = trace(*args, **kwargs)
        return _GRAPHS[key]

    cut.outer_graph = remembered
    try:
        yield
    finally:
        cut.outer_graph = trace
