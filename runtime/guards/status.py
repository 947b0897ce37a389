"""What every rank is doing, in one small file each: written without a system call, and still there when the rank is not.

seconds since 1970 of the last sign of life, step, actions begun in it, stage, process, whether it gave up, host, address,
action, problem
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from autoparallel.runtime.guards.reach import Beacon

_LAYOUT = struct.Struct("<dqqqq?64s64s64s512s")
# Signs of life a second, and after how long without one a rank is taken for dead, seconds. Kind: choice.
BEAT_S, SILENT_S = 0.5, 5.0


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
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{rank:05d}"
        path.unlink(missing_ok=True)  # whoever still reads the old one has it
        with path.open("w+b") as file:
            file.truncate(_LAYOUT.size)
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._beacon = Beacon()
        self._host, self._address = socket.gethostname().encode()[:64], self._beacon.address.encode()[:64]
        self._step = self._order = self._stage = 0
        self._action, self._problem, self._gave_up = b"start", b"", False
        self._ended = threading.Event()
        self._write()
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

    def _write(self) -> None:
        now = time.time(), self._step, self._order, self._stage, os.getpid(), self._gave_up
        _LAYOUT.pack_into(self._map, 0, *now, self._host, self._address, self._action, self._problem)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            struct.pack_into("<d", self._map, 0, time.time())


def read_statuses(folder: Path) -> list[Status]:
    """Of all ranks that have a file."""
    found = []
    for path in sorted(folder.glob("rank-*")):
        content = path.read_bytes()
        if len(content) == _LAYOUT.size:
            beat, step, order, stage, pid, gave_up, *texts = _LAYOUT.unpack(content)
            host, address, action, problem = (t.rstrip(b"\0").decode(errors="replace") for t in texts)
            found.append(
                Status(
                    rank=int(path.name.removeprefix("rank-")), beat=beat, step=step, order=order, stage=stage, pid=pid,
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
