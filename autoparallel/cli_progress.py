"""What a person sees while a command works, on standard error."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from autoparallel.planner.outcome import ADVISING, Progress
from autoparallel.planner.problem import Objective
from autoparallel.report.numbers import gib, seconds, significant

# Shorter work shows nothing on a terminal that is not there to be redrawn.
QUIET_S = 2.0
# And whoever waits is told what is done at least so often.
LONGEST_SILENCE_S = 4.0
# Nearly every model is read sooner (a dozen seconds for the largest ones here): who waits longer is told why.
HINT_S = 20.0


# Columns of a table that goes to a file or a pipe: rich would fold it to 80.
UNBOUND_COLUMNS = 160


def stderr_console() -> Console:
    """Where everything for people goes; standard output is for machines."""
    width = None if sys.stderr.isatty() else UNBOUND_COLUMNS
    return Console(file=sys.stderr, highlight=False, soft_wrap=True, width=width)


@contextmanager
def hinted(console: Console, hint: str, after_s: float = HINT_S) -> Iterator[None]:
    """Say `hint` once if the body takes longer than `after_s`: for work that cannot say how far it is."""
    timer = threading.Timer(after_s, lambda: console.print(hint, markup=False))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def working(
    console: Console, text: str, doing: Callable[[], str] = lambda: "", every_s: float = LONGEST_SILENCE_S
) -> Iterator[Callable[[str], None]]:
    """A spinner with `text`, which the yielded function changes; plain lines where there is no terminal, one at least
    `every_s`. `doing` is asked what is done just now where the body itself does not say."""
    if console.is_terminal:
        with (
            console.status(text) as status,
            _again_and_again(1.0, lambda: status.update(_with(text, doing()))),
        ):
            yield lambda new: status.update(new)
        return
    started = last = time.monotonic()

    def say(new: str) -> None:
        nonlocal text, last
        now, text = time.monotonic(), new
        if now - max(started, last) > QUIET_S:
            last = now
            console.print(new, markup=False)

    def still() -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > every_s:
            last = now
            console.print(f"{_with(text, doing())} ({now - started:.0f} s so far)", markup=False)

    with _again_and_again(every_s / 8, still):
        yield say


def _with(text: str, doing: str) -> str:
    return f"{text}: {doing}" if doing else text


@contextmanager
def _again_and_again(every_s: float, function: Callable[[], None]) -> Iterator[None]:
    """While inside, `function` is called every so often by a thread of its own."""
    done = threading.Event()

    def loop() -> None:
        while not done.wait(every_s):
            function()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def progress_text(progress: Progress, objective: Objective) -> str:
    """One line: how much of the space is left, the best strategy so far, and the bound below it."""
    if progress.phase == ADVISING:
        return f"nothing fits; looking for the nearest change that would ({progress.elapsed_s:.0f} s)"
    # Several partitions of one candidate may be solved.
    done = f"{progress.candidates:,} candidates, {max(progress.pruned, 0):,} ruled out, {progress.solved:,} solved"
    best = "none yet" if progress.incumbent is None else _value(progress.incumbent, objective)
    bound = "" if progress.bound is None else f", bound {_value(progress.bound, objective)}"
    return f"{progress.phase}: {done}; best {best}{bound} ({progress.elapsed_s:.0f} s)"


def _value(value: float, objective: Objective) -> str:
    match objective:
        case Objective.TIME:
            return seconds(value)
        case Objective.COST:
            return f"{significant(value)} per step"
        case Objective.MEMORY:
            return gib(value / 1024**3)
