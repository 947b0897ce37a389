"""Example inputs that are found by trying: what a model misses it says when it is run.

The forward pass is run on the meta device. Where it fails, the innermost line of the model's own code that failed, or
the error itself, mostly names the argument that is missing; another shape of an argument, or no labels, are tried next.
"""

from __future__ import annotations

import heapq
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
from autoparallel.planner.capture.inputs_mended import fewer_places, resized, shorter
from autoparallel.planner.capture.library_kernels import library_kernels
from autoparallel.planner.capture.meta_mode import READERS, MetaMode
from autoparallel.planner.capture.on_meta import left_as_it_was, noted_values
from autoparallel.planner.capture.opened import OpenedFunctions
from autoparallel.planner.capture.pieces import JOINS, Pieces
from autoparallel.planner.capture.trees import mapped
from autoparallel.planner.capture.undropped import undropped
from autoparallel.planner.capture.whole import instead, known_index

Inputs = dict[str, Any]
Maker = Callable[[Inputs], Any]  # from the inputs so far; an example of an argument

# No more is tried. Kind: chosen; a large model takes a tenth of a second each time.
_LONGEST_S = 10.0
_MOST_TRIES = 40
# A model that has run so long takes what it is given: a wrong shape shows in the first layers. Kind: chosen.
_LONG_ENOUGH_S = 3.0


def fitted(
    module: Any, inputs: Inputs, makers: Mapping[str, Sequence[Maker]], optional: Sequence[str]
) -> Inputs:
    """`inputs` with what else the module asks for, by the `makers` of each argument; `optional` ones may be left out.

    What let the module run furthest is tried on first. As they are where nothing that is tried helps: what is missing is
    then said where the model is captured.
    """
    end_s = time.process_time() + _LONGEST_S
    tried: set[str] = set()
    number = itertools.count()
    queue: list[tuple[int, int, Inputs]] = [(0, next(number), inputs)]  # less how far it came, then the first
    while queue and len(tried) < _MOST_TRIES and time.process_time() < end_s:
        *_, given = heapq.heappop(queue)
        key = str(sorted((name, _described(value)) for name, value in given.items()))
        if key in tried:
            continue
        tried.add(key)
        error, calls = failure(module, given)
        if error is None:
            return given
        for following in _next(given, error, makers, optional):
            heapq.heappush(queue, (-calls, next(number), following))
    return inputs


def _described(value: Any) -> str:
    """What tells an example of an argument from another: its shape, of a mask how many places it picks."""
    if not isinstance(value, torch.Tensor):
        return str(value)
    few = value.is_meta or value.is_floating_point() or value.max() > 1
    return f"{tuple(value.shape)} {'' if few else int(value.sum())}"


def failure(module: Any, inputs: Inputs) -> tuple[Exception | None, int]:
    """What the forward pass raises on the meta device, None where it runs, or fails for want of numbers alone; and after how
    many calls of torch."""
    mode = MetaMode(lambda *_: None)
    for buffer in module.buffers():
        if (values := noted_values(buffer)) is not None:
            mode.remember(buffer, values)
    whole = Whole(mode, _LONG_ENOUGH_S)
    try:
        given = mapped(lambda x: mode.to_meta(x) if isinstance(x, torch.Tensor) else x, inputs)
        with left_as_it_was(module), undropped(), library_kernels(module), torch.no_grad(), mode, whole:
            module(**given)
    except (UntraceableError, LongEnoughError):
        return None, whole.calls
    except (
        NotImplementedError
    ) as error:  # of torch's: it has no numbers; of the model's own: it does not do this
        return error if _is_own(error) else None, whole.calls
    except Exception as error:
        return error, whole.calls
    return None, whole.calls


def _is_own(error: Exception) -> bool:
    """Whether the model's code raised an error itself."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return not _is_library(frame)


class LongEnoughError(Exception):
    """A trial that has not failed within its time."""


class Whole(OpenedFunctions):
    """What capture keeps whole is so here; for as long as a trial may take, where it says so."""

    def __init__(self, mode: MetaMode, longest_s: float = math.inf) -> None:
        super().__init__()
        self._end_s = time.process_time() + longest_s
        self._mode = mode
        self._pieces = Pieces()
        self.calls = 0

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function itself, or what stands for it."""
        if time.process_time() > self._end_s:
            raise LongEnoughError
        self.calls += 1
        name = getattr(func, "__name__", "")
        if name in READERS:
            return self._mode.numbers(name, *args)
        args, kwargs = self._mode.in_sight(name, args, kwargs)
        if name in JOINS and (joined := self._pieces.joined(name, args, kwargs)) is not None:
            return joined[0](*joined[1])
        if name == "__getitem__":
            args = (args[0], known_index(args[1]))
        out = instead(name, func, args, kwargs)()
        self._pieces.note(name, args, kwargs, out)
        return out


