"""A parameter server: holds parts of tables, gives rows, takes gradients, updates.

    synchronous     a step's gradients are added up and applied once every worker has said that its step has ended, in the
                    order of the workers; `commit` returns after that, so that what is asked for next is what one process has
    bounded-stale   each worker's gradients are applied when its step ends; rows are given to a worker that is no more than
                    `staleness` steps ahead of the slowest (stale synchronous parallel, Ho et al. 2013)
    asynchronous    as they come, and rows as they are

Run as `python -m autoparallel.runtime.servers.server FOLDER`: reads its key from standard input, writes its port to standard
output, and ends when standard input does. FOLDER is for rows that are not in memory.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autoparallel.runtime.servers.held import VALUES, HeldRows
from autoparallel.runtime.servers.rows_optimizer import RowsOptimizer
from autoparallel.runtime.servers.wire import answer_calls

SYNCHRONOUS, BOUNDED, ASYNCHRONOUS = "synchronous", "bounded-stale", "asynchronous"
MODES = (SYNCHRONOUS, BOUNDED, ASYNCHRONOUS)
_HELLO_S = 60.0  # that somebody who connects may take to show that it knows the key, or to take an answer. Kind: choice
SETTLE_EVERY = 64  # steps after which the most wanted rows are brought to memory. Kind: choice
Key = tuple[int, int]  # table and part
Rows = Sequence[tuple[Key, np.ndarray]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all workers of a run agree on."""

    mode: str
    staleness: int
    workers: int
    timeout_s: float


