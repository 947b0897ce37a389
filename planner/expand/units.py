"""Units of FSDP2 (`execution.fsdp2`): repeated blocks, and modules outside of them whose parameters are their own.

A unit is gathered, and its gradients reduced, at once. What is left of a stage (tied tensors, parameters of the model
itself) is its root unit: it stays gathered for a whole pass, and its gradients stand until the backward pass is over.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from autoparallel.costmodel.graph import ITEM_BYTES, Block, ModelGraph, Parameter
from autoparallel.costmodel.program import BlockWork, Collective, CollectiveOp
from autoparallel.planner.expand import state
from autoparallel.planner.expand.local import TENSOR_DTYPE
from autoparallel.planner.strategy.types import Strategy


def own_units(graph: ModelGraph) -> tuple[str, ...]:
    """Paths of the modules outside of the repeated blocks that are units."""
    glue = dict.fromkeys(link.block for link in graph.chain if not link.repeated)
    return tuple(module for block in glue for module in _own(graph.blocks[block]))


def _own(block: Block) -> list[str]:
    """Modules of which all parameters are read by their own code, and by none but theirs."""
    home = {f"param:{p.name}": p.name.rpartition(".")[0] for p in block.parameters}
    readers: dict[str, set[str]] = {}
    for operator in block.operators:
        for name in operator.inputs:
            if name in home:
                readers.setdefault(home[name], set()).add(operator.module)
    tied = {home[f"param:{p.name}"] for p in block.parameters if p.tied}
    modules = dict.fromkeys(home.values())
    return [m for m in modules if m and readers.get(m) == {m} and m not in tied]


def whole_gradients(reduce: Sequence[Collective]) -> int:
    """Bytes of what reduce-scatters take in."""
    return sum(c.size_bytes for c in reduce if c.op is CollectiveOp.REDUCE_SCATTER)


def as_unit(
    work: BlockWork, block: Block, reduce: Sequence[Collective], dropped: Collection[str], strategy: Strategy,
    *, repeated: bool, beside: int, twice: Collection[str] = (),
) -> BlockWork:  # fmt: skip
    """The memory of a block that is a unit, or of glue: all its gradients stand in the dtype of compute until they are
    copied into what is reduced, which is whole, and goes when the next unit is reduced.

    `costmodel.memory` adds what is reduced to the block's own backward, and to that of the next one: `beside` bytes here,
    which have gone when gradients are copied, as have parameters that were gathered. `twice`: tensors that another block of the
    stage uses, too, and whose gradients that has made before.
    """
    zero = state.zero_level(strategy)
    if not strategy.execution.fsdp2 or not zero:
        return work
    whole = whole_gradients(reduce)
    standing = work.backward_temp_bytes if work.standing_temp_bytes is None else work.standing_temp_bytes
    counted = 0 if repeated else _counted_bytes(work, block, dropped, twice, strategy)
    standing, left = max(standing - counted, 0), work.left_bytes - counted
    gathered = 0 if work.gather is None else work.gather.size_bytes
    if state.gradient_level(strategy) >= 2:
        standing = max(standing, left + whole - beside - gathered) - whole
    elif not beside:  # the first to be reduced, once a step, when all that was summed up still stands
        item = state.computed_bytes(strategy)
        own = work.parameters - (0 if repeated else _root_numbers(work, block, dropped))
        # What this micro-batch made has been added by then, and the unit's parameters have gone; each rank's share comes.
        share = 0 if state.keeps_share_of_gradients(strategy) else whole // state.shard_ranks(strategy)
        standing = max(standing, left + whole + share - (work.trainable + max(own, 0)) * item)
    root = 0 if repeated else _root_bytes(work, block, dropped, strategy)
    return replace(work, backward_temp_bytes=standing, buffer_bytes=work.buffer_bytes + root)


def as_cast_unit(work: BlockWork, strategy: Strategy) -> BlockWork:
    """The memory of a block whose parameters FSDP2 casts and does not shard: its gradients, whole in the dtype of compute, are
    copied into the dtype in which they are summed up before they are added to what is there."""
    if not strategy.execution.fsdp2 or not state.casts_parameters(strategy):
        return work
    copied = work.trainable * state.dtype_bytes(strategy.execution.grad_dtype)
    standing = work.backward_temp_bytes if work.standing_temp_bytes is None else work.standing_temp_bytes
    return replace(work, backward_temp_bytes=max(standing, work.left_bytes + copied))


def with_coming_and_going(
    work: BlockWork, block: Block, dropped: Collection[str], strategy: Strategy, *, repeated: bool
) -> BlockWork:
    """The memory of a block in a step of one micro-batch: gradients that its backward makes, and parameters that come with its
    forward and go with its backward, but for the root unit's, which stay all through the pass."""
    dense, experts = state.dense_shards(strategy), state.expert_shards(strategy)
    made = round(
        (work.trainable - work.expert_trainable) * state.made_per_gradient(strategy, dense)
        + work.expert_trainable * state.made_per_gradient(strategy, experts)
    )
    passing = (work.parameters - work.expert_parameters) * state.passing_per_parameter(strategy, dense)
    passing += work.expert_parameters * state.passing_per_parameter(strategy, experts)
    if passing and not repeated:
        passing -= _root_numbers(work, block, dropped) * state.passing_per_parameter(strategy, dense)
    temp = work.backward_temp_bytes
    if made and not state.zero_level(strategy) and work.standing_temp_bytes is not None:
        temp = max(temp, work.standing_temp_bytes)  # all that it makes, which stays
    return replace(work, made_bytes=made, passing_bytes=max(passing, 0), backward_temp_bytes=temp)


def _root_bytes(work: BlockWork, block: Block, dropped: Collection[str], strategy: Strategy) -> int:
    """Of parameters in the root unit: gathered (ZeRO-3), and their gradients, which wait for one another."""
    item = ITEM_BYTES[TENSOR_DTYPE[strategy.execution.dtype]]
    return _root_numbers(work, block, dropped) * item * (2 if state.zero_level(strategy) == 3 else 1)


def _counted_bytes(
    work: BlockWork, block: Block, dropped: Collection[str], twice: Collection[str], strategy: Strategy
) -> int:
    """Of the gradients that a block of glue makes what the root unit's are counted for all along: all but second ones."""
    numel = sum(p.numel for p in _rooted(block) if p.trainable and p.name not in twice)
    whole = sum(p.numel for p in block.parameters if p.name not in dropped)
    share = work.parameters / whole if whole else 1.0 / strategy.mesh.tp
    return int(numel * share) * ITEM_BYTES[TENSOR_DTYPE[strategy.execution.dtype]]


def _rooted(block: Block) -> list[Parameter]:
    """The parameters of a block of glue that are in no unit of their own."""
    own = set(_own(block))
    return [p for p in block.parameters if p.name.rpartition(".")[0] not in own]


def _root_numbers(work: BlockWork, block: Block, dropped: Collection[str]) -> int:
    """Of the parameters of a block of glue those in the root unit; tensor parallelism is taken to divide all alike."""
    numel = sum(p.numel for p in _rooted(block) if p.name not in dropped)
    whole = sum(p.numel for p in block.parameters if p.name not in dropped)
    return numel * work.parameters // whole if whole else 0
