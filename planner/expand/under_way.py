"""What reductions of gradients over replicas hold beside them while a step's last backward passes run, in `auto_parallelize`'s own
exchanges (`runtime/gradients/reductions.py`): by way of servers, level by level of the network, or encoded.

Gradients travel in buckets of whole tensors, which start in order, when all of theirs have come; so many are under way at once. What a
rank receives of each stands beside it until it is waited for, and then the sum of its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoparallel.costmodel.compression import method_at, parse_method, wire_bytes
from autoparallel.costmodel.program import BlockWork, StageWork, UnderWay
from autoparallel.costmodel.topology import Crossing, crossings
from autoparallel.planner.expand import state
from autoparallel.planner.expand.axes import mesh_axes
from autoparallel.planner.expand.chain import Ties
from autoparallel.planner.expand.hosted import trained_tensors
from autoparallel.planner.expand.schedules import SPLIT_BACKWARD
from autoparallel.planner.expand.units import passing_bytes
from autoparallel.planner.expand.works import LocalWorks
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles.hardware import Cluster

# Reductions that hold copies beside their buffers, at once: one is received while the next is made. Kind: choice.
MOST_UNDER_WAY = 2
BY_LEVEL = ("hierarchical", "parameter-server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A bucket's mean over so many ranks, by a method of `grad_sync.compression`: first inside, then `across` others."""

    ranks: int
    method: str
    item_bytes: int
    across: Exchange | None = None

    def carried(self, size: int) -> int:
        """Bytes beside a bucket of `size` bytes while it is under way: what came, and of encoded ones what is sent."""
        if parse_method(self.method).name in ("none", "powersgd"):
            return size
        return 2 * round(wire_bytes(self.method, size, self.item_bytes))

    def ending(self, size: int) -> int:
        """Beside it when it is waited for: what came is decoded and added up, and this rank's share then goes across."""
        share = state.share(size, self.ranks)
        own = self.carried(size) + share + (0 if parse_method(self.method).name == "none" else size)
        beyond = self.across.ending(share) if self.across is not None else 0
        return max(own, share + beyond)


def exchange_of(strategy: Strategy, cluster: Cluster) -> Exchange | None:
    """How a bucket is reduced over the replicas; None where that is done in the bucket itself."""
    sync, path = strategy.grad_sync, crossings(summed_axes(strategy), mesh_axes(strategy), cluster)
    if not strategy.execution.fsdp2 or not path:
        return None
    methods = [method_at(sync.compression, crossing.index) for crossing in path]
    if len(path) == 1 or (sync.algorithm not in BY_LEVEL and methods[-2] == methods[-1]):
        return _at_once(strategy, path)
    item = state.dtype_bytes(strategy.execution.grad_dtype)
    encoded = sync.algorithm == "parameter-server" or methods[-1] != "none"
    across = Exchange(ranks=path[-1].fan, method=methods[-1], item_bytes=item) if encoded else None
    return Exchange(ranks=path[-1].inside, method=methods[-2], item_bytes=item, across=across)


def expert_exchange_of(strategy: Strategy, cluster: Cluster) -> Exchange | None:
    """Likewise of experts that other ranks hold alike than the rest, which are reduced at once."""
    summed = state.expert_shards(strategy).summed
    return _at_once(strategy, crossings(summed, mesh_axes(strategy), cluster))


def _at_once(strategy: Strategy, path: Sequence[Crossing]) -> Exchange | None:
    if not path:
        return None
    method, ranks = method_at(strategy.grad_sync.compression, path[-1].index), path[-1].inside * path[-1].fan
    if strategy.grad_sync.algorithm != "parameter-server" and method == "none":
        return None
    item = state.dtype_bytes(strategy.execution.grad_dtype)
    return Exchange(ranks=ranks, method=method, item_bytes=item)


def summed_axes(strategy: Strategy) -> tuple[str, ...]:
    """Axes along which whole gradients, or equal shares of them, are summed in buckets."""
    shards = state.dense_shards(strategy)
    return tuple(axis for axis in shards.summed if not shards.zero or axis not in shards.axes)


def with_under_way(
    works: LocalWorks, strategy: Strategy, stages: Sequence[StageWork], ranges: Sequence[range], ties: Ties
) -> list[StageWork]:
    """The stages with what their reductions hold."""
    exchanges = [exchange_of(strategy, works.cluster)]
    if strategy.execution.fsdp2 and strategy.mesh.ep > 1 and not state.zero_level(strategy):
        exchanges.append(expert_exchange_of(strategy, works.cluster))
    if not any(exchanges):
        return list(stages)
    found = []
    for stage, positions in zip(stages, ranges, strict=True):
        links = [_tensors(works, strategy, ties, position) for position in positions]
        repeated = [works.graph.chain[position].repeated for position in positions]
        gone = [_gone(works, strategy, ties, *link) for link in zip(stage.links, positions, strict=True)]
        apart = len(exchanges) > 1
        lists = [
            [[n for n, expert in link if (expert and apart) == one] for link in links]
            for one in (False, True)
        ]
        walks = [
            _walked(strategy, exchange, own, repeated)
            for exchange, own in zip(exchanges, lists, strict=False)
            if exchange is not None
        ]
        found.append(replace(stage, under_way=_joined(walks, gone)))
    return found


