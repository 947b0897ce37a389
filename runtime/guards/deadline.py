"""Ranks that die, hang or disagree: one error on every rank, within the time-out, naming rank, stage and action.

A rank that waits for another knows nothing but that it waits. What the others are doing stands in their status files
(`status.py`). Who is to blame is, in this order: who failed for a reason of its own, who is dead or silent, who cannot be
reached (`reach.py`), whom those name that gave up before, who is furthest behind. A rank that gave up because of others is
never to blame, though it is gone. A thread watches the time, as the main thread may be inside of a collective that never ends; it then ends the process.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from autoparallel.errors import UserError
from autoparallel.runtime.guards.reach import not_reached
from autoparallel.runtime.guards.status import SILENT_S, Status, StatusFile, read_statuses
from autoparallel.runtime.ranks.accelerator import CPU, current_device, own_backend
from autoparallel.runtime.ranks.agreement import Agreement

# What torch's backends say where a peer is at fault.
_OF_PEERS = (
    "connection closed",
    "connection reset",
    "broken pipe",
    "timed out",
    "tcpstore",
    "process group",
)
# How long a rank that lost its peers waits for them to say why, seconds. Kind: choice.
_LAST_WORDS_S = SILENT_S + 1.0


class RunBroken(UserError):
    """Another rank is at fault; the message says which, where and what to do."""

    passes = True


def from_peers(error: BaseException) -> bool:
    """Whether an exception is what a collective raises whose peers are gone."""
    if isinstance(error, dist.DistError):
        return True
    text, backends = str(error).lower(), {own_backend(current_device().type), own_backend(CPU.type)}
    return isinstance(error, RuntimeError) and any(word in text for word in (*_OF_PEERS, *backends))


def verdict(statuses: Sequence[Status], rank: int | None = None) -> str | None:
    """Who is to blame, in words, with whom `rank` cannot reach; None where nobody stands out."""
    failed = [s for s in statuses if _failed(s)]
    dead = [s for s in statuses if _dead(s)]
    if failed:
        return "; ".join(f"rank {s.rank} failed in {s.where}: {s.problem}" for s in failed)
    if dead:
        return "; ".join(
            f"rank {s.rank} (process {s.pid} on {s.host}) has ended or is frozen, last seen in {s.where}"
            for s in dead
        )
    if rank is not None and (lost := not_reached(statuses, rank)):
        return _parted(statuses, rank, lost)
    if said := dict.fromkeys(s.problem for s in statuses if s.gave_up and s.problem):
        return "; ".join(said)
    here = [s for s in statuses if not s.gave_up]
    if not here:
        return None
    first = min((s.step, s.order) for s in here)
    behind = [s for s in here if (s.step, s.order) == first]
    if len(behind) == len(here):
        return None
    return "; ".join(f"rank {s.rank} has not come further than {s.where}" for s in behind)


def _failed(status: Status) -> bool:
    return bool(status.problem) and not status.gave_up


def _dead(status: Status) -> bool:
    return not status.alive and not status.gave_up


def _parted(statuses: Sequence[Status], rank: int, lost: Sequence[int]) -> str:
    """In words: all are alive, and some cannot be reached."""
    known = {s.rank: s for s in statuses}
    hosts = dict.fromkeys(known[other].host for other in lost)
    own = f" in {known[rank].where}" if rank in known else ""
    shown = f"{', '.join(map(str, lost[:8]))}{' …' if len(lost) > 8 else ''}"
    return (
        f"rank {rank}{own} cannot reach rank{'s' if len(lost) > 1 else ''} {shown} ({', '.join([*hosts][:3])}), alive: the network "
        "between them is down"
    )


class Deadline:
    """Watches the steps of this rank. `folder` is where all ranks have their status files."""

    def __init__(
        self, folder: Path, rank: int, status: StatusFile, *, end: Callable[[int], None] = os._exit
    ) -> None:
        self._folder, self._rank, self._status, self._end = folder, rank, status, end
        self._limit: float | None = None
        self._timeout_s, self._by_action = 0.0, False
        self._seen: dict[int, tuple[int, int]] | None = None  # how far every rank was
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="deadline")
        self._thread.start()

    def begin(self, timeout_s: float, *, by_action: bool = False) -> None:
        """A step begins that must be over in `timeout_s`; `by_action`: or some rank must have begun an action in the last half
        of them."""
        self._by_action, self._seen = by_action, None
        self._timeout_s, self._limit = timeout_s, time.monotonic() + timeout_s

    def over(self) -> None:
        """It is over."""
        self._limit = None

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join()

    def broken(self, error: BaseException) -> RunBroken:
        """What to raise where a collective failed with `error`: who is to blame, once that can be seen."""
        end = time.monotonic() + _LAST_WORDS_S
        while True:
            others = [s for s in read_statuses(self._folder) if s.rank != self._rank]
            if any(s.problem or _dead(s) for s in others) or time.monotonic() > end:
                break
            time.sleep(0.05)
        said = verdict(others, self._rank)
        self._status.gives_up(said or "")
        said = said or f"no rank says why ({str(error).splitlines()[0]})"
        return RunBroken(f"{said}; the run goes on from its last checkpoint when it is started again")

    def _goes_on(self, limit: float) -> bool:
        """Whether it is too early, or some rank has come further than it had when half of the time was over."""
        now = time.monotonic()
        if now < limit - self._timeout_s / 2:
            return True
        if self._seen is None or now >= limit:
            before, self._seen = (
                self._seen,
                {s.rank: (s.step, s.order) for s in read_statuses(self._folder)},
            )
            if before is not None and self._seen != before and self._limit == limit:
                self._limit, self._seen = now + self._timeout_s, None
                return True
        return now < limit

    def _watch(self) -> None:
        while not self._closed.wait(0.1):
            limit = self._limit
            if limit is not None and self._by_action and self._goes_on(limit):
                continue
            if limit is not None and self._limit == limit and time.monotonic() > limit:
                found = verdict(read_statuses(self._folder), self._rank)
                self._status.gives_up(found or "")
                said = found or "no rank is behind the others: a collective hangs in all"
                text = (
                    f"error: no {'action' if self._by_action else 'step'} in {self._timeout_s:.0f} s: {said}; the run goes on from its last checkpoint when it "
                    "is started again"
                )
                print(text, file=sys.stderr, flush=True)
                self._limit = None
                self._end(1)


def check_alike(everyone: Agreement, facts: Mapping[str, object], *, hint: str) -> None:
    """Raise RunBroken on every rank where ranks differ in one of `facts`, naming those that differ from the most."""
    every = everyone.gathered({what: repr(value) for what, value in facts.items()})
    for what in facts:
        values = [own[what] for own in every]
        most = max(dict.fromkeys(values), key=values.count)
        odd = [rank for rank, value in enumerate(values) if value != most]
        if odd:
            shown = "; ".join(f"rank {rank} has {values[rank]}" for rank in odd[:3])
            raise RunBroken(f"ranks disagree about {what}: {shown}, the others {most}; {hint}")
