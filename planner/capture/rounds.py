"""Loops in the model's code: what runs round after round is traced a few times, and counted from then on.

A scan over the tokens of a sequence calls the same few functions thousands of times. Once several rounds were equal —
the same places in the code, functions, plain settings of tensors, parameters, which result goes in where — those that
follow are not run: what they return are tensors of the same shapes, and one of the rounds before counts for all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx

from autoparallel.planner.capture.trees import given_tensors, mapped, tensors

# Equal rounds that are traced before the rest is counted. Kind: chosen; a loop over layers or levels has fewer.
TRACED_ROUNDS = 16
_LONGEST = 512  # calls of a round. Kind: chosen

_LIBRARIES = ("torch", "autoparallel")
Key = tuple[object, ...]


@dataclass(slots=True)
class Made:
    """One traced call: where in the code it stands and what it calls, what it was given and returned."""

    key: Key
    call: fx.Node
    given: Sequence[torch.Tensor]
    out: Any
    of_numbers: bool = False  # its results are numbers that the model's code may look at
    func: Any = None  # what the model's code calls, where it is run as it is called


@dataclass(slots=True)
class Rounds:
    """The calls of one trace, watched for rounds; `skipped` once the present ones are no longer run.

    `held` says of a tensor whether it is a parameter, a buffer or a constant: rounds that read different ones are layers.
    """

    held: Callable[[torch.Tensor], bool]
    skipped: Skipped | None = None
    _made: list[Made] = field(default_factory=list)
    _last: dict[Key, int] = field(default_factory=dict)
    _period: int = 0
    _equal: int = 0  # calls in a row that are as the one a period before

    def add(self, made: Made) -> None:
        """Note a call that was traced."""
        position = len(self._made)
        self._made.append(made)
        period = position - self._last.get(made.key, -_LONGEST * 2)
        self._last[made.key] = position
        self._equal = self._equal + 1 if period == self._period else 1
        self._period = period
        if period <= _LONGEST and self._equal >= (TRACED_ROUNDS - 1) * period:
            self._skip()

    def stop(self) -> None:
        """Other calls follow: start anew."""
        self._made.clear()
        self._last.clear()
        self._period = self._equal = 0

    def _skip(self) -> None:
        rounds = [
            self._made[len(self._made) - (k + 1) * self._period : len(self._made) - k * self._period]
            for k in range(TRACED_ROUNDS)
        ]
        self.stop()
        if not all(_alike(calls, self.held) for calls in zip(*rounds, strict=True)):
            return
        # The one in the middle gets gradients from all that come after it, and hands on to others.
        self.skipped = Skipped(last=rounds[0], standing=rounds[TRACED_ROUNDS // 2])


@dataclass(slots=True)
class Skipped:
    """Rounds that are not run: `last` is the one before them, `standing` the one that counts for them."""

    last: Sequence[Made]
    standing: Sequence[Made]
    calls: int = 0
    _results: dict[int, Any] = field(default_factory=dict)
    _hands_on: set[int] = field(default_factory=set)  # calls that return what they are given
    _shapes: list[list[torch.Size]] = field(init=False)  # of what each call is given

    def __post_init__(self) -> None:
        self._shapes = [[t.shape for t in made.given] for made in self.last]

    def repeated(self, func: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the next call returns, where another of the rounds that are not run has returned it before; NotImplemented for
        every other call. A scan makes hundred thousands of these: nothing else is done for them."""
        if func is torch.Tensor.to and len(args) == 2 and args[1] is args[0].dtype and not kwargs:
            return args[0]  # no call of any round: nothing is converted
        place = self.calls % len(self.last)
        made = self.last[place]
        if made.func != func or self.calls < len(self.last) or made.of_numbers or place in self._hands_on:
            return NotImplemented
        if made.key[1:] != (path, *code_place()):
            return NotImplemented
        if [t.shape for t in given_tensors(args, kwargs)] != self._shapes[place]:
            return NotImplemented
        self.calls += 1
        return self._results[place]

    def goes_on(self, key: Key, given: Sequence[torch.Tensor]) -> bool:
        """Whether a call is the next of the round."""
        made = self.last[self.calls % len(self.last)]
        return made.key == key and [t.shape for t in given] == self._shapes[self.calls % len(self.last)]

    def result(self, given: Sequence[torch.Tensor], run: Callable[[], Any]) -> Any:
        """What the next call returns: what it is given where the traced one returned that, else tensors of the shapes;
        what it returns when it is `run` where that is numbers."""
        place = self.calls % len(self.last)
        made, self.calls = self.last[place], self.calls + 1
        if made.of_numbers:
            return run()
        if place not in self._results:
            own = {id(t) for t in made.given}
            self._results[place] = mapped(
                lambda leaf: _like(leaf) if isinstance(leaf, torch.Tensor) and id(leaf) not in own else leaf,
                made.out,
            )
            if any(id(t) in own for t in tensors(made.out)):
                self._hands_on.add(place)
        if place not in self._hands_on:
            return self._results[place]
        handed = {id(old): new for old, new in zip(made.given, given, strict=True)}
        return mapped(lambda leaf: handed.get(id(leaf), leaf), self._results[place])

    def finish(self) -> None:
        """Tell the calls that stand for the others how often they run."""
        rounds = -(-self.calls // len(self.last))
        for made in self.standing:
            made.call.meta["rounds"] = 1 + rounds

    def stands_for(self, out: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(tensor of the call that was not run, the tensor of the standing round that it is like), where it is a new one."""
        place = (self.calls - 1) % len(self.last)
        if not self.last[place].of_numbers:
            if self.calls > len(self.last):
                return []
            out = self._results[place]
        return list(zip(tensors(out), tensors(self.standing[place].out), strict=True))


def _like(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad)


def _alike(calls: Sequence[Made], held: Callable[[torch.Tensor], bool]) -> bool:
    """Whether the same call of several rounds differs in nothing but numbers that count the rounds, and in where tensors
    stand in their storage."""
    return len({_described(made, held) for made in calls}) == 1


def _described(made: Made, held: Callable[[torch.Tensor], bool]) -> Key:
    found: list[object] = []
    for tensor in (*made.given, *tensors(made.out)):
        own = id(tensor) if held(tensor) else 0
        found.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, own))
    return tuple(found)


@cache
def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


def code_place() -> tuple[int, int]:
    """Where in the model's code the call stands that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return (id(frame.f_code), frame.f_lasti)
