"""What each process of `autoparallel run` begins with: `python -m autoparallel.runtime.elastic.worker train.py …`.

It ends when its agent ends, however that was ended (Linux): no process is left behind. Its groups are left before the
interpreter goes. What the script raises goes to the
file that the agent reads (`torch.distributed.elastic.multiprocessing.errors`), so that the agent's last words name it. What
the user has to mend (`UserError`, and mistakes of the script's own code) is not tried for ever: where two starts, one after the other,
end in the same words, this machine's agent is told to end, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from autoparallel.errors import UserError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
AGENT = "AUTOPARALLEL_AGENT"  # of the environment: the process that started this one
STARTS = "AUTOPARALLEL_STARTS"  # the agent's folder of what the starts before ended in
REFUSED = "refused"  # a file there: what no other start will mend
RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # torch's: which start this is
# What a program that is wrong raises, and not a machine that fails (that is OSError, RuntimeError, MemoryError). Kind: choice.
_MISTAKES = (
    SyntaxError, NameError, ImportError, AttributeError, TypeError, ValueError, LookupError, ArithmeticError, AssertionError,
)  # fmt: skip


def end_with_agent() -> None:
    """Have the kernel kill this process when its agent has ended, now if it has ended already. Does nothing but on Linux."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.environ.get(AGENT) not in (None, str(os.getppid())):
        os.kill(os.getpid(), signal.SIGKILL)


def main(script: str) -> None:
    """Run `script` as `python script` would; `sys.argv` is its own."""
    from torch.distributed.elastic.multiprocessing.errors import record

    from autoparallel.runtime.ranks.leaving import leave_at_exit

    # For scripts that leave groups of their own to the interpreter: a process that dies after its work is done is restarted,
    # and waits for machines that have ended.
    leave_at_exit(destroy=True)
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    record(_run, error_handler())(script)


def error_handler() -> Any:
    """torch's handler of what a script raises, whose file is there whole or not at all: the agent would end of one that a kill or a
    full disk cut off."""
    from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

    class Whole(ErrorHandler):
        _aside = False

        def _get_error_file_path(self) -> str | None:
            path = super()._get_error_file_path()
            return f"{path}.aside" if path and self._aside else path

        def record_exception(self, e: BaseException) -> None:
            if (path := self._get_error_file_path()) is None:
                return
            self._aside = True
            with contextlib.suppress(OSError):  # a full disk must not hide what the script raised
                super().record_exception(e)
                os.replace(f"{path}.aside", path)
            self._aside = False

    return Whole()


def _run(script: str) -> None:
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception as error:
        if STARTS in os.environ and (text := _to_mend(error)):
            _tell_agent(text, Path(os.environ[STARTS]))
        raise


def _to_mend(error: Exception) -> str:
    """What the user has to mend, in words; empty for what another start may mend, or another rank has to."""
    from autoparallel.runtime.guards.deadline import from_peers

    if isinstance(error, UserError):
        return "" if error.passes else str(error)
    if not isinstance(error, _MISTAKES) or from_peers(error):
        return ""
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if isinstance(error, SyntaxError) else f" ({where.filename}, line {where.lineno})"
    return f"{type(error).__name__}: {error}{place}"


def _tell_agent(text: str, folder: Path) -> None:
    """Keep what this start ended in; end the agent where the start before ended in the same."""
    before, start = folder / f"rank-{os.environ.get('LOCAL_RANK', '0')}", int(os.environ.get(RESTARTS, "0"))
    said = {}
    with contextlib.suppress(OSError, ValueError):  # there was none, or it was killed while it wrote
        said = json.loads(before.read_text(encoding="utf-8"))
    if said.get("text") != text or said["start"] < start - 1:
        before.write_text(json.dumps({"text": text, "start": start}), encoding="utf-8")
        return
    (folder / REFUSED).write_text(text, encoding="utf-8")
    # The agent ends its processes at once; this one ends anyway, and its traceback would be cut off within a line.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(os.getppid(), signal.SIGTERM)


if __name__ == "__main__":
    end_with_agent()  # before torch is imported: that takes seconds
    sys.argv = sys.argv[1:]
    main(sys.argv[0])