def _next(
    given: Inputs, error: Exception, makers: Mapping[str, Sequence[Maker]], optional: Sequence[str]
) -> Iterator[Inputs]:
    """What is tried after an error: no argument that it says not to give, one that it names, another shape of one that is
    given, first of those that stand where it failed, fewer arguments."""
    unwanted = set(re.findall(r"\w+", str(error))) & set(optional) & set(given)
    if unwanted:
        yield {name: value for name, value in given.items() if name not in unwanted}
    yield from fewer_places(given, error)
    tokens = ("input_ids", "inputs_embeds")  # of these one
    missing = [n for n in makers if n not in given and not (n in tokens and any(t in given for t in tokens))]
    wanted = _named(error, missing)
    if len(wanted) > 1:
        yield _with_all(given, wanted, makers)
    for name in wanted:
        for maker in makers[name]:
            yield from _with(given, name, maker)
    there = words_there(error)
    left = [name for name in optional if name in given]
    spare = [name for name in left if name in there]
    if spare:
        yield {name: value for name, value in given.items() if name not in spare}
    own = sorted((name for name in makers if name in given), key=lambda name: name not in there)
    before = sum(name in there for name in own)
    yield from _reshaped(given, own[:before], makers)
    yield from resized(given, error, there)
    yield from _reshaped(given, own[before:], makers)
    for count in range(1, len(left) + 1):
        for names in itertools.combinations(left, count):
            yield {name: value for name, value in given.items() if name not in names}
    yield from shorter(given)


def _reshaped(given: Inputs, names: Sequence[str], makers: Mapping[str, Sequence[Maker]]) -> Iterator[Inputs]:
    """The inputs with another shape of one of these arguments."""
    for name in names:
        for maker in makers[name][1:]:
            yield from (_followed(given, new, makers) for new in _with(given, name, maker))


def _with(given: Inputs, name: str, maker: Maker) -> Iterator[Inputs]:
    """The inputs with one more, where an example of it can be made of them."""
    try:
        yield given | {name: maker(given)}
    except (KeyError, IndexError, TypeError, ValueError, UserError, AttributeError):
        return


def _with_all(given: Inputs, names: Sequence[str], makers: Mapping[str, Sequence[Maker]]) -> Inputs:
    """The inputs with the first example of each of these that can be made."""
    for name in names:
        given = next(_with(given, name, makers[name][0]), given)
    return given


def _followed(before: Inputs, given: Inputs, makers: Mapping[str, Sequence[Maker]]) -> Inputs:
    """`given`, where one argument has another shape than `before`, with those that follow its shape made anew."""
    for name in [name for name in given if name in makers and given[name] is before.get(name)]:
        first = makers[name][0]
        shapes = [made[name].shape for made in _with(before, name, first)]
        if shapes == [before[name].shape]:  # it is as it was first made
            given = next(iter(_with(given, name, first)), given)
    return given


def _named(error: Exception, names: Sequence[str]) -> list[str]:
    """Those of `names` that the failing lines of the model's code speak of, the innermost line first, then the error."""
    found: list[str] = []
    for frame, words in _lines(error):
        found += [name for name in names if name in words and frame.f_locals.get(name) is None]
        if found:
            break
    words = set(re.findall(r"\w+", str(error)))
    found += [name for name in names if name in words or name.removesuffix("s") in words]
    return list(dict.fromkeys(found))


def words_there(error: Exception) -> set[str]:
    """The words of the innermost line of the model's code that failed, and of the conditions under which it did."""
    return next((words for _, words in _lines(error)), set())


def _lines(error: Exception) -> Iterator[tuple[types.FrameType, set[str]]]:
    """The failing lines of the model's code, the innermost first: the words of each, and of the conditions under which it
    raises an error."""
    frames = list(traceback.walk_tb(error.__traceback__))
    summaries = traceback.extract_tb(error.__traceback__)
    for (frame, _), summary in reversed(list(zip(frames, summaries, strict=True))):
        if _is_library(frame):
            continue
        first, last = summary.lineno or 0, summary.end_lineno or summary.lineno or 0
        lines = [linecache.getline(summary.filename, n) for n in range(first, last + 1)]
        if lines[0].lstrip().startswith("raise"):
            lines += _conditions(summary.filename, first)
        yield frame, set(re.findall(r"\w+", " ".join(lines)))


def _conditions(file: str, line: int) -> list[str]:
    """The lines of the conditions under which a line runs, the innermost first, and those that say what they ask for."""
    found: list[str] = []
    inside: float = math.inf
    for number in range(line, 0, -1):
        text = linecache.getline(file, number)
        indent = len(text) - len(text.lstrip())
        if not text.strip():
            continue
        if indent < inside:
            inside = indent
            if re.match(r"\s*(async )?(def|class) ", text):
                break
            if re.match(r"\s*(el)?if ", text):
                found.append(text)
        assigned = re.match(r"\s*(\w+) = ", text)
        if assigned and re.search(rf"\b{assigned[1]}\b", " ".join(found)):
            ends = (n for n in range(number + 1, line) if _indent(file, n) <= indent)
            found += [linecache.getline(file, n) for n in range(number, next(ends, line))]
    return found


def _indent(file: str, line: int) -> float:
    text = linecache.getline(file, line)
    return len(text) - len(text.lstrip()) if text.strip(" )]}\n") else math.inf


def _is_library(frame: types.FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in {"torch", "autoparallel"} or name.startswith("planner.")
