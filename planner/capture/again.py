"""Checkpoints of the model's own code (`torch.utils.checkpoint`): what runs again in the backward pass is priced there, and
kept is only what the checkpoint keeps.

The second run has to see the calls that the first saw (functions opened, attention whole), since torch compares what both
keep. Its kernels belong to the backward pass of the calls that they repeat.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.utils.checkpoint
from torch import fx

Function = Callable[..., Any]
# Of the function that is checkpointed: what its first run stands in, and what its second runs; None where there is to be none.
Look = Callable[[Function], tuple[AbstractContextManager[None], Function | None]]


class Ours(functools.partial[Any]):
    """A function that is checkpointed because a strategy says so, and not the model's code."""


@contextmanager
def checkpoints_seen(look: Look) -> Iterator[None]:
    """While inside, `look` says how the two runs of each checkpoint of the model's code go. Checkpoints that run a backward
    pass of their own (`use_reentrant=True`) become such that do not, which keep and run the same."""
    place: Any = torch.utils.checkpoint
    generator, function = place._checkpoint_without_reentrant_generator, place.CheckpointFunction

    def seen(run: Function, *settings: Any, **kwargs: Any) -> Iterator[None]:
        if isinstance(run, Ours):
            yield from generator(run, *settings, **kwargs)
            return
        first, again = look(run)
        with first:
            if again is None:
                yield
            else:
                yield from generator(again, *settings, **kwargs)

    class Reentrant:
        @staticmethod
        def apply(run: Function, preserve: bool, *args: Any) -> Any:
            settings = {"use_reentrant": False, "preserve_rng_state": preserve, "early_stop": False}
            return place.checkpoint(run, *args, **settings)

    place._checkpoint_without_reentrant_generator, place.CheckpointFunction = seen, Reentrant
    try:
        yield
    finally:
        place._checkpoint_without_reentrant_generator, place.CheckpointFunction = generator, function


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


def checkpoints_followed(tracer: Any) -> AbstractContextManager[None]:
    """While inside, what a checkpoint of the model's code runs again is run under `tracer`."""

    def look(run: Function) -> tuple[AbstractContextManager[None], Function]:
        first: list[fx.Node] = []

        @contextmanager
        def noted() -> Iterator[None]:
            start = len(tracer.writer.calls)
            yield
            first.extend(tracer.writer.calls[start:])

        def again(*args: Any, **kwargs: Any) -> Any:
            outer, tracer.again = tracer.again, Again(first)
            try:
                with tracer:
                    return run(*args, **kwargs)
            finally:
                tracer.again = outer

        return noted(), again

    return checkpoints_seen(look)
