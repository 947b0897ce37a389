"""Example inputs that are found by trying: what a model misses it says when it is run.

The forward pass is run on the meta device. Where it fails, the innermost line of the model's own code that failed, or
the error itself, mostly names the argument that is missing; another shape of an argument, or no labels, are tried next.
"""

from __future__ import annotations

import itertools
import linecache
import math
import re
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from autoparallel.errors import UserError
from autoparallel.planner.capture.errors import UntraceableError
from autoparallel.planner.capture.meta_mode import READERS, MetaMode
from autoparallel.planner.capture.on_meta import left_as_it_was, noted_values
from autoparallel.planner.capture.opened import OpenedFunctions
from autoparallel.planner.capture.pieces import JOINS, Pieces
from autoparallel.planner.capture.trees import mapped
from autoparallel.planner.capture.whole import known_index, replacement

Inputs = dict[str, Any]
Maker = Callable[[Inputs], Any]  # from the inputs so far; an example of an argument

# No more is tried. Kind: chosen; a large model takes a tenth of a second each time.
_LONGEST_S = 10.0
_MOST_TRIES = 24
# A model that has run so long takes what it is given: a wrong shape shows in the first layers. Kind: chosen.
_LONG_ENOUGH_S = 3.0


def fitted(
    module: Any, inputs: Inputs, makers: Mapping[str, Sequence[Maker]], optional: Sequence[str]
) -> Inputs:
    """`inputs` with what else the module asks for, by the `makers` of each argument; `optional` ones may be left out.

    As they are where nothing that is tried helps: what is missing is then said where the model is captured.
    """
    end_s = time.process_time() + _LONGEST_S
    tried: set[str] = set()
    queue: list[Inputs] = [inputs]
    while queue and len(tried) < _MOST_TRIES and time.process_time() < end_s:
        given = queue.pop(0)
        key = str(sorted((name, str(getattr(v, "shape", v))) for name, v in given.items()))
        if key in tried:
            continue
        tried.add(key)
        error = failure(module, given)
        if error is None:
            return given
        queue = [*_next(given, error, makers, optional), *queue]
    return inputs


def failure(module: Any, inputs: Inputs) -> Exception | None:
    """What the forward pass raises on the meta device; None where it runs, or fails for want of numbers alone."""
    mode = MetaMode(lambda *_: None)
    for buffer in module.buffers():
        if (values := noted_values(buffer)) is not None:
            mode.remember(buffer, values)
    try:
        given = mapped(lambda x: mode.to_meta(x) if isinstance(x, torch.Tensor) else x, inputs)
        with left_as_it_was(module), torch.no_grad(), mode, Whole(mode, _LONG_ENOUGH_S):
            module(**given)
    except (UntraceableError, NotImplementedError, LongEnoughError):
        return None
    except Exception as error:
        return error
    return None


class LongEnoughError(Exception):
    """A trial that has not failed within its time."""


class Whole(OpenedFunctions):
    """What capture keeps whole is so here; for as long as a trial may take, where it says so."""

    def __init__(self, mode: MetaMode, longest_s: float = math.inf) -> None:
        super().__init__()
        self._end_s = time.process_time() + longest_s
        self._mode = mode
        self._pieces = Pieces()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function itself, or what stands for it."""
        if time.process_time() > self._end_s:
            raise LongEnoughError
        name = getattr(func, "__name__", "")
        if name in READERS:
            return self._mode.numbers(name, *args)
        args, kwargs = self._mode.in_sight(name, args, kwargs)
        if name in JOINS and (joined := self._pieces.joined(args, kwargs)) is not None:
            return joined[0](*joined[1])
        if name == "__getitem__":
            args = (args[0], known_index(args[1]))
        out = (replacement(name) or func)(*args, **kwargs)
        self._pieces.note(name, args, kwargs, out)
        return out


def _next(
    given: Inputs, error: Exception, makers: Mapping[str, Sequence[Maker]], optional: Sequence[str]
) -> Iterator[Inputs]:
    """What is tried after an error: an argument that it names, another shape of one that is given, fewer arguments."""
    tokens = ("input_ids", "inputs_embeds")  # of these one
    missing = [n for n in makers if n not in given and not (n in tokens and any(t in given for t in tokens))]
    for name in _named(error, missing):
        for maker in makers[name]:
            yield from _with(given, name, maker)
    for name in [name for name in makers if name in given]:
        for maker in makers[name][1:]:
            yield from _with(given, name, maker)
    left = [name for name in optional if name in given]
    for count in range(1, len(left) + 1):
        for names in itertools.combinations(left, count):
            yield {name: value for name, value in given.items() if name not in names}


def _with(given: Inputs, name: str, maker: Maker) -> Iterator[Inputs]:
    """The inputs with one more, where an example of it can be made of them."""
    try:
        yield given | {name: maker(given)}
    except (KeyError, IndexError, TypeError, ValueError, UserError, AttributeError):
        return


def _named(error: Exception, names: Sequence[str]) -> list[str]:
    """Those of `names` that the failing lines of the model's code speak of, the innermost line first, then the error."""
    found: list[str] = []
    frames = list(traceback.walk_tb(error.__traceback__))
    for (frame, _), summary in reversed(
        list(zip(frames, traceback.extract_tb(error.__traceback__), strict=True))
    ):
        if _is_library(frame):
            continue
        first, last = summary.lineno or 0, summary.end_lineno or summary.lineno or 0
        text = " ".join(linecache.getline(summary.filename, n) for n in range(first, last + 1))
        words = set(re.findall(r"\w+", text))
        found += [name for name in names if name in words and frame.f_locals.get(name) is None]
        if found:
            break
    words = set(re.findall(r"\w+", str(error)))
    found += [name for name in names if name in words]
    return list(dict.fromkeys(found))


def _is_library(frame: types.FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in {"torch", "autoparallel"} or name.startswith("planner.")
