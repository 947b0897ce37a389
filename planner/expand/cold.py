"""What the cold rows of embedding tables cost: looked up elsewhere, and updated there. All of it synchronous.

Before the first such table of a stage every rank asks for the rows that its micro-batch needs, each once, and keeps
them until it has given back their gradients, after the backward of that table. One exchange serves all tables of a
stage and tier, as TorchRec batches them (KeyedJaggedTensor). No rank prefetches the rows of its next micro-batch, so
nothing hides an exchange, and a step computes what one process computes.

    sharded           numbers of rows, rows and gradients by all-to-all among the data-parallel ranks, which own a
                      row each in turn; a rank updates its own rows
    parameter-server  rows and gradients by all-to-all between nodes, where there are several, and through the memory
                      of the hosts and their links to the devices; the hosts update. Gradients go to every copy of a row;
                      rows that are not in the servers' memory come from disk, and go back there, with their state

Servers that are not synchronous are priced the same, but that nobody waits for an update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from math import ceil

from autoparallel.costmodel.access import AccessLaw, distinct_rows
from autoparallel.costmodel.graph import OpKind
from autoparallel.costmodel.kernels import FROM_DISK, HOST_UPDATE, SERVED
from autoparallel.costmodel.program import BlockWork, Collective, CollectiveOp, Kernel, StageWork, Step
from autoparallel.planner.expand import state
from autoparallel.planner.expand.tables import TablePlace
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles.hardware import Cluster

COLD_ROWS = "cold rows"  # the name of an exchange among the links of a stage
INDEX_BYTES = 8  # a row's number on the wire: int64
GATHER_PASSES = 2  # a row is read, and written where it is sent from. Kind: formula
SUM_PASSES = 3  # a gradient is read, and the sum that it is added to read and written. Kind: formula


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdState:
    """What one device holds of cold rows, and how it updates them once a step."""

    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    updates: tuple[Kernel, ...] = ()


def nodes_of(strategy: Strategy, cluster: Cluster) -> int:
    """Nodes whose devices compute."""
    return -(-strategy.mesh.devices // cluster.groups[0].devices_per_node)


def serving_nodes(strategy: Strategy, cluster: Cluster) -> int:
    """Nodes whose hosts serve."""
    return len(strategy.servers.nodes) or nodes_of(strategy, cluster)


def touched_only(strategy: Strategy) -> bool:
    """Whether a step updates the rows alone that it looked up. Plain SGD leaves the others as they are; an optimizer
    with state moves them too, but in its sparse form."""
    update = strategy.embedding_access.update
    return update == "touched" or (update == "auto" and strategy.execution.optimizer == "sgd")


def rows_per_micro_batch(place: TablePlace, strategy: Strategy) -> int:
    """Distinct cold rows that one rank's micro-batch looks up, as expected."""
    return _expected_rows(
        place.law, place.table.rows, place.hot, place.table.lookups.at(strategy.batch.micro)
    )


def rows_per_step(place: TablePlace, strategy: Strategy) -> int:
    """Distinct cold rows that all ranks' samples of a step look up."""
    return _expected_rows(
        place.law, place.table.rows, place.hot, place.table.lookups.at(strategy.batch.global_)
    )


@lru_cache(maxsize=65_536)
def _expected_rows(law: AccessLaw, rows: int, hot: int, draws: int) -> int:
    return ceil(distinct_rows(law, rows, hot, draws))


