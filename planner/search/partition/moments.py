"""Rows of memory: what the devices of a rank hold, and what those of a node keep on its host, at their fullest moments."""

from __future__ import annotations

from collections.abc import Sequence

from autoparallel.costmodel.graph import ITEM_BYTES
from autoparallel.costmodel.host_memory import host_capacity_bytes, ranks_on_hosts
from autoparallel.costmodel.memory import LiveState
from autoparallel.costmodel.program import ActionKind
from autoparallel.planner.expand import state
from autoparallel.planner.expand.expander import mesh_axes
from autoparallel.planner.expand.local import TENSOR_DTYPE
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.partition.forms import Value
from autoparallel.planner.search.partition.problem import Q, Row, merged
from autoparallel.planner.strategy.types import Strategy


def state_rate(strategy: Strategy) -> Value:
    """Bytes that live through the whole step for a block: `planner.state.state_bytes`, not rounded up. Of a step with one
    micro-batch those are left out that come and go: parameters are in `saved`, gradients that are made in no row."""
    execution = strategy.execution
    cast = ITEM_BYTES[TENSOR_DTYPE[execution.dtype]] if state.casts_parameters(strategy) else 0
    kept = 1.0 - strategy.offload.optimizer

    def rates(shards: state.Shards) -> tuple[float, float]:
        stepped = state.optimizer_bytes_per_parameter(execution) * kept / (shards.ranks if shards.zero else 1)
        gradient = state.bytes_per_gradient(strategy, shards) - state.made_per_gradient(strategy, shards)
        passing = state.passing_per_parameter(strategy, shards)
        return state.bytes_per_parameter(strategy, shards) + cast - passing, gradient + stepped

    dense, expert = rates(state.dense_shards(strategy)), rates(state.expert_shards(strategy))
    return lambda price: (
        price.dense * dense[0] + price.dense_trainable * dense[1]
        + price.experts * expert[0] + price.expert_trainable * expert[1] + price.buffer_bytes
    )  # fmt: skip


def host_state_rate(strategy: Strategy) -> Value:
    """Bytes of optimizer state that a block has on the host: `planner.state.offloaded_state_bytes`, not rounded up."""
    each = state.optimizer_bytes_per_parameter(strategy.execution) * strategy.offload.optimizer
    shards = (state.dense_shards(strategy), state.expert_shards(strategy))
    dense, expert = (each / (s.ranks if s.zero >= 1 else 1) for s in shards)
    return lambda price: price.dense_trainable * dense + price.expert_trainable * expert


def host_rows(problem: Problem, strategy: Strategy, states: Sequence[Sequence[LiveState]]) -> tuple[Row, ...]:
    """For each set of devices that share a host, what they have in its memory when each holds most micro-batches."""
    room = host_capacity_bytes(problem.cluster)
    if not room or not (strategy.offload.optimizer or strategy.offload.activations):
        return ()
    own = [_on_host(moments) for moments in states]
    shares = ranks_on_hosts(mesh_axes(strategy), problem.cluster)
    return tuple(
        Row(
            terms=merged([(q, chunk, n * count) for rank, count in share for q, chunk, n in own[rank]]),
            capacity_bytes=int(room),
        )
        for share in shares
    )


def _on_host(moments: Sequence[LiveState]) -> list[tuple[int, int, int]]:
    """Terms of what one device of a rank has on its host when it holds most micro-batches, its own included."""
    chunks = sorted({stage for moment in moments for stage, _, _ in moment.held})
    fullest = max(moments, key=lambda moment: sum(full for _, full, _ in moment.held))
    terms = [(int(Q.HOST_STATE), stage, 1) for stage in chunks]
    terms += [(int(Q.HOST_SAVED), stage, full) for stage, full, _ in fullest.held if full]
    own = [(int(Q.HOST_SAVED), fullest.stage, 1)] if fullest.kind is not ActionKind.BACKWARD_WEIGHT else []
    return terms + own


def memory_rows(states: Sequence[Sequence[LiveState]]) -> tuple[Row, ...]:
    """One row per moment of each rank that can be its peak."""
    rows = []
    for own in states:
        chunks = sorted({stage for moment in own for stage, _, _ in moment.held})
        for moment in own:
            terms = [(int(Q.STATE), stage, 1) for stage in chunks]
            terms += [(int(Q.SAVED), stage, full) for stage, full, _ in moment.held if full]
            terms += [(int(Q.WEIGHT_SAVED), stage, weight) for stage, _, weight in moment.held if weight]
            peak = {ActionKind.FORWARD: Q.FORWARD_PEAK, ActionKind.BACKWARD_WEIGHT: Q.WEIGHT_PEAK}.get(
                moment.kind, Q.BACKWARD_PEAK
            )
            rows.append(Row(terms=(*terms, (int(peak), moment.stage, 1))))
    return tuple(rows)
