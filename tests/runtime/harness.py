"""Gloo processes that live for a whole test session and run one function after another on every rank.

    def on_rank(rank: int, world_size: int, value: int) -> int: ...     # at the top of a test module

    def test_something(gloo: Processes) -> None:
        results = gloo.run(2, on_rank, value=3)                          # one result per rank, pickled

The default process group is up when the function starts; the function must leave it up. Functions are found by
name in the child, so they stand at the top level of an importable module. If a rank raises or hangs, all
ranks' tracebacks are raised here and the processes of that size are started afresh for the next case.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import pickle
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[2])
CASE_TIMEOUT_S = 600.0  # of the clock: a rank that hangs is found, a busy machine is not taken for one
_PRELOAD = ["tests.runtime.preload"]


class RankError(AssertionError):
    """A function raised, or hung, on at least one rank."""


def _serve(rank: int, world_size: int, store_path: str, pipe: Connection) -> None:
    if ROOT not in sys.path:
        sys.path.insert(0, ROOT)
    import torch
    import torch.distributed as dist

    gc.freeze()  # what was imported is never garbage: collecting after a case looks at what the case left
    torch.set_num_threads(1)
    timeout = timedelta(seconds=CASE_TIMEOUT_S)
    store = dist.FileStore(store_path, world_size)
    _share_one_loop()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    groups = _Groups()
    for case in itertools.count():
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        groups.begin()
        try:
            function, kwargs = pickle.loads(message)
            torch.manual_seed(0)
            reply = pickle.dumps((True, function(rank, world_size, **kwargs)))
            _wait_for_all(store, case, world_size)
        except BaseException:
            reply = pickle.dumps((False, traceback.format_exc()))
            store.set(f"all finished {case}", "1")  # nobody waits for a rank that failed
        gc.collect()
        pipe.send_bytes(reply)


def _share_one_loop() -> None:
    """One thread of this process serves the sockets of all of its groups. (torch gives a thread to each group, which looks for
    events a hundred times a second, also where there are none: twelve idle ranks with thirty groups each took two thirds of a core.)"""
    from torch.distributed import ProcessGroupGloo, distributed_c10d

    device = ProcessGroupGloo.create_default_device()

    class OnOneLoop(ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = ProcessGroupGloo._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnOneLoop  # type: ignore[misc]


class _Groups:
    """Process groups live as long as their ranks: what a case asks for is what an earlier one was given, in order, for the
    same ranks. (DTensor remembers layouts with their meshes, and these their groups, each with two threads; as they do
    not go with the case that made them, they may as well be used again.)"""

    def __init__(self) -> None:
        from torch.distributed import distributed_c10d

        self._make = distributed_c10d._new_group_with_tag
        self._known: dict[str, list[Any]] = {}
        self._given: Counter[str] = Counter()
        distributed_c10d._new_group_with_tag = self._group

    def begin(self) -> None:
        """Another case starts."""
        self._given.clear()

    def _group(self, ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        key = repr((ranks, args, sorted(kwargs.items())))
        known = self._known.setdefault(key, [])
        self._given[key] += 1
        if self._given[key] > len(known):
            known.append(self._make(ranks, *args, **kwargs))
        return known[self._given[key] - 1]


def _wait_for_all(store: Any, case: int, world_size: int) -> None:
    """Through the store, not the groups: no rank starts on the next case while another is at this one."""
    if store.add(f"finished {case}", 1) == world_size:
        store.set(f"all finished {case}", "1")
    store.wait([f"all finished {case}"], timedelta(seconds=CASE_TIMEOUT_S))


@dataclass
class _Pool:
    processes: list[BaseProcess]
    pipes: list[Connection]
    folder: tempfile.TemporaryDirectory[str]

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


@dataclass
class Processes:
    """Pools of ranks by world size, started when first asked for."""

    pools: dict[int, _Pool] = field(default_factory=dict)

    def run(self, world_size: int, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Call `function(rank, world_size, **kwargs)` on every rank; the results in order of rank."""
        pool = self.pools.get(world_size) or self._start(world_size)
        message = pickle.dumps((function, kwargs))
        for pipe in pool.pipes:
            pipe.send_bytes(message)
        replies = _collect(pool.pipes)
        if all(reply is not None and reply[0] for reply in replies):
            return [reply[1] for reply in replies if reply is not None]
        self.pools.pop(world_size).stop()
        lines = [f"{function.__module__}.{function.__qualname__}({kwargs}) on {world_size} ranks:"]
        for rank, reply in enumerate(replies):
            if reply is None:
                lines.append(f"rank {rank}: no answer")
            elif not reply[0]:
                lines.append(f"rank {rank}:\n{reply[1]}")
        raise RankError("\n".join(lines))

    def stop(self) -> None:
        """End all processes."""
        while self.pools:
            self.pools.popitem()[1].stop()

    def _start(self, world_size: int) -> _Pool:
        # A fork server that has imported everything once makes each rank start in a few milliseconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        folder = tempfile.TemporaryDirectory(prefix="gloo-")
        pool = _Pool([], [], folder)
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, world_size, f"{folder.name}/store", theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            pool.processes.append(process)
            pool.pipes.append(ours)
        self.pools[world_size] = pool
        return pool


def _collect(pipes: list[Connection]) -> list[tuple[bool, Any] | None]:
    """One reply per rank; ranks that wait for one that failed get two more seconds, then count as silent."""
    replies: list[tuple[bool, Any] | None] = [None] * len(pipes)
    deadline = time.monotonic() + CASE_TIMEOUT_S
    failed = False
    while any(reply is None for reply in replies) and time.monotonic() < deadline:
        waiting = [rank for rank, reply in enumerate(replies) if reply is None]
        ready = multiprocessing.connection.wait([pipes[rank] for rank in waiting], timeout=1.0)
        for rank in waiting:
            if pipes[rank] in ready:
                try:
                    replies[rank] = pickle.loads(pipes[rank].recv_bytes())
                except (EOFError, ConnectionError):
                    replies[rank] = (False, "the process died")
                if not failed and not replies[rank][0]:  # type: ignore[index]
                    failed, deadline = True, time.monotonic() + 2.0
    return replies
