"""Checkpoints of the model's own code (`torch.utils.checkpoint`): what runs again in the backward pass is priced there, and
kept is only what the checkpoint keeps.

The second run has to see the calls that the first saw (functions opened, attention whole), since torch compares what both
keep. Its kernels belong to the backward pass of the calls that they repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint
from torch import fx


class Again:
    """The second run of one checkpoint, beside the calls of the first."""

    def __init__(self, first: list[fx.Node]) -> None:
        self._first = first
        self._next = 0
        self.of: fx.Node | None = None  # the call whose kernels run again

    def call(self, name: str, run: Callable[[], Any]) -> Any:
        """What `run` gives, for the next of the first run's calls of that name."""
        outer = self.of
        for position in range(self._next, len(self._first)):
            if self._first[position].meta["torch_name"] == name:
                self.of, self._next = self._first[position], position + 1
                self.of.meta["runs_again"] = True
                break
        try:
            return run()
        finally:
            self.of = outer


@contextmanager
def checkpoints_followed(tracer: Any) -> Iterator[None]:
    """While inside, what a checkpoint of the model's code runs again is run under `tracer`. Checkpoints that run a backward
    pass of their own (`use_reentrant=True`) become such that do not, which keep and run the same."""
    place: Any = torch.utils.checkpoint
    generator, function = place._checkpoint_without_reentrant_generator, place.CheckpointFunction

    def followed(fn: Callable[..., Any], *settings: Any, **kwargs: Any) -> Iterator[None]:
        calls, start = tracer.writer.calls, len(tracer.writer.calls)
        first: list[fx.Node] = []

        def again(*args: Any, **options: Any) -> Any:
            outer, tracer.again = tracer.again, Again(first)
            try:
                with tracer:
                    return fn(*args, **options)
            finally:
                tracer.again = outer

        yield from generator(again, *settings, **kwargs)
        first += calls[start:]

    class Function:
        @staticmethod
        def apply(fn: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            return place.checkpoint(
                fn, *args, use_reentrant=False, preserve_rng_state=preserve, early_stop=False
            )

    place._checkpoint_without_reentrant_generator, place.CheckpointFunction = followed, Function
    try:
        yield
    finally:
        place._checkpoint_without_reentrant_generator, place.CheckpointFunction = generator, function
