"""Which optimizer state is on the host: `auto_parallelize` moves that of whole tensors (`runtime/memory/optimizer.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoparallel.costmodel.program import StageWork
from autoparallel.planner.expand import state
from autoparallel.planner.expand.chain import Ties
from autoparallel.planner.expand.works import LocalWorks
from autoparallel.planner.strategy.types import Strategy

NO_NAMES: frozenset[str] = frozenset()


def hosted(sizes: Sequence[int], share: float) -> set[int]:
    """Which of tensors of so many numbers are on the host: the largest first, as long as they are within `share` of all."""
    room, found = share * sum(sizes), set[int]()
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        if 0 < sizes[number] <= room:
            room -= sizes[number]
            found.add(number)
    return found


def with_whole_tensors(
    works: LocalWorks, strategy: Strategy, stages: Sequence[StageWork], ranges: Sequence[range], rank_of: Sequence[int], ties: Ties
) -> list[StageWork]:  # fmt: skip
    """The stages with the state that stays on each rank's device, which is more than its share where tensors are large."""
    known: dict[tuple[int, frozenset[str]], list[int]] = {}
    sizes: list[list[int]] = []
    for positions in ranges:
        sizes.append([])
        for position in positions:
            key = (works.graph.chain[position].block, ties.dropped.get(position, NO_NAMES))
            if key not in known:
                known[key] = [number for number, _ in trained_tensors(works, strategy, *key)]
            sizes[-1] += known[key]
    kept: dict[int, int] = {}
    for rank in dict.fromkeys(rank_of):
        homes = [stage for stage, home in enumerate(rank_of) if home == rank for _ in sizes[stage]]
        every = [size for stage, home in enumerate(rank_of) if home == rank for size in sizes[stage]]
        offloaded = hosted(every, strategy.offload.optimizer)
        for number, (stage, size) in enumerate(zip(homes, every, strict=True)):
            kept[stage] = kept.get(stage, 0) + (0 if number in offloaded else size)
    return _keeping(stages, kept, state.optimizer_bytes_per_parameter(strategy.execution))


def _keeping(stages: Sequence[StageWork], kept: Mapping[int, int], item: int) -> list[StageWork]:
    return [replace(work, optimizer_bytes=kept.get(stage, 0) * item) for stage, work in enumerate(stages)]


def trained_tensors(
    works: LocalWorks, strategy: Strategy, block: int, dropped: frozenset[str]
) -> list[tuple[int, bool]]:
    """Numbers that a rank updates of each tensor of a block, and whether it is of experts that are shared."""
    local = works.local(strategy, block)
    found = []
    for parameter, (_, place) in zip(local.index.block.parameters, local.plan.params, strict=True):
        if parameter.trainable and parameter.name not in dropped:
            of_experts = place.startswith("E")
            shards = (state.expert_shards if of_experts else state.dense_shards)(strategy)
            own = parameter.numel // local.setting.parts(place)
            found.append((state.share(own, shards.ranks if shards.zero else 1), of_experts))
    return found
