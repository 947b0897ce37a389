"""The folder of a run.

lock                        held by rank 0 as long as its process lives
checkpoints/
    step-000000100/         whole: it got this name after its last byte was on the disk
    .writing-step-…         being written, or left by a process that died: never read, removed at the next start
    .removing-step-…        on its way out
    .replaced-step-…        on its way out once the one that takes its name is there; where that is not, it is whole
    refused-step-…          did not pass its checksums; kept for whoever wants to look
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from autoparallel.errors import UserError

_NAME = re.compile(r"step-(\d{9,})")
_WRITING, _REMOVING, _REPLACED, _REFUSED = ".writing-", ".removing-", ".replaced-", "refused-"


class RunFolder:
    """`path` and what is in it; nothing is made before `open`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._lock: IO[str] | None = None

    def open(self) -> None:
        """Make the folder, take its lock, and clear away what was half-written; for one process of a run.

        Raises UserError where it cannot be written, and where another run holds it.
        """
        try:
            self._take()
            self._clear()
        except OSError as error:
            raise UserError(
                f'the run\'s folder "{self.path}" cannot be written ({error.strerror}): give folder= one that can'
            ) from None

    def _take(self) -> None:
        """Take the lock. Raises UserError where another has it, and OSError."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        lock = (self.path / "lock").open("a+", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(self._held(lock)) from None
        lock.truncate(0)
        json.dump({"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}, lock)
        lock.flush()
        self._lock = lock

    def _clear(self) -> None:
        """Remove what a process left that died; a checkpoint whose successor did not come to its name is given it back."""
        for left in list(self.checkpoints.iterdir()):
            name = left.name.removeprefix(_REPLACED)
            if name != left.name and not left.with_name(name).exists():
                left.rename(left.with_name(name))
            elif left.name.startswith((_WRITING, _REMOVING, _REPLACED)):
                shutil.rmtree(left, ignore_errors=True)

    def hold(self) -> None:
        """Have the lock still: a folder that was removed meanwhile, and the lock with it, is made again. Raises UserError where another
        run has taken its place, and OSError."""
        if self._lock is None:
            return
        own = os.fstat(self._lock.fileno())
        try:
            if os.path.samestat(own, (self.path / "lock").stat()):
                return
        except FileNotFoundError:
            pass
        self._take()

    def _held(self, lock: IO[str]) -> str:
        lock.seek(0)
        try:
            holder = json.loads(lock.read())
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
            if (holder["host"], holder["pid"]) == (socket.gethostname(), os.getpid()):
                lock.close()
                return (
                    f'the run\'s folder "{self.path}" is in use by this process, since {since}: close() the Trainer or '
                    "Checkpoints that is there, or give this one a folder of its own"
                )
            who = f"process {holder['pid']} on {holder['host']}, since {since}"
        except (ValueError, KeyError):
            who = "another process"
        lock.close()
        return (
            f'the run\'s folder "{self.path}" is in use by {who}: two runs in one folder would overwrite each '
            "other's checkpoints; end that one, or give this run a folder of its own"
        )

    def close(self) -> None:
        """Let the lock go."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints, the last first."""
        try:
            names = [entry.name for entry in self.checkpoints.iterdir()]
        except FileNotFoundError:
            return []
        return sorted((int(m[1]) for name in names if (m := _NAME.fullmatch(name))), reverse=True)

    def at(self, step: int) -> Path:
        """Where the checkpoint of a step is once it is whole."""
        return self.checkpoints / f"step-{step:09d}"

    def writing(self, step: int) -> Path:
        """Where it is written."""
        return self.checkpoints / f"{_WRITING}step-{step:09d}"

    def commit(self, step: int) -> None:
        """Give what was written its name; a checkpoint of the same step (of a run that went back) goes after that."""
        target = self.at(step)
        old = self._aside(target, _REPLACED) if target.exists() else None
        self.writing(step).rename(target)
        sync(self.checkpoints)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def abandon(self, step: int) -> None:
        """Remove what was written of a checkpoint that will not be whole."""
        shutil.rmtree(self.writing(step), ignore_errors=True)

    def refuse(self, step: int) -> None:
        """Take a checkpoint that is damaged out of the way, keeping it, where the disk lets it."""
        with suppress(OSError):
            self._aside(self.at(step), _REFUSED)

    def retain(self, keep: int) -> None:
        """Remove all but the last `keep` checkpoints; one that somebody else removes meanwhile, or that does not go, is no problem."""
        for step in self.steps()[keep:]:
            with suppress(OSError):
                shutil.rmtree(self._aside(self.at(step), _REMOVING), ignore_errors=True)

    def _aside(self, path: Path, prefix: str) -> Path:
        target = path.with_name(prefix + path.name)
        if target.exists():
            shutil.rmtree(target, ignore_errors=True)
        path.rename(target)
        return target


def sync(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
