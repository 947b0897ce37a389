"""One model in a process of its own: forked from one that has imported everything, and ended when its time is over.

Time is that of the processor, so that a machine on which other work runs says the same; by the clock it may take longer.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

Result = dict[str, Any]

_CLOCK = 12.0  # of what it may take by the clock, as a multiple of its time on the processor. Kind: chosen


def run_alone(function: Callable[[], Result], limit_s: float) -> Result:
    """What `function` returns in a child process; the error it raised, or that its `limit_s` of the processor were over."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    started_s = time.monotonic()
    child = os.fork()
    if child == 0:
        _serve(function, theirs, limit_s)
    theirs.close()
    found: Result = {"ok": False, "seconds": limit_s, "why": f"no answer within {limit_s:.0f} s"}
    try:
        if ours.poll(_CLOCK * limit_s):
            found = ours.recv()
    except EOFError:  # the system ended it: its time was over, or its memory
        pass
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    ours.close()
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) not in (signal.SIGKILL, signal.SIGXCPU):
        found = {"ok": False, "why": f"ended by signal {os.WTERMSIG(status)}"}
    return found | {"clock_s": round(time.monotonic() - started_s, 2)}


def _serve(function: Callable[[], Result], pipe: Connection, limit_s: float) -> None:
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit_s), math.ceil(limit_s) + 1))
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
        pipe.send({"seconds": round(time.process_time(), 2)} | found)
        pipe.close()
    finally:
        os._exit(0)