def exchange(placed: Sequence[TablePlace], strategy: Strategy, cluster: Cluster) -> BlockWork:
    """The link that fetches the cold rows of a stage's tables, and in the backward sends their gradients."""
    forward, backward, numbers = list[Step](), list[Step](), 0
    for tier in ("sharded", "parameter-server"):
        own = [(rows_per_micro_batch(p, strategy), p.table.dim) for p in placed if p.tier == tier]
        inside = sum(rows * dim for rows, dim in own)
        there, back = exchange_steps(tier, sum(rows for rows, _ in own), inside, strategy, cluster)
        forward, backward, numbers = [*forward, *there], [*backward, *back], numbers + inside
    if read := _from_disk([p for p in placed if p.tier == "parameter-server"], strategy):
        held = state.dtype_bytes(strategy.execution.param_dtype)
        moved = held + state.optimizer_bytes_per_parameter(strategy.execution)
        forward.append(_disk(read * held, strategy, cluster))
        backward.append(_disk(round(2 * read * moved) * strategy.servers.copies, strategy, cluster))
    return BlockWork(
        name=COLD_ROWS, forward=tuple(forward), backward_input=(), backward_weight=tuple(backward),
        saved_bytes=numbers * state.dtype_bytes(strategy.execution.param_dtype),
        backward_temp_bytes=numbers * state.dtype_bytes(strategy.execution.grad_dtype),
    )  # fmt: skip


def exchange_steps(
    tier: str, rows: int, numbers: int, strategy: Strategy, cluster: Cluster
) -> tuple[Sequence[Step], Sequence[Step]]:
    """There and back of `rows` rows with so many `numbers`, for one rank and micro-batch."""
    if not numbers:
        return (), ()
    fetched = numbers * state.dtype_bytes(strategy.execution.param_dtype)
    returned = numbers * state.dtype_bytes(strategy.execution.grad_dtype)
    summed = _embedding(returned, backward=True)  # of the samples that looked up the same row
    if tier == "sharded":
        gathered = _embedding(GATHER_PASSES * fetched, backward=False)
        added = _embedding(SUM_PASSES * returned, backward=True)
        asked = _all_to_all(rows * INDEX_BYTES, strategy)
        return (
            (asked, gathered, _all_to_all(fetched, strategy)),
            (summed, _all_to_all(returned, strategy), added),
        )
    there, copies = _by_servers(fetched, rows, strategy, cluster, backward=False), strategy.servers.copies
    return there, (summed, *_by_servers(copies * returned, copies * rows, strategy, cluster, backward=True))


def _from_disk(served: Sequence[TablePlace], strategy: Strategy) -> int:
    """Numbers of the rows that one rank's micro-batch asks for and servers do not have in memory, the most wanted of which
    they have."""
    share = strategy.servers.memory
    if share >= 1.0:
        return 0
    return sum(
        _expected_rows(
            p.law, p.table.rows, p.hot + round(p.cold * share), p.table.lookups.at(strategy.batch.micro)
        ) * p.table.dim
        for p in served
    )  # fmt: skip


def _disk(moved: int, strategy: Strategy, cluster: Cluster) -> Kernel:
    return Kernel(
        kind=FROM_DISK, dtype="", flops=0, bytes_moved=moved, backward=False, sharers=sharers(strategy, cluster)
    )  # fmt: skip


def _embedding(bytes_moved: int, *, backward: bool) -> Kernel:
    return Kernel(kind=OpKind.EMBEDDING, dtype="fp32", flops=0, bytes_moved=bytes_moved, backward=backward)


def _by_servers(
    moved: int, rows: int, strategy: Strategy, cluster: Cluster, *, backward: bool
) -> tuple[Step, ...]:
    served = Kernel(
        kind=SERVED, dtype="", flops=0, bytes_moved=moved, backward=backward,
        sharers=sharers(strategy, cluster),
    )  # fmt: skip
    if nodes_of(strategy, cluster) == 1:
        return (served,)
    return (_all_to_all(moved + rows * INDEX_BYTES, strategy), served)


def sharers(strategy: Strategy, cluster: Cluster) -> int:
    """Devices of a node that use its host's memory at the same time."""
    return min(cluster.groups[0].devices_per_node, strategy.mesh.devices)


def ranks_of(strategy: Strategy) -> int:
    """Ranks that a stage's sharded rows are dealt to."""
    return strategy.mesh.data_parallel


def _all_to_all(size_bytes: int, strategy: Strategy) -> Collective:
    axes = tuple(a for a in ("dp_replicate", "dp_shard") if getattr(strategy.mesh, a) > 1)
    return Collective(op=CollectiveOp.ALL_TO_ALL, axes=axes, size_bytes=size_bytes, label="dp")


