"""Independent pieces of work in two processes, where the caller allows a second one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

T = TypeVar("T")

PATIENCE_S, PATIENCE = 5.0, 4.0  # waited for the other half: so long, and so many times what this half took


def usable_processes() -> int:
    """2 where this process may run on several processors and can be forked, else 1."""
    return 2 if sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1 else 1


class Elsewhere(Generic[T]):
    """Pieces of work begun in a forked process, on Linux.

    What a piece remembers there is lost, its result alone comes back (pickled). The process ends with the `with` block.
    """

    def __init__(self, pieces: Sequence[Callable[[], T]]) -> None:
        fork = multiprocessing.get_context("fork")
        self._ours, other = fork.Pipe(duplex=False)
        self._process = fork.Process(target=_send_results, args=(pieces, other), daemon=True)
        self._process.start()
        other.close()

    def __enter__(self) -> Elsewhere[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._ours.close()

    def results(self, patience_s: float | None = None) -> list[T] | None:
        """All results; None where a piece raised, or the process died or was not heard of in this time."""
        with suppress(EOFError, OSError):
            if self._ours.poll(patience_s):
                return list(self._ours.recv())
        return None


def side_by_side(pieces: Sequence[Callable[[], T]], weights: Sequence[float], processes: int) -> list[T]:
    """The results of all pieces, in their order; about half of the `weights` in a forked process if `processes` > 1.

    Forked only on Linux; elsewhere, and should the other process die or not be heard of, all is done here. Raises what a
    piece raises.
    """
    theirs = _half(weights) if processes > 1 and sys.platform == "linux" else []
    if not theirs:
        return [piece() for piece in pieces]
    with Elsewhere([pieces[i] for i in theirs]) as elsewhere:
        started_s = time.monotonic()
        done = {i: piece() for i, piece in enumerate(pieces) if i not in theirs}
        others = elsewhere.results(PATIENCE_S + PATIENCE * (time.monotonic() - started_s))
    if others is not None:
        done |= dict(zip(theirs, others, strict=True))
    return [done[i] if i in done else piece() for i, piece in enumerate(pieces)]


def _half(weights: Sequence[float]) -> list[int]:
    """The heaviest pieces first, each to the lighter side: those of the side that gets the second."""
    here, there, theirs = 0.0, 0.0, []
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        if here <= there:
            here += weights[i]
        else:
            there += weights[i]
            theirs.append(i)
    return theirs


def _send_results(pieces: Sequence[Callable[[], T]], results: Connection) -> None:
    """In the other process. A piece that fails is done again where its error can be seen."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process hears Ctrl-C and ends this one
    with suppress(Exception):
        results.send([piece() for piece in pieces])
