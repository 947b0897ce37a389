"""ZeRO-3 that fetches each parameter by itself and waits for it, as DeepSpeed does; until October 2021 piece by piece.

Every parameter but the small ones, which stay whole on every rank, is gathered alone before the pass that needs it
(forward, recomputation, backward), and its gradient is reduced and scattered alone after the backward pass. The
library synchronises the device around each, so that nothing hides them, and hands the collective one piece per rank:
a copy of each piece is a launch of its own, whose number grows with the ranks.

Source: DeepSpeed@c83e49f9e, runtime/zero/partition_parameters.py (`_allgather_param`: torch.cuda.synchronize, a list
of world_size partitions; `_reduce_scatter_gradient` likewise) and stage3.py (`_synchronize_communication`,
`param_persistence_threshold`). DeepSpeed@c0eeb69df (31 October 2021) gathers in one piece (`execution.joined_pieces`), and keeps what a
recomputation has fetched for the backward that follows (`stage3_max_reuse_distance`). What it fetches ahead, one parameter
where they are larger than `stage3_prefetch_bucket_size`, hid nothing: its steps on Azure (docs/_posts/2022-07-26-deepspeed-azure.md) are
those of its computation and of its collectives one after the other, from micro-batches of 1 to 32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.costmodel.kernels import PIECES
from autoparallel.costmodel.program import BlockWork, Collective, CollectiveOp, Kernel, Step
from autoparallel.planner.expand import state
from autoparallel.planner.strategy.types import Strategy

# Smaller parameters stay whole. Kind: formula. Source: DeepSpeed@c83e49f9e, stage3.py, param_persistence_threshold.
WHOLE_BELOW = 100_000
# Passes over a gathered tensor in memory: zeroed, and copied out piece by piece (read, written); a gradient is copied
# in. Kind: formula. Source: as above, `torch.zeros`; ProcessGroupNCCL flattens lists of tensors.
PASSES = {CollectiveOp.ALL_GATHER: 3, CollectiveOp.REDUCE_SCATTER: 2}


def fetches(strategy: Strategy) -> bool:
    """Whether the strategy's parameters are gathered one by one."""
    return strategy.execution.parameter_gathers and state.zero_level(strategy) == 3


def fetched_share(graph: ModelGraph, tp: int) -> float:
    """No smaller share of the parameters that a layer group, or an end of the model, has on a device is fetched by itself: the
    others are small. `tp`: the most ranks that a tensor may be divided among."""
    repeated = graph.repeated_positions
    first, last = (repeated[0], repeated[-1]) if repeated else (len(graph.chain), len(graph.chain))

    def counts(positions: Iterable[int]) -> tuple[int, int]:
        numels = [p.numel for at in positions for p in graph.blocks[graph.chain[at].block].parameters]
        large = [n // tp for n in numels if n // tp >= WHOLE_BELOW]
        return sum(large), sum(n for n in numels if n // tp < WHOLE_BELOW)

    between = counts(at for at in range(first, last + 1) if not graph.chain[at].repeated)[1]
    parts = [counts([at]) for at in {graph.chain[at].block: at for at in repeated}.values()]
    ends = [counts(range(first)), counts(range(last + 1, len(graph.chain)))]
    every = [(large, small + between) for large, small in parts] + [one for one in ends if any(one)]
    return min((large / (large + small) for large, small in every), default=0.0)


def with_fetches(work: BlockWork, numels: Iterable[int], strategy: Strategy) -> BlockWork:
    """A block's work with its parameters (`numels`: numbers in each on this device) fetched one by one, in line.

    On top of the block live a parameter, beside pieces the buffer that it was gathered in, and backwards the block's whole
    gradients, which are scattered when a bucket of them is full.
    """
    large = [n for n in numels if n >= WHOLE_BELOW]
    if not large:
        return work
    item = state.computed_bytes(strategy)
    gradient = state.dtype_bytes(strategy.execution.grad_dtype)
    fetched = _steps(CollectiveOp.ALL_GATHER, [n * item for n in large], strategy, backward=False)
    scattered = _steps(CollectiveOp.REDUCE_SCATTER, [n * gradient for n in large], strategy, backward=True)
    again = tuple(replace(s, backward=True) if isinstance(s, Kernel) else s for s in fetched)
    joined = strategy.execution.joined_pieces
    if joined and work.recompute:
        again = ()
    live = (1 if joined else 2) * max(large) * item
    return replace(
        work,
        forward=(*fetched, *work.forward),
        recompute=(*fetched, *work.recompute) if work.recompute else (),
        backward_input=(*again, *work.backward_input),
        backward_weight=(*work.backward_weight, *scattered),
        forward_temp_bytes=work.forward_temp_bytes + live,
        backward_temp_bytes=work.backward_temp_bytes + live + sum(large) * gradient,
        standing_temp_bytes=None,  # nothing waits for the end
    )


def _steps(op: CollectiveOp, sizes: Iterable[int], strategy: Strategy, *, backward: bool) -> tuple[Step, ...]:
    axes, ranks = state.shard_axes(strategy), state.shard_ranks(strategy)
    found: list[Step] = []
    for size in sizes:
        found.append(Collective(op=op, axes=axes, size_bytes=size, label="dp"))
        if strategy.execution.joined_pieces:
            continue
        found.append(
            Kernel(
                kind=PIECES, dtype="fp32", flops=0, bytes_moved=-(-PASSES[op] * size // ranks),
                backward=backward, count=ranks,
            )
        )  # fmt: skip
    return tuple(found)
