"""Cold rows with parameter servers: what a worker asks of which, and what it does when one no longer answers.

Every part of a table is on as many servers as there are copies. Rows are asked of one of them; gradients, and the ends of steps,
go to all, so that each has what the others have: where one dies, the next in line is asked, and nothing is lost. A step that is
not synchronous sends in a thread of its own, and the worker goes on.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autoparallel.errors import UserError
from autoparallel.runtime.servers.dealing import (
    Deal,
    Part,
    completed,
    deal,
    joined,
    parts_of,
    rows_in,
    without,
)
from autoparallel.runtime.servers.server import SYNCHRONOUS, Key, Terms
from autoparallel.runtime.servers.store import Ending, TableShape
from autoparallel.runtime.servers.wire import Address, Peer, ServerLost

_AT_ONCE = 1 << 20  # rows that are moved at a time. Kind: choice


class ServersLost(UserError):
    """No copy of some rows is left."""

    passes = True


class Servers:
    """A `Store` on the servers at `addresses`, for `worker` of `terms.workers`. Every worker makes one; worker 0 has the
    servers take their parts, and `gather` collects an object of each. `traffic` of a table is in any one unit."""

    def __init__(
        self, tables: Sequence[TableShape], addresses: Sequence[Address], key: bytes, *, worker: int, terms: Terms,
        copies: int, warm: float, gather: Callable[[Any], list[Any]], device: torch.device, param_dtype: torch.dtype,
        grad_dtype: torch.dtype, traffic: Sequence[float],
    ) -> None:  # fmt: skip
        self._shapes, self._key, self._worker, self.terms = tuple(tables), key, worker, terms
        self._copies, self._warm, self._gather, self._device = copies, warm, gather, device
        self._param_dtype, self._grad_dtype = param_dtype, grad_dtype
        self._cut = [parts_of(table.rows) for table in tables]
        self.parts = tuple(
            Part(
                table=number, number=n, rows=rows_in(t.rows, cut, n), size_bytes=float(rows_in(t.rows, cut, n) * t.dim),
                traffic=traffic[number] / cut,
            )
            for number, (t, cut) in enumerate(zip(tables, self._cut, strict=True)) for n in range(cut)
        )  # fmt: skip
        self._first = [sum(self._cut[:number]) for number in range(len(tables))]
        self._peers = {n: Peer(address, key, terms.timeout_s) for n, address in enumerate(addresses)}
        self._senders = dict(self._peers)
        if terms.mode != SYNCHRONOUS:
            self._senders = {n: Peer(address, key, terms.timeout_s) for n, address in enumerate(addresses)}
        self.deal: Deal = deal(self.parts, tuple(self._peers), copies)
        self._clock = 0
        self._pool = ThreadPoolExecutor(max_workers=2 * len(addresses) + 8)
        self._outgoing: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._failure: list[BaseException] = []
        self._gone: ServersLost | None = None
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        if terms.mode != SYNCHRONOUS:
            self._thread = threading.Thread(target=self._send_on, daemon=True)
            self._thread.start()
        if worker == 0:
            self._begin()
        self._meet()

    def _begin(self) -> None:
        for peer in self._peers.values():
            peer.call("begin", self.terms, {})
        for number, servers in enumerate(self.deal):
            for server in servers:
                self._take(number, server, steps=0)

    def _take(self, number: int, server: int, *, steps: int) -> None:
        part = self.parts[number]
        warm = None if self._warm >= 1.0 else round(part.rows * self._warm)
        dim = self._shapes[part.table].dim
        self._peers[server].call("take", (part.table, part.number), part.rows, dim, warm, steps)

    def pull(self, asked: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        """See `Store`. Servers are asked at once."""
        self._check()
        pieces = [self._by_part(table, rows) for table, rows in asked]
        flat = [
            (number, n, piece) for n, own_pieces in enumerate(pieces) for number, piece in own_pieces.items()
        ]
        found = [torch.empty(len(rows), self._shapes[t].dim, dtype=self._param_dtype) for t, rows in asked]
        waiting = flat
        narrow = str(self._param_dtype).removeprefix("torch.")
        while waiting:
            by_server: dict[int, list[tuple[int, int, tuple[Tensor, Tensor]]]] = {}
            for one in waiting:
                by_server.setdefault(self._asked_of(one[0]), []).append(one)
            answers = self._at_once(
                {
                    server: (
                        "pull",
                        self._worker,
                        [(self._name(n), at.numpy()) for n, _, (_, at) in own],
                        narrow,
                    )
                    for server, own in by_server.items()
                }
            )
            waiting = [one for server, own in by_server.items() if server not in answers for one in own]
            for server, own in by_server.items():
                for (_, n, (order, _)), rows in zip(own, answers.get(server, ()), strict=server in answers):
                    found[n].index_copy_(0, order, self._read(rows, self._param_dtype))
        return [rows.to(self._device) for rows in found]

    def push(self, given: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        """See `Store`."""
        self._check()
        narrow = str(self._grad_dtype).removeprefix("torch.")
        messages: dict[int, list[tuple[Key, np.ndarray, np.ndarray]]] = {}
        with self._lock:
            dealt = self.deal
        for table, rows, gradients in given:
            sent = gradients.detach().to("cpu", self._grad_dtype)
            for number, (order, at) in self._by_part(table, rows).items():
                own = sent[order].contiguous()
                wired = (own.view(torch.uint16) if own.dtype == torch.bfloat16 else own).numpy()
                for server in dealt[number]:
                    messages.setdefault(server, []).append((self._name(number), at.numpy(), wired))
        self._later(lambda: self._told({s: ("push", self._worker, m, narrow) for s, m in messages.items()}))

    def square(self) -> float:
        """See `Store`; each worker asks for a share."""
        self._only_synchronous("the norm of gradients")
        self._meet()
        found = 0.0
        for number in range(len(self.parts)):
            if number % self.terms.workers == self._worker:
                found += self._one(number, "square", [self._name(number)])
        return float(sum(self._gather(found)))

    def sums(self, table: int) -> tuple[Tensor, Tensor]:
        """See `Store`."""
        self._only_synchronous("whole gradients")
        self._meet()
        rows, sums = [], []
        for number in self._numbers(table):
            places, found = self._one(number, "sums", self._name(number))
            rows.append(torch.from_numpy(places) * self._cut[table] + self.parts[number].number)
            sums.append(torch.from_numpy(found))
        self._meet()
        return torch.cat(rows).to(self._device), torch.cat(sums).to(self._device)

    def commit(self, ending: Ending) -> None:
        """See `Store`."""
        self._clock += 1
        call = ("commit", self._worker, ending.kind, dict(ending.options), ending.scale, ending.all_rows)
        self._later(lambda: self._told(dict.fromkeys(self._senders, call)))

    def forget(self) -> None:
        """See `Store`."""
        self._later(lambda: self._told(dict.fromkeys(self._senders, ("forget", self._worker))))

    def about(self, table: int) -> tuple[int, tuple[str, ...]]:
        """See `Store`."""
        number = self._first[table]
        steps, names, _ = self._one(number, "about", self._name(number))
        return steps, names

    def read(self, table: int, name: str, rows: Tensor) -> Tensor:
        """See `Store`."""
        found = torch.empty(len(rows), self._shapes[table].dim)
        for number, (order, at) in self._by_part(table, rows).items():
            for first in range(0, len(at), _AT_ONCE):
                piece = slice(first, first + _AT_ONCE)
                got = self._one(number, "get", self._name(number), name, at[piece].numpy())
                found.index_copy_(0, order[piece], torch.from_numpy(got))
        return found.to(self._device)

    def write(self, table: int, name: str, rows: Tensor, values: Tensor) -> None:
        """See `Store`."""
        sent = values.detach().to("cpu", torch.float32)
        for number, (order, at) in self._by_part(table, rows).items():
            for first in range(0, len(at), _AT_ONCE):
                piece = slice(first, first + _AT_ONCE)
                for server in self.deal[number]:
                    self._peers[server].call(
                        "put", self._name(number), name, at[piece].numpy(), sent[order[piece]].numpy()
                    )

    def begin_at(self, table: int, steps: int) -> None:
        """See `Store`."""
        if self._worker == 0:
            for number in self._numbers(table):
                for server in self.deal[number]:
                    self._peers[server].call("begin_at", self._name(number), steps)
        self._meet()

    def counts(self, table: int) -> Tensor:
        """See `Store`: what all copies together were asked. Collective."""
        found = torch.zeros(self._shapes[table].rows)
        for number in self._numbers(table) if self._worker == 0 else ():
            for server in self.deal[number]:
                counted = self._peers[server].call("about", self._name(number))[2]
                found[self.parts[number].number :: self._cut[table]] += torch.from_numpy(counted)
        agreed: Tensor = self._gather(found if self._worker == 0 else None)[0]
        return agreed.to(self._device)

    def join(self, address: Address) -> None:
        """Have a further server take its share of the parts. Collective, between two steps."""
        self._agree()
        new = max([*self._peers, -1]) + 1
        self._peers[new] = Peer(address, self._key, self.terms.timeout_s)
        self._senders[new] = self._peers[new]
        if self.terms.mode != SYNCHRONOUS:
            self._senders[new] = Peer(address, self._key, self.terms.timeout_s)
        there = [server for server in self._peers if server != new]
        self._move(
            completed(self.parts, joined(self.parts, self.deal, there, new), tuple(self._peers), self._copies)
        )

    def repair(self) -> None:
        """Copy again what has fewer copies than it should, while there are servers for them. Collective, between two steps."""
        self._agree()
        self._move(completed(self.parts, self.deal, tuple(self._peers), self._copies))

    def _move(self, wanted: Deal) -> None:
        """Worker 0 copies what is to stand elsewhere; then all ask there."""
        if self._worker == 0:
            for peer in self._peers.values():
                peer.call("begin", self.terms, dict.fromkeys(range(self.terms.workers), self._clock))
            for number, (before, after) in enumerate(zip(self.deal, wanted, strict=True)):
                for server in after:
                    if server not in before:
                        self._copy(number, before[0], server)
        self._meet()
        if self._worker == 0:
            for number, (before, after) in enumerate(zip(self.deal, wanted, strict=True)):
                for server in before:
                    if server not in after:
                        self._peers[server].call("drop", self._name(number))
        self.deal = wanted
        self._meet()

    def _copy(self, number: int, source: int, target: int) -> None:
        steps, names, _ = self._peers[source].call("about", self._name(number))
        self._take(number, target, steps=steps)
        for name in names:
            for first in range(0, self.parts[number].rows, _AT_ONCE):
                places = np.arange(first, min(first + _AT_ONCE, self.parts[number].rows))
                rows = self._peers[source].call("get", self._name(number), name, places)
                self._peers[target].call("put", self._name(number), name, places, rows)

    def flush(self) -> None:
        """Return when all that was sent has arrived."""
        if self._thread is not None:
            self._outgoing.join()
        self._check()

    def close(self) -> None:
        """See `Store`; once no worker waits for an answer any more."""
        self.flush()
        self._meet()
        if self._thread is not None:
            self._outgoing.put(None)
            self._thread.join(timeout=self.terms.timeout_s)
        for peer in {*self._peers.values(), *self._senders.values()}:
            peer.close()
        self._pool.shutdown(wait=False)

    @property
    def alive(self) -> tuple[int, ...]:
        """The servers that answer, as far as this worker knows."""
        return tuple(self._peers)

    def _meet(self) -> None:
        self._gather(None)

    def _agree(self) -> None:
        """Leave out the servers that some worker has not reached. Collective."""
        self.flush()
        common = set.intersection(*(set(alive) for alive in self._gather(self.alive)))
        for server in self.alive:
            if server not in common:
                self._lost(server, ServerLost(f"server {server} is not reached by every worker"))

    def _one(self, number: int, name: str, *arguments: Any) -> Any:
        """The answer of a server that has the part; of the next one, where that has gone."""
        while True:
            server = self._asked_of(number)
            answer = self._answer(server, self._peers, (name, *arguments))
            if answer is not None:
                return answer[1]

    def _later(self, send: Callable[[], None]) -> None:
        if self._thread is None:
            send()
        else:
            self._outgoing.put(send)

    def _send_on(self) -> None:
        while (send := self._outgoing.get()) is not None:
            try:
                send()
            except Exception as error:  # raised in the worker's next call
                self._failure.append(error)
            finally:
                self._outgoing.task_done()
        self._outgoing.task_done()

    def _check(self) -> None:
        if self._failure:
            raise self._failure[0]

    def _told(self, calls: dict[int, tuple[Any, ...]]) -> None:
        """To all of these servers; those that have gone are left out from now on."""
        self._at_once(
            {server: call for server, call in calls.items() if server in self._senders}, sending=True
        )

    def _at_once(self, calls: dict[int, tuple[Any, ...]], *, sending: bool = False) -> dict[int, Any]:
        """The answers of the servers that answered, in parallel."""
        peers = self._senders if sending else self._peers
        if len(calls) == 1:
            answers = [self._answer(server, peers, call) for server, call in calls.items()]
        else:
            futures = [self._pool.submit(self._answer, s, peers, call) for s, call in calls.items()]
            answers = [future.result() for future in futures]
        return dict(answer for answer in answers if answer is not None)

    def _answer(self, server: int, peers: dict[int, Peer], call: tuple[Any, ...]) -> tuple[int, Any] | None:
        """The server, and its answer; None where it has gone, which another thread may have found meanwhile."""
        if self._gone is not None:
            raise self._gone
        if (peer := peers.get(server)) is None:
            return None
        try:
            # An answer that waits for other workers takes as long as they may.
            limit_s = 2 * self.terms.timeout_s if call[0] == "commit" else None
            return server, peer.call(*call, timeout_s=limit_s)
        except ServerLost as error:
            self._lost(server, error)
            return None

    def _lost(self, server: int, error: ServerLost) -> None:
        with self._lock:
            for peers in (self._peers, self._senders):
                if (peer := peers.pop(server, None)) is not None:
                    peer.close()
            try:
                self.deal = without(self.deal, server)
            except ValueError as lost:
                advice = "Start again from the last checkpoint; with servers.copies = 2 one server may die"
                self._gone = ServersLost(f"{error}; {lost}: rows are gone. {advice}")
                raise self._gone from None

    def _asked_of(self, number: int) -> int:
        """The copy that this worker asks: workers spread over them."""
        own = self.deal[number]
        return own[(number + self._worker) % len(own)]

    def _by_part(self, table: int, rows: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """By number of a part: which of `rows` are in it, and their places there."""
        rows, cut = rows.to("cpu"), self._cut[table]
        found = {}
        for number in range(cut):
            order = torch.nonzero(rows % cut == number).view(-1) if cut > 1 else torch.arange(len(rows))
            if len(order):
                found[self._first[table] + number] = (order, rows[order] // cut)
        return found

    def _numbers(self, table: int) -> range:
        return range(self._first[table], self._first[table] + self._cut[table])

    def _name(self, number: int) -> Key:
        return self.parts[number].table, self.parts[number].number

    def _only_synchronous(self, what: str) -> None:
        if self.terms.mode != SYNCHRONOUS:
            raise UserError(
                f'{what} with servers.mode = "{self.terms.mode}": each worker knows its own; write "synchronous"'
            )

    @staticmethod
    def _read(rows: np.ndarray, dtype: torch.dtype) -> Tensor:
        found = torch.from_numpy(rows)
        return found.view(torch.bfloat16) if dtype == torch.bfloat16 else found