def _joined(walks: Sequence[UnderWay], gone: Sequence[int]) -> UnderWay:
    """Of buckets and of those of experts, which are waited for last."""
    return UnderWay(
        beside=tuple(map(sum, zip(*(walk.beside for walk in walks), strict=True))),
        after=tuple(map(sum, zip(*(walk.after for walk in walks), strict=True))), gone=tuple(gone),
        left=sum(walk.left for walk in walks),
        ending=max(walk.ending + sum(later.left for later in walks[n + 1 :]) for n, walk in enumerate(walks)),
    )  # fmt: skip


def _gone(works: LocalWorks, strategy: Strategy, ties: Ties, work: BlockWork, position: int) -> int:
    """Bytes of a link's parameters in the dtype of compute that FSDP2 keeps until the last backward, and not beyond: in a step's only
    micro-batch they are counted as such, and where backwards are split they stay."""
    if strategy.micro_batches == 1 or strategy.pipeline.schedule in SPLIT_BACKWARD:
        return 0
    link, batch = works.graph.chain[position], strategy.batch
    alone = replace(strategy, batch=replace(batch, global_=batch.micro * strategy.mesh.data_parallel))
    dropped = ties.dropped.get(position, frozenset())
    return passing_bytes(work, works.graph.blocks[link.block], dropped, alone, repeated=link.repeated)


def _tensors(works: LocalWorks, strategy: Strategy, ties: Ties, position: int) -> list[tuple[int, bool]]:
    """Bytes of a link's gradients on one rank, in the order of the model, and whether they are of experts that are shared."""
    block, item = works.graph.chain[position].block, state.dtype_bytes(strategy.execution.grad_dtype)
    dropped = ties.dropped.get(position, frozenset()) | ties.later.get(position, frozenset())
    return [(n * item, experts) for n, experts in trained_tensors(works, strategy, block, dropped)]


def _walked(
    strategy: Strategy, exchange: Exchange, links: Sequence[Sequence[int]], repeated: Sequence[bool]
) -> UnderWay:
    """`links`: bytes of the gradients of each, in the order of the model. A pipeline's stages have the modules beside their blocks
    first (`runtime/stages/cut.py`), so that they are reduced last."""
    halves, mib = strategy.pipeline.schedule in SPLIT_BACKWARD, strategy.grad_sync.bucket_mib
    buckets = _buckets(links, [at or strategy.mesh.pp == 1 for at in repeated], mib, halves=halves)
    split = halves and state.zero_level(strategy) == 1
    walk, nothing = _Walk(exchange), (0,) * len(links)
    if not strategy.grad_sync.overlap or split:  # all when the step ends
        started = max((walk.start(size) for _, size in buckets), default=0)
        return UnderWay(beside=nothing, after=nothing, gone=nothing, left=0, ending=max(started, walk.end()))
    beside, after = [0] * len(links), [0] * len(links)
    for link in range(len(links) - 1, -1, -1):
        before = walk.held()
        after[link] = max([before, *(walk.start(size) for at, size in buckets if at == link)])
        # A module beside the blocks is over when its gradient has come; of a block's gradients the first come long before.
        beside[link] = after[link] if repeated[link] else before
        if halves and not repeated[link]:  # before anything is under way
            beside[link] = after[link] = 0
    left = walk.held()
    return UnderWay(beside=tuple(beside), after=tuple(after), gone=nothing, left=left, ending=walk.end())


def _buckets(
    links: Sequence[Sequence[int]], in_order: Sequence[bool], bucket_mib: float, *, halves: bool
) -> list[tuple[int, int]]:
    """(link that starts it, bytes) of each bucket, in the order in which they start: the last tensors first, and links that are not
    `in_order` after all others; in second `halves` of backwards their gradients have come by then, wherever they stand."""
    order = sorted(range(len(links)), key=lambda link: (not in_order[link], -link))
    found: list[tuple[int, int]] = []
    for link in order:
        starts = link if in_order[link] or not halves else len(links) - 1
        for size in reversed(links[link]):
            if not found or found[-1][1] + size > bucket_mib * state.MIB:
                found.append((starts, 0))
            found[-1] = (min(found[-1][0], starts), found[-1][1] + size)
    latest = len(links)
    for n, (link, size) in enumerate(found):  # none starts before the one in front of it
        latest = min(latest, link)
        found[n] = (latest, size)
    return found


class _Walk:
    """Buckets under way, while they start in order."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._sizes: list[int] = []

    def held(self) -> int:
        """Bytes that they hold."""
        return sum(map(self._exchange.carried, self._sizes))

    def start(self, size: int) -> int:
        """The most that is held while another one starts, for which the oldest is waited for where there are too many."""
        most = self._wait() if len(self._sizes) >= MOST_UNDER_WAY else 0
        self._sizes.append(size)
        return max(most, self.held())

    def end(self) -> int:
        """The most that is held while all are waited for."""
        return max([self._wait() for _ in tuple(self._sizes)], default=0)

    def _wait(self) -> int:
        oldest = self._sizes.pop(0)
        return self.held() + self._exchange.ending(oldest)