class Server:
    """The calls that a server answers: every public method is one."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._held = folder, dict[Key, HeldRows]()
        self._terms = Terms(mode=SYNCHRONOUS, staleness=0, workers=1, timeout_s=60.0)
        self._lock = threading.Condition()
        self._clocks: dict[int, int] = {}
        self._ready: set[int] = set()  # workers whose step has ended
        self._updates = 0
        self._optimizers: dict[type, RowsOptimizer] = {}

    def begin(self, terms: Terms, clocks: Mapping[int, int]) -> None:
        """What workers have agreed on, and how many steps each has behind it."""
        with self._lock:
            self._terms, self._clocks = terms, dict(clocks)

    def take(self, key: Key, rows: int, dim: int, memory_rows: int | None, steps: int) -> None:
        """Hold a part from now on; zeros until it is put."""
        with self._lock:
            self._held[key] = HeldRows(rows, dim, memory_rows=memory_rows, folder=self._folder)
            self._held[key].steps = steps

    def begin_at(self, key: Key, steps: int) -> None:
        """So many steps lie behind a part."""
        with self._lock:
            self._held[key].steps = steps

    def drop(self, key: Key) -> None:
        """Hold a part no longer."""
        with self._lock:
            self._held.pop(key)

    def put(self, key: Key, name: str, places: np.ndarray, values: np.ndarray) -> None:
        """Write values, or a part of the state, of rows."""
        with self._lock:
            self._held[key].write(name, torch.from_numpy(places), torch.from_numpy(values))

    def get(self, key: Key, name: str, places: np.ndarray) -> np.ndarray:
        """Read values, or a part of the state, of rows."""
        with self._lock:
            return self._held[key].read(name, torch.from_numpy(places)).numpy()

    def about(self, key: Key) -> tuple[int, tuple[str, ...], np.ndarray]:
        """Steps, the parts of the state, and how often each row was asked for."""
        with self._lock:
            held = self._held[key]
            return held.steps, tuple(held.fields), held.fields[VALUES].counts.numpy().copy()

    def pull(self, worker: int, asked: Rows, narrow: str) -> list[np.ndarray]:
        """Rows, each part's at its places, in the dtype `narrow`."""
        with self._lock:
            if self._terms.mode == BOUNDED:
                ahead = self._clocks.get(worker, 0) - self._terms.staleness
                self._wait(lambda: self._slowest() >= ahead, "the slowest worker")
            dtype = getattr(torch, narrow)
            return [
                self._wired(self._held[key].look_up(torch.from_numpy(places)).to(dtype))
                for key, places in asked
            ]

    def push(self, worker: int, given: Sequence[tuple[Key, np.ndarray, np.ndarray]], narrow: str) -> None:
        """Gradients of rows."""
        dtype = getattr(torch, narrow)
        with self._lock:
            for key, places, gradients in given:
                sent = torch.from_numpy(gradients)
                sent = sent.view(torch.bfloat16) if dtype == torch.bfloat16 else sent
                self._held[key].give(worker, torch.from_numpy(places), sent)

    def square(self, keys: Sequence[Key]) -> float:
        """Sum of squares of the sums of gradients that have come for these parts."""
        with self._lock:
            return sum(float(self._held[key].given()[1].double().square().sum()) for key in keys)

    def sums(self, key: Key) -> tuple[np.ndarray, np.ndarray]:
        """Rows for which gradients have come, and their sums."""
        with self._lock:
            places, sums = self._held[key].given()
            return places.numpy(), sums.numpy()

    def commit(
        self, worker: int, kind: type, options: Mapping[int, Mapping[str, Any]], scale: float, all_rows: bool
    ) -> None:
        """The end of a worker's step: update, now or when all have ended theirs. `options` by table."""
        with self._lock:
            self._clocks[worker] = self._clocks.get(worker, 0) + 1
            if self._terms.mode != SYNCHRONOUS:
                self._update(kind, options, scale, all_rows, worker)
                self._lock.notify_all()
                return
            mine = self._updates
            self._ready.add(worker)
            if len(self._ready) == self._terms.workers:
                self._ready.clear()
                self._update(kind, options, scale, all_rows)
                self._lock.notify_all()
            self._wait(lambda: self._updates > mine, "another worker's step")

    def settle(self) -> int:
        """Bring the most wanted rows to memory; how many have come."""
        with self._lock:
            return sum(held.settle() for held in self._held.values())

    def forget(self, worker: int) -> None:
        """Drop gradients that have come of a worker."""
        with self._lock:
            for held in self._held.values():
                held.forget(worker)

    def _update(
        self, kind: type, options: Mapping[int, Mapping[str, Any]], scale: float, all_rows: bool, worker: int | None = None
    ) -> None:  # fmt: skip
        for key, held in self._held.items():
            optimizer = self._optimizers.get(kind)
            if optimizer is None:
                optimizer = self._optimizers[kind] = RowsOptimizer(kind, options[key[0]])
            held.update(optimizer, options[key[0]], scale=scale, all_rows=all_rows, worker=worker)
        self._updates += 1
        if self._updates % SETTLE_EVERY == 0:
            for held in self._held.values():
                held.settle()

    def _slowest(self) -> int:
        return min((self._clocks.get(worker, 0) for worker in range(self._terms.workers)), default=0)

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        if not self._lock.wait_for(ready, timeout=self._terms.timeout_s):
            raise TimeoutError(f"waited {self._terms.timeout_s:g} s for {what}")

    @staticmethod
    def _wired(rows: torch.Tensor) -> np.ndarray:
        return (rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy()


def serve(folder: Path, key: bytes, host: str = "") -> tuple[Server, int]:
    """Answer workers in threads; the server and its port."""
    server = Server(folder)
    listener = Listener((host, 0), backlog=64)

    def find(name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise ValueError(f"no call {name}")
        return getattr(server, name)  # type: ignore[no-any-return]

    def accept() -> None:
        while True:
            try:
                connection = listener.accept()
            except Exception:  # one that went meanwhile: the next one
                continue
            threading.Thread(target=answer_calls, args=(connection, key, find, _HELLO_S), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return server, listener.address[1]


def main() -> None:
    """Serve until standard input ends."""
    torch.set_num_threads(1)
    key = bytes.fromhex(json.loads(sys.stdin.readline())["key"])
    RowsOptimizer(
        torch.optim.SGD, {"lr": 0.0}
    )  # torch loads its compiler in a process's first step of an optimizer
    _, port = serve(Path(sys.argv[1]), key)
    print(json.dumps({"port": port, "host": socket.gethostname()}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
