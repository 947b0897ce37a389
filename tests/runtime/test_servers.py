"""Embedding tables in tiers: sharded rows and parameter servers train as one process does, and outlive a server."""

from __future__ import annotations

import copy
import multiprocessing
import os
import secrets
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autoparallel.planner.strategy.types import (
    Batch,
    EmbeddingAccess,
    EmbeddingRule,
    GradSync,
    Mesh,
    Servers,
    Shard,
    Strategy,
)
from autoparallel.runtime.servers.client import Servers as Client
from autoparallel.runtime.servers.client import ServersLost
from autoparallel.runtime.servers.dealing import Part, completed, deal, joined, without
from autoparallel.runtime.servers.held import VALUES, HeldRows
from autoparallel.runtime.servers.launch import start_server
from autoparallel.runtime.servers.rows_optimizer import RowsOptimizer
from autoparallel.runtime.servers.server import ASYNCHRONOUS, BOUNDED, MODES, Terms, serve
from autoparallel.runtime.servers.store import TableShape
from autoparallel.runtime.servers.tiered_rows import TieredRows
from autoparallel.runtime.servers.wire import Peer, ServerLost
from autoparallel.runtime.start import parallelize
from examples.dlrm import DLRM
from tests.runtime.harness import Processes
from tests.runtime.shared import no_program

ROWS, TABLES, DIM, SAMPLES = 150, 3, 4, 8


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=6, max_size=30),
    st.integers(2, 5),
    st.integers(1, 2),
)
def test_parts_are_dealt_evenly_and_survive_one_server(
    measures: list[tuple[int, int]], count: int, copies: int
) -> None:
    parts = [Part(table=0, number=n, rows=1, size_bytes=s, traffic=t) for n, (s, t) in enumerate(measures)]
    servers = tuple(range(count))
    first = deal(parts, servers, copies)
    assert all(len(set(own)) == len(own) == min(copies, count) for own in first)
    for measure in (0, 1):
        loads = [sum(measures[n][measure] for n, own in enumerate(first) if s in own) for s in servers]
        total = sum(one[measure] for one in measures)
        # Greedy over two measures: no server has more than the even share and what its last part brought.
        assert max(loads) <= 2 * copies * total / count + max(one[measure] for one in measures) * copies
    more = joined(parts, first, servers, count)
    moved = sum(before != after for before, after in zip(first, more, strict=True))
    assert all(len(set(own)) == len(own) for own in more)
    assert moved == sum(count in own for own in more), "parts move to the newcomer alone"
    if copies == 2:
        left = without(first, 0)
        assert all(0 not in own and own for own in left)
        again = completed(parts, left, servers[1:], copies)
        assert all(len(own) == min(2, count - 1) for own in again)
    else:
        with pytest.raises(ValueError, match="no copy left"):
            without(first, first[0][0])


