"""What every rank is doing, in one small file each: written without a system call, and still there when the rank is not.

seconds since 1970 of the last sign of life, step, actions begun in it, stage, process, whether it gave up, host, address,
action, problem
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from autoparallel.errors import UserError
from autoparallel.runtime.guards.reach import Beacon
from autoparallel.runtime.ranks.agreement import Agreement

_LAYOUT = struct.Struct("<dqqqq?64s64s64s512s")
# Signs of life a second, and after how long without one a rank is taken for dead, seconds. Kind: choice.
BEAT_S, SILENT_S = 0.5, 5.0
_LOOKS = 10  # at a file that changes. Kind: choice; it changes some hundred times a second at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One rank: in `step`, `order` actions after its beginning, it began `action` of pipeline stage `stage`. Where it `gave_up`
    because of others, `problem` is what it says of them; otherwise a problem is its own."""

    rank: int
    beat: float
    step: int
    order: int
    stage: int
    pid: int
    gave_up: bool
    host: str
    address: str  # where it can be connected to (`reach.py`), or empty
    action: str
    problem: str

    @property
    def alive(self) -> bool:
        """Whether its process is there (asked on its own host), and not silent."""
        if self.host == socket.gethostname() and not _running(self.pid):
            return False
        return time.time() - self.beat < SILENT_S

    @property
    def where(self) -> str:
        """`step 12, stage 1, F3`."""
        return f"step {self.step}, stage {self.stage}, {self.action}"


class StatusFile:
    """The file of this rank in `folder`; a thread gives signs of life."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Raises UserError where the file cannot be written."""
        self._beacon = Beacon()
        self._host, self._address = socket.gethostname().encode()[:64], self._beacon.address.encode()[:64]
        self._step = self._order = self._stage = 0
        self._action, self._problem, self._gave_up = b"start", b"", False
        try:
            self._map = _mapped(folder / f"rank-{rank:05d}", self._content())
        except OSError as error:
            self._beacon.close()
            raise UserError(
                f"{folder}: rank {rank} cannot say there what it does ({error.strerror}): make room, or give the run another folder"
            ) from None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="signs of life")
        self._thread.start()

    def begin(self, step: int) -> None:
        """A step begins."""
        self._step, self._order = step, 0

    def at(self, action: str, stage: int) -> None:
        """An action begins: a `Progress`."""
        self._order += 1
        self._action, self._stage = action.encode()[:64], stage
        self._write()

    def failed(self, problem: str) -> None:
        """This rank ends for a reason of its own."""
        self._problem = problem.encode()[:512]
        self._write()

    def gives_up(self, said: str) -> None:
        """This rank ends because of others, as `said`: whoever finds it gone must not take it for the reason."""
        self._gave_up = True
        self.failed(said)

    def close(self) -> None:
        """No more signs of life."""
        self._ended.set()
        self._thread.join()
        self._beacon.close()

    def _content(self) -> bytes:
        now = time.time(), self._step, self._order, self._stage, os.getpid(), self._gave_up
        return _LAYOUT.pack(*now, self._host, self._address, self._action, self._problem)

    def _write(self) -> None:
        self._map[:] = self._content()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            struct.pack_into("<d", self._map, 0, time.time())


def own_status(folder: Path, everyone: Agreement) -> StatusFile:
    """This rank's file, once those of an earlier run are gone. Collective."""
    made: list[StatusFile] = []

    def clear() -> None:
        for left in folder.glob("rank-*"):
            left.unlink(missing_ok=True)

    everyone.alike(clear if everyone.rank == 0 else None)
    everyone.alike(lambda: made.append(StatusFile(folder, everyone.rank)))
    return made[0]


def _mapped(path: Path, content: bytes) -> mmap.mmap:
    """A file of this content, in memory. It is there whole or not at all, and its room is taken: what is stored to a file with holes
    where a disk is full ends the process by a signal. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}")
    with aside.open("w+b") as file:
        file.write(content)
        file.flush()
        found = mmap.mmap(file.fileno(), len(content))
    aside.replace(path)  # whoever still reads the old one has it
    return found


def _read_at_once(path: Path) -> bytes:
    """What is in a file that others write to meanwhile: what is there twice in a row; nothing where there is none."""
    before = b""
    with contextlib.suppress(OSError):  # gone since it was listed
        for _ in range(_LOOKS):
            content = path.read_bytes()
            if content == before:
                return content
            before = content
    return before


def read_statuses(folder: Path) -> list[Status]:
    """Of all ranks that have a file. Raises nothing: whoever is there to read them has others to tell."""
    found, paths = [], list[Path]()
    with contextlib.suppress(OSError):
        paths = sorted(folder.glob("rank-*"))
    for path in paths:
        content, number = _read_at_once(path), path.name.removeprefix("rank-")
        if len(content) == _LAYOUT.size and number.isdecimal():
            beat, step, order, stage, pid, gave_up, *texts = _LAYOUT.unpack(content)
            host, address, action, problem = (t.rstrip(b"\0").decode(errors="replace") for t in texts)
            found.append(
                Status(
                    rank=int(number), beat=beat, step=step, order=order, stage=stage, pid=pid,
                    gave_up=gave_up, host=host, address=address, action=action, problem=problem,
                )
            )  # fmt: skip
    return found


def _running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except ProcessLookupError:
        return False
    except OSError:  # not ours, or no /proc
        return True
