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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
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
_LOOK_S = 0.1  # between two looks at the clock. Kind: choice


class RunBroken(UserError):
    """Another rank is at fault; the message says which, where and what to do."""

    passes = True


def from_peers(error: BaseException) -> bool:
    """Whether an exception is what a collective raises whose peers are gone."""
    if isinstance(error, dist.DistError):
        return True
    text, backends = str(error).lower(), {own_backend(current_device().type), own_backend(CPU.type)}
    if text.startswith("dataloader "):  # whose workers time out, too
        return False
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


class Until(Enum):
    """What may go on for longer than the time-out."""

    OVER = "over"  # nothing may
    NO_ACTION = "no action"  # what lasts while some rank begins an action in the last part of it
    LOST = "lost"  # what lasts while none gives up, and all give signs of life in the last part of it


# Of which last part of the time-out. Kind: choice; signs of life come twice a second, over NFS after half a minute.
_LAST_PART = {Until.NO_ACTION: 0.5, Until.LOST: 0.75}


@dataclass(slots=True)
class _Limit:
    """Until when what goes on must be over, by `time.monotonic`."""

    timeout_s: float
    until: Until
    at_s: float
    seen: dict[int, tuple[float, ...]] | None = None  # how far every rank was, or its last sign of life


class Deadline:
    """Watches the steps of this rank. `folder` is where all ranks have their status files."""

    def __init__(
        self, folder: Path, rank: int, status: StatusFile, *, end: Callable[[int], None] = os._exit
    ) -> None:
        self._folder, self._rank, self._status, self._end = folder, rank, status, end
        self._limit: _Limit | None = None  # one of each thing that is watched: its end is no other's
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="deadline")
        self._thread.start()

    def begin(self, timeout_s: float, until: Until = Until.OVER) -> None:
        """What begins must be over in `timeout_s`, unless `until` lets it go on."""
        self._limit = _Limit(timeout_s, until, time.monotonic() + timeout_s)

    def over(self) -> None:
        """It is over."""
        self._limit = None

    @contextmanager
    def while_all_live(self, timeout_s: float) -> Iterator[None]:
        """What is inside waits for other ranks, and may take as long as a disk or a planner does: until a rank is lost for so long."""
        before = self._limit
        self.begin(max(timeout_s, 2 * SILENT_S), Until.LOST)
        try:
            yield
        finally:
            self._limit = before

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

    def _goes_on(self, limit: _Limit) -> bool:
        """Whether it is too early to end, or there is no reason to; then it begins anew."""
        now = time.monotonic()
        if limit.until is Until.OVER:
            return now < limit.at_s
        look_s = limit.at_s - limit.timeout_s * _LAST_PART[limit.until]
        if now < look_s or (limit.seen is not None and now < limit.at_s):
            return True
        before, limit.seen = limit.seen, self._signs(limit.until)
        if before is None:
            return now < limit.at_s
        if limit.until is Until.NO_ACTION:
            ends = limit.seen == before
        else:
            ends = any(limit.seen.get(rank) == sign for rank, sign in before.items())
        if not ends:
            limit.at_s = now + limit.timeout_s
            if limit.until is Until.NO_ACTION:
                limit.seen = None
        return not ends

    def _signs(self, until: Until) -> dict[int, tuple[float, ...]]:
        """By rank how far it has come; or its last sign of life, one for ever where it has given up."""
        statuses = read_statuses(self._folder)
        if until is Until.NO_ACTION:
            return {s.rank: (s.step, s.order) for s in statuses}
        return {
            s.rank: (0.0 if s.problem or s.gave_up else s.beat,) for s in statuses if s.rank != self._rank
        }

    def _watch(self) -> None:
        looked_at = time.monotonic()
        while not self._closed.wait(_LOOK_S):
            away_s = time.monotonic() - looked_at - _LOOK_S
            looked_at += away_s + _LOOK_S
            limit = self._limit
            if limit is None:
                continue
            if (
                away_s > SILENT_S
            ):  # this process was stopped itself, as a terminal does with all: nobody could be heard
                limit.at_s, limit.seen = limit.at_s + away_s, None
            try:
                if self._goes_on(limit):
                    continue
                found = verdict(read_statuses(self._folder), self._rank)
            except Exception as error:  # whatever it is: with this thread the run would lose its only watch
                found = f"who is to blame was not found out ({type(error).__name__}: {error})"
            if self._limit is limit:  # it has not ended meanwhile
                self._give_up(limit, found)

    def _give_up(self, limit: _Limit, found: str | None) -> None:
        """Say who is to blame, and end the process."""
        self._status.gives_up(found or "")
        said = found or "no rank is behind the others: a collective hangs in all"
        what = "action" if limit.until is Until.NO_ACTION else "step"
        text = f"no {what} in {limit.timeout_s:.0f} s"
        if limit.until is Until.LOST:
            said, text = found or "nobody knows which", f"a rank is lost for {limit.timeout_s:.0f} s"
        print(
            f"error: {text}: {said}; the run goes on from its last checkpoint when it is started again",
            file=sys.stderr,
            flush=True,
        )
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
