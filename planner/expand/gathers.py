"""What ZeRO gathers: parameters before every pass (level 3), updated ones when a step ends (1 and 2)."""

from __future__ import annotations

from autoparallel.costmodel.program import Collective, CollectiveOp
from autoparallel.planner.expand import state
from autoparallel.planner.strategy.types import Strategy


def _gather(parameters: int, item_bytes: int, shards: state.Shards, method: str = "none") -> Collective:
    """`method` on every level of the network: what is gathered is encoded once."""
    return Collective(
        op=CollectiveOp.ALL_GATHER, axes=shards.axes, size_bytes=parameters * item_bytes, label="dp",
        compression=() if method == "none" else (method,) * state.MOST_LEVELS, item_bytes=item_bytes,
    )  # fmt: skip


def gathers_of(
    parameters: int, experts: int, strategy: Strategy
) -> tuple[Collective | None, Collective | None]:
    """ZeRO-3: so many parameters on this rank, in the dtype they are computed with; the `experts` among them apart."""

    def gather(own: int, shards: state.Shards) -> Collective | None:
        if shards.zero < 3 or not own:
            return None
        return _gather(own, state.computed_bytes(strategy), shards, strategy.grad_sync.weights)

    return (
        gather(parameters - experts, state.dense_shards(strategy)),
        gather(experts, state.expert_shards(strategy)) if experts else None,
    )


def regather_of(parameters: int, experts: int, strategy: Strategy) -> Collective | None:
    """What a backward pass gathers of parameters that are no experts' in the place of what `gathers_of` says; None where it is
    the same. It has been decoded: encoded anew it would be rounded once more."""
    shards, own = state.dense_shards(strategy), parameters - experts
    if shards.zero < 3 or not own or not shards.secondary:
        return None
    return _gather(own, state.computed_bytes(strategy), shards.in_backward)


def gathers_late(strategy: Strategy) -> bool:
    """Whether updated parameters of ZeRO-1 and 2 are gathered when the next step begins, in the order in which it needs them."""
    return strategy.execution.late_gathers or strategy.execution.fsdp2


def updated_gather(parameters: int, strategy: Strategy, experts: int = 0) -> tuple[Collective, ...]:
    """ZeRO-1/2: updated parameters return to every rank of the sharding group."""
    execution = strategy.execution
    item = state.computed_bytes(strategy) if execution.fsdp2 else state.dtype_bytes(execution.param_dtype)
    kinds = ((parameters - experts, state.dense_shards(strategy)), (experts, state.expert_shards(strategy)))
    return tuple(_gather(count, item, shards) for count, shards in kinds if count and shards.zero in (1, 2))
