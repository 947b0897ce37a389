"""Which ranks can reach which: told apart from ranks that hang, when all wait.

Every rank listens at a port that nobody has to answer at: the kernel accepts connections for a process that hangs, too. A rank
that has waited too long tries to connect to the others; whom it does not reach is behind a link that is down.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoparallel.runtime.guards.status import Status

REACH_S = 2.0  # seconds that a connection may take. Kind: choice; those of one cluster take milliseconds
MOST_TRIED = 256  # ranks that one rank tries. Kind: choice
_AT_ONCE = 64


class Beacon:
    """A port of this rank that others can connect to, until `close`; `address` is HOST:PORT, empty where there can be none."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self.address = ""
        try:
            host = own_host()
            self._socket = socket.create_server((host, 0), backlog=MOST_TRIED)
            self.address = f"{host}:{self._socket.getsockname()[1]}"
        except OSError:  # no network is no reason not to train
            self.close()

    def close(self) -> None:
        """Listen no more."""
        if self._socket is not None:
            self._socket.close()


def own_host() -> str:
    """The address that this machine has on its way to the first rank."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((os.environ.get("MASTER_ADDR", "localhost"), 9))  # nothing is sent
        found: str = way.getsockname()[0]
    return found


def not_reached(statuses: Sequence[Status], rank: int) -> list[int]:
    """The ranks that `rank` cannot connect to, of those next to it in number and beyond."""
    others = [s for s in statuses if s.rank != rank and s.address]
    near = sorted(others, key=lambda s: (abs(s.rank - rank), s.rank))[:MOST_TRIED]
    if not near:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(near))) as pool:
        reached = list(pool.map(lambda status: _connects(status.address), near))
    return sorted(status.rank for status, there in zip(near, reached, strict=True) if not there)


def _connects(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except ConnectionRefusedError:  # its host answers: the process is gone, the link is not
        return True
    except OSError:
        return False
    return True
