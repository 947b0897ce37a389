"""What FSDP2's reductions hold when a step ends whose backwards are split: gradients that were summed up whole (ZeRO-1) are reduced then,
one unit after the other, the stage's root unit first (`runtime/fsdp_private.py`, `reduce_accumulated`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoparallel.costmodel.program import StageWork, UnderWay
from autoparallel.planner.expand import state
from autoparallel.planner.expand.chain import Ties
from autoparallel.planner.expand.glue import GlueUnit
from autoparallel.planner.expand.places import unit_experts
from autoparallel.planner.expand.schedules import SPLIT_BACKWARD
from autoparallel.planner.expand.units import joined, units_of
from autoparallel.planner.expand.works import LocalWorks
from autoparallel.planner.strategy.types import Strategy


def reduces_at_end(strategy: Strategy) -> bool:
    """Whether whole gradients are reduced when all backwards of a step are over, and not beside the last."""
    split = strategy.pipeline.schedule in SPLIT_BACKWARD
    return strategy.execution.fsdp2 and split and 0 < state.gradient_level(strategy) < 2


def with_deferred(
    works: LocalWorks, strategy: Strategy, stages: Sequence[StageWork], ranges: Sequence[range], ties: Ties
) -> list[StageWork]:
    """The stages with what the end of their step holds."""
    if not reduces_at_end(strategy):
        return list(stages)
    found = []
    for stage, positions in zip(stages, ranges, strict=True):
        ending = most_while_reduced(_in_order(works, strategy, stage, positions, ties), strategy)
        nothing = (0,) * len(positions)
        own = stage.under_way or UnderWay(beside=nothing, after=nothing, gone=nothing, left=0, ending=0)
        more = replace(own, ending=ending) if ending > own.ending else stage.under_way
        found.append(replace(stage, under_way=more))
    return found


def most_while_reduced(units: Sequence[GlueUnit], strategy: Strategy) -> int:
    """The most bytes beside all whole parameters and summed gradients while `units` are reduced, one after the other.

    A unit's parameters go first. What is reduced comes, then its gradients go but for the last one, and then come their shares.
    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, post_backward.
    """
    execution, item = strategy.execution, state.computed_bytes(strategy)
    summed, parameter = state.dtype_bytes(execution.grad_dtype), state.dtype_bytes(execution.param_dtype)
    most, gone = 0, 0
    for unit in units:
        gone += unit.whole
        most = max(most, max(unit.reduced, unit.share + unit.last * summed // item) - gone)
        left = unit.share if parameter == summed else unit.share * parameter // (summed + parameter)
        gone += unit.reduced - left
    return most


def _in_order(
    works: LocalWorks, strategy: Strategy, stage: StageWork, positions: Sequence[int], ties: Ties
) -> list[GlueUnit]:
    """The units of a stage that are reduced: the root unit, modules beside the blocks (`runtime/stages/cut.py`), blocks."""
    root, glue, blocks = list[GlueUnit](), list[GlueUnit](), list[GlueUnit]()
    for work, position in zip(stage.links, positions, strict=True):
        link = works.graph.chain[position]
        dropped, experts = ties.dropped.get(position, frozenset()), unit_experts(works, strategy, link.block)
        block = works.graph.blocks[link.block]
        *units, own = units_of(work, block, dropped, strategy, experts, repeated=link.repeated)
        if link.repeated:
            blocks += [own, *units]
        else:
            glue += units
            root.append(own)
    trained = [unit for unit in root if unit.reduced]
    return [unit for unit in ([joined(trained)] if trained else []) + glue + blocks if unit.reduced]
