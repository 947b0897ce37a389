"""`autoparallel run`: torch's elastic agent on this machine, with the script in workers of ours.

The agent restarts what is left when a process dies, when a machine leaves, and when one comes; the rest is `Trainer`'s:
it plans for what is there and goes on from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from autoparallel.errors import UserError
from autoparallel.runtime.elastic.meeting import BACKEND
from autoparallel.runtime.elastic.replicas import LIGHTHOUSE, NAME
from autoparallel.runtime.elastic.worker import AGENT, REFUSED, STARTS
from autoparallel.runtime.ranks.accelerator import accelerator_type

# How long a machine that has the fewest it needs waits for more, seconds. Kind: choice; torch's own is 30.
JOIN_S = 5.0
# How long processes have to save and end once they are told to, seconds. Kind: torch's default.
GRACE_S = 30
# What ends a run. Torch's own, but its handlers are ours.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


_FOLDER = "autoparallel-agent-"  # then the agent's process, and what makes it unique


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a run is started on this machine."""

    nodes: tuple[int, int] = (1, 1)  # fewest and most machines
    per_node: int | None = None  # processes on this one; None: one a device
    endpoint: str = ""  # HOST:PORT of the first machine; empty: this machine alone
    run_id: str = ""
    max_restarts: int = 10
    grace_s: int = GRACE_S
    join_s: float = JOIN_S
    lighthouse: str = ""  # where replicas that may drop out meet
    replica: str = ""  # the name of this one
    rendezvous: Mapping[str, Any] = field(default_factory=dict)


def parse_nodes(text: str) -> tuple[int, int]:
    """`2` or `1:8`. Raises UserError."""
    parts = text.split(":")
    if len(parts) > 2 or not all(p.isdigit() and int(p) > 0 for p in parts) or int(parts[0]) > int(parts[-1]):
        raise UserError(f"--nnodes {text}: write a number of machines, or FEWEST:MOST such as 1:8")
    return int(parts[0]), int(parts[-1])


def run_script(command: Sequence[str], launch: Launch) -> int:
    """Run `command` (a script and its arguments) under the agent until it is done; the exit status. Raises UserError for a
    launch that cannot be, and with what the script's own error said, where another start met it again."""
    fewest, most = launch.nodes
    if most > 1 and not launch.endpoint:
        raise UserError(
            f"--nnodes {fewest}:{most} is about several machines: say where they meet, with --rdzv-endpoint HOST:PORT of "
            "one that stays, the same on all"
        )
    with _told_once(), _own_folder() as own:
        os.environ[STARTS] = str(own)
        return _until_done(_config(launch, own), command, launch, own / REFUSED)


def _config(launch: Launch, own: Path) -> LaunchConfig:
    """What torch's agent is told; it keeps its files in `own`."""
    fewest, most = launch.nodes
    config = LaunchConfig(
        min_nodes=fewest,
        max_nodes=most,
        nproc_per_node=launch.per_node or _devices(),
        run_id=launch.run_id or (str(uuid.uuid4()) if not launch.endpoint else "autoparallel"),
        rdzv_backend=BACKEND,
        rdzv_endpoint=launch.endpoint or "localhost:0",
        rdzv_configs={"last_call_timeout": launch.join_s, **launch.rendezvous},
        max_restarts=launch.max_restarts,
        shutdown_timeout=launch.grace_s,
        signals_to_handle=signal.SIGUSR2.name,  # torch needs one: this ends a process anyway
        logs_specs=DefaultLogsSpecs(log_dir=str(own)),
    )
    # A first machine that shares its store tells its address in the first meeting alone (torch 2.11 to 2.13): whoever
    # comes later would wait for it in vain.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ[AGENT] = str(os.getpid())
    for variable, value in ((LIGHTHOUSE, launch.lighthouse), (NAME, launch.replica)):
        if value:
            os.environ[variable] = value
    return config


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    """A folder of this agent's for files that go with it; those of agents that were killed go, too."""
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        if not _lives(left.name.removeprefix(_FOLDER).partition("-")[0]):
            shutil.rmtree(left, ignore_errors=True)  # other users' stay
    with tempfile.TemporaryDirectory(prefix=f"{_FOLDER}{os.getpid()}-") as folder:
        yield Path(folder)


def _lives(process: str) -> bool:
    """Whether there is a process of this number; what is no number is nobody's to remove."""
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError, OverflowError):
        return True
    return True


@contextlib.contextmanager
def _told_once() -> Iterator[None]:
    """Raise SignalException where a signal ends the run, for SIGTERM the first time alone: Slurm sends it from several sides,
    and one that comes while processes save would end the agent, and them with it."""

    def told(number: int, _: FrameType | None) -> None:
        if number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SignalException(f"told to end by signal {number}", sigval=signal.Signals(number))

    before = {number: signal.signal(number, told) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _until_done(config: LaunchConfig, command: Sequence[str], launch: Launch, refused: Path) -> int:
    worker = ["-u", "-m", "autoparallel.runtime.elastic.worker", *command]
    for left in range(launch.max_restarts, -1, -1):
        try:
            elastic_launch(config, sys.executable)(*worker)
        except ChildFailedError as error:
            print(_last_words(error, launch), file=sys.stderr)
            return 1
        except SignalException as error:
            if refused.exists():
                raise UserError(
                    f"{refused.read_text(encoding='utf-8')}\n  (so ended two starts of {command[0]})"
                ) from None
            print(
                f"ended by {signal.Signals(error.sigval).name}; the run goes on from its last checkpoint",
                file=sys.stderr,
            )
            return 128 + int(error.sigval)
        except (dist.DistError, RendezvousError) as error:
            again = isinstance(error, dist.DistError) and left > 0
            print(_did_not_meet(error, config, again=again), file=sys.stderr)
            if not again:
                return 1
        else:
            return 0
    return 1


def _did_not_meet(error: Exception, config: LaunchConfig, *, again: bool) -> str:
    """In words, and what to do, or what is done."""
    if isinstance(error, RendezvousClosedError):
        return f"error: run {config.run_id!r} at {config.rdzv_endpoint} has ended: start it again on all, with another --rdzv-id"
    why = (str(error) or type(error).__name__).splitlines()[0]
    met = f"the machines of run {config.run_id!r} did not meet at {config.rdzv_endpoint}: {why}"
    if again:
        return f"{met}; one may have gone in that moment: meeting again"
    return f"error: {met}; the run may have ended, or its first machine: start it again on all, with the same --rdzv-endpoint"


def _devices() -> int:
    return torch.accelerator.device_count() if accelerator_type() is not None else 1


def _last_words(error: ChildFailedError, launch: Launch) -> str:
    """Which process failed first, of what, and which others followed."""
    failures = sorted(error.failures.items(), key=lambda f: f[1].timestamp)
    (rank, first), others = failures[0], [str(r) for r, _ in failures[1:]]
    when = time.strftime("%H:%M:%S", time.localtime(first.timestamp))
    lines = [f"error: rank {rank} ({socket.gethostname()}, process {first.pid}) {_how(first)} at {when}"]
    if others:
        lines.append(f"  ranks {', '.join(others)} ended after it")
    lines.append(
        f"  it was restarted {launch.max_restarts} times (--max-restarts); the run goes on from its last checkpoint when "
        "it is started again"
    )
    return "\n".join(lines)


def _how(failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        return f"was ended by {signal.Signals(-failure.exitcode).name}"
    text = failure.message
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["message"] if isinstance(text, str) else text["message"]
    last = str(text).strip().splitlines()[-1] if text else ""
    return f"failed (exit status {failure.exitcode}): {last}"
