"""Signals that warn a run, acted on by all ranks at the end of the same step.

SIGUSR1 (Slurm's `--signal`, a person): save, and go on. SIGTERM (a launcher, Slurm's and Kubernetes' end of the grace
period), SIGINT: save, and stop. A handler only notes what came; `Signals.received` is what a step's end asks.
"""

from __future__ import annotations

import os
import signal
from enum import IntEnum
from types import FrameType
from typing import Any, Self


class Wish(IntEnum):
    """What a signal asks for, or who wants another strategy; the strongest of all ranks is done by all."""

    NOTHING = 0
    SAVE = 1
    SWITCH = 2  # save, and end, to be started again
    STOP = 3


WISHES = {
    signal.SIGUSR1: Wish.SAVE,
    signal.SIGTERM: Wish.STOP,
    signal.SIGINT: Wish.STOP,
}


class Signals:
    """Inside `with`, notes the signals of `WISHES`; a second SIGINT interrupts as ever. For the main thread."""

    def __init__(self) -> None:
        self._came: list[Wish] = []  # a handler adds to it at any moment
        self.name = ""
        self._before: dict[signal.Signals, Any] = {}
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        for number in WISHES:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def received(self) -> Wish:
        """The strongest that came since the last `take`."""
        return max(self._came, default=Wish.NOTHING)

    def take(self) -> Wish:
        """The strongest that came since the last time it was asked; none is lost that comes meanwhile."""
        wish = Wish.NOTHING
        while self._came:
            wish = max(wish, self._came.pop())
        return wish

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        kind = signal.Signals(number)
        if os.getpid() != self._pid:  # a child that was forked, of a data loader: it ends as it would have
            signal.signal(kind, signal.SIG_DFL)
            os.kill(os.getpid(), kind)
            return
        if kind is signal.SIGINT and self.received is Wish.STOP:
            raise KeyboardInterrupt
        self._came.append(WISHES[kind])
        self.name = kind.name
