"""Checkpoints of the model's own code (`torch.utils.checkpoint`) in a module that runs in parallel.

Torch runs such a function again without what stood around its first run, and complains that other tensors are kept, or
computes with the wrong kind of them. What a strategy recomputes is not checkpointed once more in there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from autoparallel.planner.capture.again import Function, checkpoints_seen
from autoparallel.runtime.torch_private import function_modes

_here = threading.local()


def is_inside() -> bool:
    """Whether a checkpoint of the model's own code runs, for the first or the second time."""
    return bool(vars(_here).get("inside"))


@contextmanager
def inside() -> Iterator[None]:
    """While here, `is_inside`."""
    before = is_inside()
    _here.inside = True
    try:
        yield
    finally:
        _here.inside = before


def alike(around: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[None]:
    """While here, the second run of a checkpoint stands in the function modes of its first, and in `around`."""

    def look(run: Function) -> tuple[AbstractContextManager[None], Function]:
        modes = function_modes()

        def again(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                stack.enter_context(around())
                stack.enter_context(inside())
                there = function_modes()
                for mode in modes:
                    if mode not in there:
                        stack.enter_context(mode)
                return run(*args, **kwargs)

        return inside(), again

    return checkpoints_seen(look)


def opened() -> AbstractContextManager[None]:
    """While here, nothing is run again: what a checkpoint is around runs once, as it is."""
    return checkpoints_seen(lambda _: (inside(), None))
