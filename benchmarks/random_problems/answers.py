"""Answers of `plan`, each made in a process that is stopped at a limit."""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from autoparallel.errors import UserError
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.space.certificate import SpaceKey, space_of
from autoparallel.planner.strategy.types import Strategy
from benchmarks.random_problems.graphs import ROOT

try:
    from autoparallel.planner.plan import InfeasiblePlan, SearchTimeout, plan
except ModuleNotFoundError:  # a planner from before it stood there, to be measured against
    from autoparallel.planner.plan import InfeasiblePlan, SearchTimeout, plan

T = TypeVar("T")
NEAR = 0.02  # "within 2 % of the final plan"
FOUND = ("optimal", "feasible")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What `plan` said: "optimal", "feasible", "infeasible", "nothing found", "refused", "crashed" or "cut"."""

    status: str
    strategy: Strategy | None = None
    step_time_s: float = 0.0
    peak_bytes: int = 0
    devices: int = 0
    lower_bound_s: float = 0.0
    gap: float = 0.0
    candidates: int = 0
    near_s: float = (
        0.0  # wall-clock until the best was within `NEAR` of the last, as far as progress was reported
    )
    seconds: float = 0.0
    message: str = ""
    left_out: tuple[str, ...] = ()  # keys that the answer itself says were not searched
    cpu_s: float = 0.0  # of the process, its children included

    @property
    def found(self) -> bool:
        return self.status in FOUND


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A process that has ended: what it wrote, and its processor time; `cut` where the limit ended it."""

    output: bytes
    cpu_s: float
    cut: bool
    code: int


def answer(problem: Problem, *, processes: int = 1) -> Answer:
    """Plan here and now."""
    best: list[tuple[float, float]] = []

    def seen(progress: object) -> None:
        incumbent = getattr(progress, "incumbent", None)
        if incumbent is not None:
            best.append((float(getattr(progress, "elapsed_s", 0.0)), float(incumbent)))

    started = time.monotonic()
    try:
        result = plan(problem, advise=False, progress=seen, processes=processes)
    except InfeasiblePlan as error:
        return Answer(status="infeasible", message=str(error), left_out=left_out_of(space_of(problem)))
    except SearchTimeout as error:
        return Answer(status="nothing found", message=str(error))
    except UserError as error:
        return Answer(status="refused", message=str(error))
    except Exception:
        return Answer(status="crashed", message=" | ".join(traceback.format_exc().strip().splitlines()[-4:]))
    seconds = time.monotonic() - started
    step = result.prediction.step_time_s
    near = next((at for at, value in best if value <= step * (1 + NEAR)), seconds)
    return Answer(
        status=result.status, strategy=result.strategy, step_time_s=step, peak_bytes=result.prediction.peak_bytes,
        devices=result.prediction.devices, lower_bound_s=result.lower_bound_s, gap=result.gap,
        candidates=result.candidates, near_s=near, seconds=seconds,
        left_out=left_out_of(result.space),
    )  # fmt: skip


def left_out_of(space: Iterable[SpaceKey]) -> tuple[str, ...]:
    """Keys that an answer's `space` says were left out: entries with `key` and `how`, "left-out: REASON"."""
    found = []
    for entry in space:
        if entry.how.startswith("left-out"):
            found.append(entry.key)
    return tuple(found)


def ended(pid: int, deadline: float) -> tuple[int, float, bool]:
    """Wait for a process that leads its group, and stop the group at the deadline: its exit code, processor time with its
    children's, and whether it was stopped."""
    cut = False
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, cut
        if time.monotonic() > deadline and not cut:
            cut = True
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        time.sleep(0.01)


def run_command(command: Sequence[str], limit_s: float) -> Run:
    """A fresh process in the repository's root; its output is what it writes to standard error."""
    with subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:  # fmt: skip
        code, cpu_s, cut = ended(process.pid, time.monotonic() + limit_s)
        process.returncode = code
        assert process.stderr is not None
        return Run(output=process.stderr.read(), cpu_s=cpu_s, cut=cut, code=code)


def isolated(work: Callable[[], T], limit_s: float) -> tuple[T | None, float, bool]:
    """What `work` returns in a forked process, its processor time, and whether the limit ended it; None where it died."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.close(reader)
        code = 1
        try:
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(pickle.dumps(work()))
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)
    deadline, read = time.monotonic() + limit_s, b""
    while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = os.read(reader, 1 << 16)
        if not piece:
            break
        read += piece
    os.close(reader)
    code, cpu_s, cut = ended(pid, deadline)
    return (pickle.loads(read) if read and not code else None), cpu_s, cut