def cold_state(placed: Sequence[TablePlace], strategy: Strategy, cluster: Cluster) -> ColdState:
    """What a device of the stage holds of its sharded rows, and the updates that it waits for."""
    execution, ranks = strategy.execution, ranks_of(strategy)
    held = graded = 0
    for place in placed:
        if place.tier == "sharded":
            held += state.share(place.cold, ranks) * place.table.dim
            rows = rows_per_step(place, strategy) if touched_only(strategy) else place.cold
            graded += state.share(rows, ranks) * place.table.dim
    zeroed = () if touched_only(strategy) or not graded else (_zeroed(graded, strategy),)
    on_device = 1.0 - strategy.offload.optimizer
    return ColdState(
        parameter_bytes=held * state.dtype_bytes(execution.param_dtype),
        gradient_bytes=graded * state.dtype_bytes(execution.grad_dtype),
        optimizer_bytes=round(held * state.optimizer_bytes_per_parameter(execution) * on_device),
        updates=(*zeroed, *state.update_kernels(graded, strategy), *_host_update(placed, strategy, cluster)),
    )


def _zeroed(numbers: int, strategy: Strategy) -> Kernel:
    """Dense gradients begin at zero."""
    moved = numbers * state.dtype_bytes(strategy.execution.grad_dtype)
    return Kernel(kind=OpKind.COPY, dtype="fp32", flops=0, bytes_moved=moved, backward=True)


def _host_update(placed: Sequence[TablePlace], strategy: Strategy, cluster: Cluster) -> tuple[Kernel, ...]:
    """The hosts add up what was sent to them in a step, and update: one device's share of it."""
    served = [p for p in placed if p.tier == "parameter-server"]
    if not served or strategy.servers.mode != "synchronous":
        return ()
    execution = strategy.execution
    all_rows = not touched_only(strategy)
    updated = sum((p.cold if all_rows else rows_per_step(p, strategy)) * p.table.dim for p in served)
    sent = sum(rows_per_micro_batch(p, strategy) * p.table.dim for p in served)
    sent *= strategy.micro_batches * ranks_of(strategy)
    moved = updated * state.bytes_per_update(execution)
    moved += sent * (SUM_PASSES - 1) * state.dtype_bytes(execution.grad_dtype)
    devices = serving_nodes(strategy, cluster) * sharers(strategy, cluster)
    share = state.share(moved * strategy.servers.copies, devices)
    return (
        Kernel(kind=HOST_UPDATE, dtype="", flops=0, bytes_moved=share, sharers=sharers(strategy, cluster)),
    )


def with_cold_rows(
    stage: StageWork, placed: Sequence[TablePlace], positions: range, strategy: Strategy, cluster: Cluster
) -> StageWork:
    """A stage whose tables at `placed` have hot rows alone, with the exchange before the first of them, and what the
    devices hold and do for the rest."""
    links = stage.links
    first = min(place.table.position for place in placed) - positions.start
    links.insert(first, exchange(placed, strategy, cluster))
    cold = cold_state(placed, strategy, cluster)
    return replace(
        stage,
        blocks=tuple((block, len(list(run))) for block, run in groupby(links)),
        optimizer=(*stage.optimizer, *cold.updates),
        parameter_bytes=stage.parameter_bytes + cold.parameter_bytes,
        gradient_bytes=stage.gradient_bytes + cold.gradient_bytes,
        optimizer_bytes=stage.optimizer_bytes + cold.optimizer_bytes,
    )


def host_bytes(placed: Sequence[TablePlace], strategy: Strategy, cluster: Cluster) -> int:
    """Bytes in the memory of each host: its share of the rows, their optimizer state, and the gradients of a step."""
    execution, total, servers = strategy.execution, 0, strategy.servers
    each = state.dtype_bytes(execution.param_dtype) + state.optimizer_bytes_per_parameter(execution)
    for place in placed:
        if place.tier == "parameter-server":
            gradients = rows_per_step(place, strategy) * state.dtype_bytes(execution.grad_dtype)
            total += (round(place.cold * servers.memory) * each + gradients) * place.table.dim
    return state.share(total * servers.copies, serving_nodes(strategy, cluster))
