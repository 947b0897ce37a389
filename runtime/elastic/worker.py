"""What each process of `autoparallel run` begins with: `python -m autoparallel.runtime.elastic.worker train.py …`.

It ends when its agent ends, however that was ended (Linux): no process is left behind. Its groups are left before the
interpreter goes. What the script raises goes to the
file that the agent reads (`torch.distributed.elastic.multiprocessing.errors`), so that the agent's last words name it. What
the user has to mend (`UserError`) is not tried for ever: where two starts, one after the other, end in the same words, this
machine's agent is told to end, too.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

from autoparallel.errors import UserError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
AGENT = "AUTOPARALLEL_AGENT"  # of the environment: the process that started this one
STARTS = "AUTOPARALLEL_STARTS"  # the agent's folder of what the starts before ended in
REFUSED = "refused"  # a file there: what no other start will mend


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
    record(_run)(script)


def _run(script: str) -> None:
    try:
        runpy.run_path(script, run_name="__main__")
    except UserError as error:
        if not error.passes and STARTS in os.environ:
            _tell_agent(str(error), Path(os.environ[STARTS]))
        raise


def _tell_agent(text: str, folder: Path) -> None:
    """Keep what this start ended in; end the agent where the start before ended in the same."""
    before = folder / f"rank-{os.environ.get('LOCAL_RANK', '0')}"
    if not before.exists() or before.read_text(encoding="utf-8") != text:
        before.write_text(text, encoding="utf-8")
        return
    (folder / REFUSED).write_text(text, encoding="utf-8")
    os.kill(os.getppid(), signal.SIGTERM)


if __name__ == "__main__":
    end_with_agent()  # before torch is imported: that takes seconds
    sys.argv = sys.argv[1:]
    main(sys.argv[0])
