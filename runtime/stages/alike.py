"""Which stages of a pipeline are alike, so that a dry run lowers and runs one of each kind."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence

from torch import nn

from autoparallel.planner.strategy.types import Strategy
from autoparallel.runtime.stages.cut import StageModule

# Numbers in the source of a stage's graph that count values and blocks: `layers_17`, `"17"`, `.17`.
_COUNTED = re.compile(r'(?<=[A-Za-z])_\d+\b|"\d+"|\.\d+\b')


def alike_stages(
    stages: Sequence[nn.Module], strategy: Strategy, kinds: Mapping[str, int]
) -> tuple[int, ...]:
    """For each stage the first one that it is alike: the same code on modules of the same kinds, recomputed alike, between
    neighbours that are alike too (what they hand over is then the same).

    `kinds` tells blocks apart, by path; a stage with a block that is not in it is like no other.
    """
    own = [_kind(stage, strategy, kinds, index) for index, stage in enumerate(stages)]
    first: dict[Hashable, int] = {}
    found = []
    for index in range(len(own)):
        before = own[index - 1] if index else None
        after = own[index + 1] if index + 1 < len(own) else None
        found.append(first.setdefault((before, own[index], after), index))
    return tuple(found)


def _kind(stage: nn.Module, strategy: Strategy, kinds: Mapping[str, int], index: int) -> Hashable:
    if not isinstance(stage, StageModule):
        return index
    cut = stage.stage_cut
    tied = any(index in tie.stages for tie in cut.ties)
    if tied or cut.is_last or not index or any(path not in kinds for path in cut.blocks):
        return index
    full = strategy.recompute.per_stage
    modules = tuple((type(module), module.extra_repr()) for module in stage.modules())
    tensors = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in stage.parameters())
    return (
        tuple(kinds[path] for path in cut.blocks), full[index] if full else 0, _counted_anew(stage.source),
        len(cut.received), len(cut.sent), modules, tensors,
    )  # fmt: skip


def _counted_anew(source: str) -> str:
    """The source with its counting numbers replaced in the order in which they come."""
    numbers: dict[str, str] = {}
    return _COUNTED.sub(lambda match: numbers.setdefault(match[0], f"#{len(numbers)}"), source)
