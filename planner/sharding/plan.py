"""`TensorPlan`: how the operators of each distinct block run over the tensor-parallel axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from autoparallel.costmodel.graph import Block, Sharding
from autoparallel.costmodel.program import CollectiveOp
from autoparallel.planner.strategy.types import TensorRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshard:
    """A layout change of one value at a module's boundary: what a layout hook does, forward and backward.

    `position` is the operator before whose forward it runs (and after whose backward its conjugate runs).
    `partial_gradient` says that the gradient arrives as a partial sum from the inside.
    """

    value: str
    module: str  # "" the block itself
    side: str  # "input" or "output"
    before: str
    after: str
    partial_gradient: bool
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Rows of a value go to the ranks of `ep` that hold their experts, or come back: an all-to-all before the
    operator at `position`, and one of their gradients after its backward. `counts`: the ranks first tell each
    other how many rows they send. `copies`: how often each token is among the rows, once for each of its experts."""

    value: str
    position: int
    experts: int
    counts: bool = False
    copies: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """One sharding per operator of a block (None: replicated, no rule), and what follows from the choice.

    `layouts` lists every value in every module that it passes. `inputs` and `outputs` are the layouts at the block's
    own boundary (empty: replicated). `partial_params` are replicated parameters whose gradient is a partial sum:
    all-reduced once per step. Placements are "R", "P", "S0", "S1" … over tp, and "E0" over ep.
    """

    shardings: tuple[Sharding | None, ...]
    params: tuple[tuple[str, str], ...] = ()  # placement of each parameter
    reshards: tuple[Reshard, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    partial_params: tuple[str, ...] = ()
    layouts: tuple[tuple[str, str, str], ...] = ()  # (value, module, layout of the value inside the module)

    @property
    def has_experts(self) -> bool:
        """Whether anything depends on how many ranks share the experts."""
        return bool(self.exchanges) or any(placement.startswith("E") for _, placement in self.params)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCost:
    """What the solver prices: one step of one micro-batch of one sample."""

    time_ns: int = 0
    held_kib: int = 0  # parameters, gradients and optimizer state
    kept_kib: int = 0  # for the backward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """A plan per distinct block, by index into `ModelGraph.blocks`, with its cost where it was solved, and the
    `[[tensor]]` entries that say it."""

    blocks: tuple[BlockPlan, ...]
    rules: tuple[TensorRule, ...] = ()
    costs: tuple[PlanCost, ...] = field(default=(), compare=False)


def replicated_plan(block: Block) -> BlockPlan:
    """The plan of one rank: nothing sharded, nothing communicated."""
    return BlockPlan(
        shardings=(None,) * len(block.operators), params=tuple((p.name, "R") for p in block.parameters)
    )


_FORWARD = {
    ("S", "R"): CollectiveOp.ALL_GATHER,
    ("P", "R"): CollectiveOp.ALL_REDUCE,
    ("P", "S"): CollectiveOp.REDUCE_SCATTER,
    ("S", "S"): CollectiveOp.ALL_TO_ALL,
}


def conjugates(before: str, after: str, partial_gradient: bool) -> Iterator[tuple[bool, CollectiveOp]]:
    """(backward?, collective) of a layout change: Megatron's conjugate pairs, which DTensor does too.

    S->R gathers forward; its backward scatters the reduced gradient when that is partial, else slices. P->R
    reduces forward, P->S reduces and scatters, gathering the gradient. R->S slices, gathering the gradient. A
    replicated value whose gradient is partial has it all-reduced.
    """
    kinds = (before[:1], after[:1])
    if before != after and kinds in _FORWARD:
        yield False, _FORWARD[kinds]
    # The gradient arrives like `after` (or partial) and must leave like `before` (whole, where that is partial).
    arrives = "P" if partial_gradient else ("R" if after == "P" else after)
    leaves = "R" if before == "P" else before
    if arrives != leaves and (arrives[:1], leaves[:1]) in _FORWARD:
        yield True, _FORWARD[arrives[:1], leaves[:1]]
