"""What replicas that train by themselves pay for their exchanges, as the mean of a step.

Once in `outer.every` steps each device exchanges how far its share of the parameters has come since the last time, the mean over
the replicas, and an outer SGD with Nesterov momentum moves what all of them begin again with. With F fragments an F-th part of
that at a time, at different steps. Nothing hides an exchange.

    seconds of a step = (F * (all-reduce of 4 P / F bytes in `bits` + update of P / F numbers)) / every
    bytes on a device = 8 P (what replicas begin with, and momentum, in float32) + 8 P / F (what is exchanged)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoparallel.costmodel.prediction import Prediction, StageMemory
from autoparallel.costmodel.price import Pricer
from autoparallel.costmodel.program import Collective, CollectiveOp, Kernel, Program
from autoparallel.planner.expand import state
from autoparallel.planner.expand.axes import mesh_axes
from autoparallel.planner.strategy.islands import AXIS
from autoparallel.planner.strategy.types import Outer, Strategy
from autoparallel.profiles.hardware import Cluster

METHODS = {32: "none", 16: "bf16", 8: "int8", 4: "int4"}  # by outer.bits
ITEM = 4  # bytes of a number that is exchanged, before it is encoded
# Read and written for a number: parameter and beginning read, difference written; difference, momentum and beginning read,
# the latter two written; parameter written. Kind: formula.
UPDATE_BYTES, UPDATE_FLOPS = 9 * ITEM, 8
KEPT_BYTES = 2 * ITEM  # of a number, all the time


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Of a mean step: seconds of the exchange and of the outer update; numbers that each pipeline rank holds."""

    exchange_s: float
    update_s: float
    held: tuple[int, ...]


def exchange_of(outer: Outer, size_bytes: int, levels: int) -> Collective:
    """One fragment's."""
    return Collective(
        op=CollectiveOp.ALL_REDUCE, axes=(AXIS,), size_bytes=size_bytes, label="dp", item_bytes=ITEM,
        compression=(METHODS[outer.bits],) * levels,
    )  # fmt: skip


def seconds_of(outer: Outer, numbers: int, strategy: Strategy, cluster: Cluster) -> tuple[float, float]:
    """Of a mean step where a device holds so many numbers: exchange, update."""
    part = -(-numbers // outer.fragments)
    pricer = Pricer(cluster)
    one = pricer.collective_s(exchange_of(outer, part * ITEM, len(cluster.levels)), mesh_axes(strategy))
    kernel = Kernel(
        kind="optimizer", dtype="fp32", flops=part * UPDATE_FLOPS, bytes_moved=part * UPDATE_BYTES
    )
    update = pricer.kernel_s(kernel, cluster.device, strategy.execution.kernels)
    share = outer.fragments / outer.every
    return one * share, update * share


def exchange(strategy: Strategy, cluster: Cluster, island: Program) -> Exchange:
    """What the strategy pays, whose replicas each run the program `island`."""
    homes = {action.stage: rank for rank, row in enumerate(island.ranks) for action in row}
    held = [0] * len(island.ranks)
    dense, experts = state.dense_shards(strategy), state.expert_shards(strategy)
    for index, stage in enumerate(island.stages):
        for work, count in stage.blocks:
            whole = (work.trainable - work.expert_trainable, dense), (work.expert_trainable, experts)
            held[homes[index]] += count * sum(state.share(n, s.ranks if s.zero else 1) for n, s in whole)
    seconds = [seconds_of(strategy.outer, numbers, strategy, cluster) for numbers in held]
    slowest = max(seconds, key=sum)
    return Exchange(exchange_s=slowest[0], update_s=slowest[1], held=tuple(held))


def with_exchange(prediction: Prediction, found: Exchange, strategy: Strategy) -> Prediction:
    """The prediction of all replicas, from that of one."""
    replicas = strategy.mesh.dp_replicate
    parts = dict(prediction.breakdown_s)
    parts["dp_comm"] += found.exchange_s
    parts["optimizer"] += found.update_s
    return replace(
        prediction, step_time_s=prediction.step_time_s + found.exchange_s + found.update_s, breakdown_s=tuple(parts.items()),
        memory=tuple(_with_state(m, n, strategy.outer) for m, n in zip(prediction.memory, found.held, strict=True)),
        model_flops=prediction.model_flops * replicas, hardware_flops=prediction.hardware_flops * replicas,
        tokens=prediction.tokens * replicas, devices=prediction.devices * replicas,
    )  # fmt: skip


def _with_state(memory: StageMemory, numbers: int, outer: Outer) -> StageMemory:
    kept, sent = numbers * KEPT_BYTES, 2 * ITEM * -(-numbers // outer.fragments)
    return replace(
        memory,
        optimizer=memory.optimizer + kept,
        buffers=memory.buffers + sent,
        peak=memory.peak + kept + sent,
    )