@settings(max_examples=20)
@given(
    st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=20, unique=True), max_size=8),
    st.integers(0, 40),
)
def test_rows_in_memory_and_on_disk_are_what_was_written(steps: list[list[int]], memory: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        held = TieredRows(40, 3, memory_rows=memory, folder=Path(folder))
        plain = torch.zeros(40, 3)
        for number, rows in enumerate(steps):
            places = torch.tensor(rows)
            values = torch.full((len(rows), 3), float(number + 1)) + places.unsqueeze(1)
            held.write(places, values)
            plain[places] = values
            held.read(places, counted=True)
            held.settle()
            assert torch.equal(held.read(torch.arange(40)), plain)
        assert held.memory_rows == memory


def test_a_server_that_is_killed_leaves_nothing_on_the_disk_that_it_used(tmp_path: Path) -> None:
    key = secrets.token_bytes(16)
    process, address = start_server(key, str(tmp_path))
    try:
        peer = Peer(address, key, 30.0)
        peer.call("take", ("table", 0), 1000, 8, 10, 0)
        maps = Path(f"/proc/{process.pid}/maps")
        assert not maps.exists() or str(tmp_path) in maps.read_text(), "the rows are on that disk"
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_falls_silent_in_the_middle_of_a_message_is_lost() -> None:
    key = secrets.token_bytes(16)

    def half_an_answer(listener: Listener) -> None:
        connection = listener.accept()
        connection.recv()
        os.write(connection.fileno(), struct.pack("!i", 1000) + b"half")
        connection.poll(60.0)

    silent, half = socket.create_server(("127.0.0.1", 0)), Listener(("127.0.0.1", 0), authkey=key)
    threading.Thread(target=half_an_answer, args=(half,), daemon=True).start()
    for address, asked in ((silent.getsockname(), "no server at"), (half.address, "server")):
        with pytest.raises(ServerLost, match=f"{asked} 127.*: it has fallen silent"):
            Peer(address, key, 0.1).call("pull")
    _, port = serve(Path(tempfile.gettempdir()), key, "127.0.0.1")
    with socket.create_connection(("127.0.0.1", port)):  # who says nothing keeps nobody else waiting
        assert Peer(("127.0.0.1", port), key, 30.0).call("settle") == 0
    with pytest.raises(multiprocessing.AuthenticationError):
        Peer(("127.0.0.1", port), b"another", 30.0)
    for each in (silent, half):
        each.close()


class _Losing(dict[int, Any]):
    """What another thread finds to be gone after this one has found it to be there."""

    lose: Callable[[int], None]

    def __contains__(self, server: object) -> bool:
        there = super().__contains__(server)
        if there and server == 0:
            self.lose(0)
        return there


def test_a_server_that_one_thread_has_lost_is_lost_to_the_other_too() -> None:
    key, folder = secrets.token_bytes(16), Path(tempfile.gettempdir())
    addresses = [("127.0.0.1", serve(folder, key, "127.0.0.1")[1]) for _ in range(2)]
    table = TableShape(name="table", rows=64, dim=4)
    terms = Terms(mode=ASYNCHRONOUS, staleness=0, workers=1, timeout_s=30.0)
    for copies in (2, 1):
        servers = Client(
            [table], addresses, key, worker=0, terms=terms, copies=copies, warm=1.0, gather=lambda value: [value],
            device=torch.device("cpu"), param_dtype=torch.float32, grad_dtype=torch.float32, traffic=[1.0],
        )  # fmt: skip
        losing = servers._senders = _Losing(servers._senders)
        losing.lose = lambda server, of=servers: of._lost(server, ServerLost("gone"))  # type: ignore[misc]
        servers.forget()
        if copies == 2:
            servers.flush()
            assert servers.pull([(0, torch.arange(64))])[0].shape == (64, 4)
            assert servers.alive == (1,)
            servers.close()
        else:
            with pytest.raises(ServersLost, match="rows are gone"):
                servers.flush()
            with pytest.raises(ServersLost, match="rows are gone"):  # and not asked for, again and again
                servers.about(0)


def test_what_is_asked_for_most_comes_to_memory() -> None:
    with tempfile.TemporaryDirectory() as folder:
        held = TieredRows(100, 2, memory_rows=10, folder=Path(folder))
        wanted = torch.arange(90, 100)
        for _ in range(3):
            held.read(wanted, counted=True)
        assert held.settle() == 10
        assert held.settle() == 0


@pytest.mark.parametrize(
    ("sparse", "kind", "options"),
    [
        (torch.optim.SparseAdam, torch.optim.Adam, {"lr": 0.1}),
        (torch.optim.Adagrad, torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
        (torch.optim.SGD, torch.optim.SGD, {"lr": 0.1}),
    ],
)
def test_rows_move_as_torchs_sparse_optimizers_move_them(
    sparse: Any, kind: Any, options: dict[str, Any]
) -> None:
    table = torch.nn.Embedding(20, 3, sparse=True)
    held = HeldRows(20, 3)
    held.write(VALUES, torch.arange(20), table.weight.detach().clone())
    theirs, ours = sparse(table.parameters(), **options), RowsOptimizer(kind, options)
    for step in range(4):
        places = torch.tensor([step, step + 1, 7])
        gradients = torch.randn(3, 3, generator=torch.Generator().manual_seed(step))
        table.weight.grad = torch.sparse_coo_tensor(places.unsqueeze(0), gradients, (20, 3))
        theirs.step()
        held.give(0, places, gradients)
        held.update(ours, {key: theirs.defaults[key] for key in options})
    torch.testing.assert_close(held.read(VALUES, torch.arange(20)), table.weight.detach())


def _model() -> DLRM:
    torch.manual_seed(3)
    return DLRM(TABLES, ROWS, DIM, 5, bottom=(8,), top=(8,))


def _batch(step: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(100 + step)
    categories = (torch.rand(SAMPLES, TABLES, generator=drawn) ** 3 * ROWS).long()
    numbers = torch.randn(SAMPLES, 5, generator=drawn)
    clicked = ((categories.sum(1) + (numbers[:, 0] > 0)) % 2).float()
    return {"numbers": numbers, "categories": categories, "clicked": clicked}


def _strategy(tier: str, world: int, hot: int, zero: int = 0, **servers: Any) -> Strategy:
    return Strategy(
        batch=Batch(global_=SAMPLES, micro=SAMPLES // world // 2),
        mesh=Mesh(dp_shard=world) if zero else Mesh(dp_replicate=world), shard=Shard(zero=zero),
        grad_sync=GradSync(), embedding=(EmbeddingRule(module="embeddings.*", tier=tier, hot_rows=hot),),
        embedding_access=EmbeddingAccess(update="all"), servers=Servers(timeout_s=20.0, **servers),
    )  # fmt: skip


def _parallel(strategy: Strategy) -> Any:
    share = {key: value[: SAMPLES // strategy.mesh.data_parallel] for key, value in _batch(0).items()}
    return parallelize(_model(), share, strategy, blocks=[], program=no_program)


def _steps(
    model: Any,
    optimizer: Any,
    steps: range,
    *,
    clip: float | None = None,
    gradients: dict[str, Tensor] | None = None,
) -> list[float]:
    found = []
    for step in steps:
        share = SAMPLES // model.data_parallel_size
        first = model.data_parallel_rank * share
        mine = {key: value[first : first + share] for key, value in _batch(step).items()}
        optimizer.zero_grad()
        found.append(model.step(mine).item())
        if gradients is not None:
            gradients |= model.full_gradients()
        if clip is not None:
            model.clip_grad_norm_(clip)
        optimizer.step()
    return found


def _one_process(kind: Any, options: dict[str, Any], steps: int, clip: float | None = None) -> list[float]:
    model, found = _model(), []
    optimizer = kind(model.parameters(), **options)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**_batch(step))
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        found.append(loss.item())
    return found


ADAM: tuple[Any, dict[str, Any]] = (torch.optim.Adam, {"lr": 0.05, "eps": 1e-3})


def _kill_one(model: Any, rank: int) -> None:
    """The server that rank 0 started first dies."""
    started = model.tables.tables._closing.__self__
    if rank == 0:
        started.own[0].kill()
        started.own[0].wait()


def _train(rank: int, world_size: int) -> dict[str, Any]:
    """Losses by case, and what came of a checkpoint under another strategy."""
    kind, options = ADAM
    found: dict[str, Any] = {}
    cases = {
        "sharded": _strategy("sharded", world_size, 0),
        "sharded, hot, zero 3": _strategy("sharded", world_size, 20, zero=3),
        "served": _strategy("parameter-server", world_size, 16, per_node=2, memory=0.3),
    }
    for name, strategy in cases.items():
        model = _parallel(strategy)
        optimizer = model.optimizer(kind, **options)
        found[name] = _steps(model, optimizer, range(3), clip=0.05)
        found[f"{name}, gradients"] = {}
        found[name] += _steps(model, optimizer, range(3, 4), clip=0.05, gradients=found[f"{name}, gradients"])
        if name == "sharded":
            state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        model.tables.tables.close()
    model = _parallel(_strategy("parameter-server", world_size, 8, per_node=2, copies=2))
    optimizer = model.optimizer(kind, **options)
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    found["resumed"] = _steps(model, optimizer, range(4, 5), clip=0.05)
    _kill_one(model, rank)
    found["resumed"] += _steps(model, optimizer, range(5, 6), clip=0.05)
    started = model.tables.tables._closing.__self__
    address = [None]
    if rank == 0:
        process, address[0] = start_server(started.key)
        started.own.append(process)
    torch.distributed.broadcast_object_list(address, src=0)
    model.tables.tables.join(address[0])
    found["come"] = model.tables.settle(optimizer)
    found["alive"] = model.tables.tables.stores[0].alive
    found["resumed"] += _steps(model, optimizer, range(6, 8), clip=0.05)
    found["whole"] = model.full_state_dict()
    model.tables.tables.close()
    return found


@pytest.mark.distributed
def test_tables_in_tiers_train_as_one_process_through_death_and_arrival_of_servers(gloo: Processes) -> None:
    results = gloo.run(2, _train)
    expected = _one_process(*ADAM, 8, clip=0.05)
    for result in results:
        for name in ("sharded", "sharded, hot, zero 3", "served"):
            assert result[name] == pytest.approx(expected[:4], rel=1e-4), name
        assert result["resumed"] == pytest.approx(expected[4:], rel=1e-4)
        assert len(result["alive"]) == 2
        assert result["come"] >= 0
    assert results[0]["whole"].keys() == _model().state_dict().keys()
    assert results[0]["whole"]["embeddings.0.weight"].shape == (ROWS, DIM)
    for name in ("sharded, hot, zero 3", "served"):
        for key, gradient in results[0]["sharded, gradients"].items():
            torch.testing.assert_close(results[0][f"{name}, gradients"][key], gradient, rtol=1e-3, atol=1e-6)


def _train_apart(rank: int, world_size: int) -> dict[str, float]:
    """The mean loss of the last steps, by mode."""
    found = {}
    for mode in MODES:
        model = _parallel(
            _strategy("parameter-server", world_size, 8, mode=mode, staleness=2 if mode == BOUNDED else 1)
        )
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
        losses = _steps(model, optimizer, range(120))
        found[mode] = sum(losses[-60:]) / 60
        for store in model.tables.tables.stores:
            store.flush()
        model.tables.tables.close()
    return found


@pytest.mark.distributed
def test_workers_that_do_not_wait_reach_the_same_loss(gloo: Processes) -> None:
    found = gloo.run(2, _train_apart)[0]
    for mode, loss in found.items():
        assert loss == pytest.approx(found["synchronous"], rel=0.01), mode
