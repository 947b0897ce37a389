"""One model in a process of its own: forked from one that has imported everything, and ended when its time is over."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

Result = dict[str, Any]


def run_alone(function: Callable[[], Result], limit_s: float) -> Result:
    """What `function` returns in a child process; the error it raised, or that its time was over."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    started_s = time.monotonic()
    child = os.fork()
    if child == 0:
        _serve(function, theirs)
    theirs.close()
    found = ours.recv() if ours.poll(limit_s) else {"ok": False, "why": f"no answer within {limit_s:.0f} s"}
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    ours.close()
    return {"seconds": round(time.monotonic() - started_s, 2)} | found


def _serve(function: Callable[[], Result], pipe: Connection) -> None:
    try:
        os.setsid()
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        try:
            found = function()
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            lines = str(error).strip().splitlines() or [""]
            found = {
                "ok": False,
                "why": f"{type(error).__name__}: {lines[0]}",
                "at": f"{where.filename.rpartition('/')[2]}:{where.lineno} {where.name}",
            }
        pipe.send(found)
        pipe.close()
    finally:
        os._exit(0)
