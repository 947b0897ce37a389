"""Units of FSDP2 where they stand: of a known partition beside their neighbours in the stage, else the least of all places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.costmodel.program import BlockWork, Collective
from autoparallel.planner.expand import state
from autoparallel.planner.expand.beside import Beside, LinkSizes, beside_of, link_sizes, most_beside
from autoparallel.planner.expand.chain import Ties
from autoparallel.planner.expand.glue import GlueUnit
from autoparallel.planner.expand.halves import ZERO_3, is_split, with_halves
from autoparallel.planner.expand.units import (
    as_cast_unit,
    as_glue,
    as_unit,
    joined,
    last_reduction,
    root_bytes,
    root_unit,
    rooted,
    units_of,
    with_coming_and_going,
    with_incoming,
)
from autoparallel.planner.expand.works import LocalWorks
from autoparallel.planner.strategy.types import Strategy

NO_NAMES: frozenset[str] = frozenset()
Neighbour = tuple[int, frozenset[str]]  # a block, and the names of its parameters that are not there


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A link in its stage: names of its parameters that its rank holds already (`dropped`), and of tensors that an earlier (`again`) or
    a `later` link of the stage has, too; the links `ahead` of it and `behind` it, where it matters what stands beside it. The first one of
    a stage has all links in `ending`, as the root unit is reduced when they have run back."""

    dropped: frozenset[str] = NO_NAMES
    again: frozenset[str] = NO_NAMES
    later: frozenset[str] = NO_NAMES
    ahead: Neighbour | None = None
    behind: Neighbour | None = None
    ending: tuple[Neighbour, ...] = ()


def stage_places(graph: ModelGraph, positions: range, ties: Ties, strategy: Strategy) -> tuple[Place, ...]:
    """The places of a stage's links."""
    dropped = [ties.dropped.get(p, NO_NAMES) for p in positions]
    places = [
        Place(dropped=names, again=ties.again.get(p, NO_NAMES), later=ties.later.get(p, NO_NAMES))
        for p, names in zip(positions, dropped, strict=True)
    ]
    if not places or not _in_units(strategy):
        return tuple(places)
    links = [(graph.chain[p].block, names) for p, names in zip(positions, dropped, strict=True)]
    between = zip(places, [None, *links[:-1]], [*links[1:], None], strict=True)
    first, *others = [replace(place, ahead=ahead, behind=behind) for place, ahead, behind in between]
    return (replace(first, ending=tuple(links)), *others)


def held_of(
    works: LocalWorks, strategy: Strategy, block: int, names: frozenset[str]
) -> list[tuple[int, bool]]:
    """Numbers of these parameters on one device, and whether they are trained."""
    if not names:
        return []
    plan = dict(works.tensor_plan(strategy).blocks[block].params)
    return [
        (p.numel // (strategy.mesh.tp if plan[p.name].startswith("S") else 1), p.trainable)
        for p in works.graph.blocks[block].parameters
        if p.name in names
    ]


def without(
    works: LocalWorks, strategy: Strategy, work: BlockWork, block: int, dropped: frozenset[str]
) -> BlockWork:
    """A block's work without the parameters that its rank holds already."""
    if not dropped:
        return work
    gone = held_of(works, strategy, block, dropped)
    return replace(
        work, parameters=work.parameters - sum(n for n, _ in gone),
        trainable=work.trainable - sum(n for n, trainable in gone if trainable),
        trainable_tensors=work.trainable_tensors - sum(trainable for _, trainable in gone),
    )  # fmt: skip


def waits_bytes(works: LocalWorks, strategy: Strategy, block: int, place: Place) -> int:
    """Gradients of a link, which is no unit, that are added to those of an earlier one of its stage."""
    return _trained(held_of(works, strategy, block, place.again)) * state.waiting_gradient_bytes(strategy)


def placed_unit(
    works: LocalWorks, strategy: Strategy, work: BlockWork, block: int, reduce: Sequence[Collective], place: Place
) -> BlockWork:  # fmt: skip
    """The memory of a link's work (without what is dropped) as a unit of FSDP2 in its place."""
    repeated, beside = _repeated(works.graph, block), Beside()
    if _in_units(strategy):
        ahead, behind = (one and _sizes(works, strategy, *one) for one in (place.ahead, place.behind))
        beside = beside_of(ahead, behind, _ending(works, strategy, place.ending))
        block_ahead = place.ahead is not None and _repeated(works.graph, place.ahead[0])
        coming = strategy.mesh.pp == 1 or (repeated and block_ahead)
        beside = replace(beside, coming=coming)
        if beside.ending is not None and state.gradient_level(strategy) < 2:
            beside = replace(beside, gone=_gone(works, strategy, place.ending[1:]))
        found = _unit(works, strategy, work, block, reduce, place.dropped, place.later, beside)
    else:
        found = as_cast_unit(work, strategy)
    if strategy.micro_batches == 1:
        own = works.graph.blocks[block]
        found = with_coming_and_going(found, own, place.dropped, strategy, repeated=repeated)
    gathers = _in_units(strategy) and state.zero_level(strategy) == ZERO_3
    if gathers or is_split(strategy):
        experts = unit_experts(works, strategy, block)
        units = units_of(work, works.graph.blocks[block], place.dropped, strategy, experts, repeated=repeated)
    if gathers:
        found = with_incoming(found, units, beside, repeated=repeated)
    if is_split(strategy):
        found = with_halves(
            found, works.backward(strategy, block), units, strategy, beside, repeated=repeated
        )
    waiting = held_of(works, strategy, block, place.again - place.later)
    waiting_bytes = _trained(waiting) * state.waiting_gradient_bytes(strategy)
    if not repeated and _in_units(strategy) and not state.adds_at_once(strategy):
        root = held_of(works, strategy, block, rooted(works.graph.blocks[block]) - place.later)
        waiting_bytes = _trained(root) * state.computed_bytes(strategy) or waiting_bytes
    return replace(found, waiting_bytes=waiting_bytes)


def least_unit(
    works: LocalWorks,
    strategy: Strategy,
    work: BlockWork,
    block: int,
    reduce: Sequence[Collective],
    dropped: frozenset[str],
) -> BlockWork:
    """The memory of a block's work as a unit, no more of it than in any place that the block may have."""
    if not _in_units(strategy):
        return work
    chain = works.graph.chain
    at = [position for position, link in enumerate(chain) if link.block == block]
    pairs = dict.fromkeys((chain[p - 1].block if p else None, chain[p + 1].block if p + 1 < len(chain) else None) for p in at)  # fmt: skip
    sizes = {b: None if b is None else _sizes(works, strategy, b, NO_NAMES) for pair in pairs for b in pair}
    beside = most_beside([Beside(), *(beside_of(sizes[ahead], sizes[behind]) for ahead, behind in pairs)])
    ties = {p.tied for link in chain[at[0] + 1 :] for p in works.graph.blocks[link.block].parameters}
    later = frozenset(p.name for p in works.graph.blocks[block].parameters if p.tied and p.tied in ties)
    return _unit(works, strategy, work, block, reduce, dropped, later, beside)


def _unit(
    works: LocalWorks, strategy: Strategy, work: BlockWork, block: int, reduce: Sequence[Collective],
    dropped: frozenset[str], later: frozenset[str], beside: Beside,
) -> BlockWork:  # fmt: skip
    """As `units.as_unit` and `units.as_glue`."""
    own = works.graph.blocks[block]
    if not _repeated(works.graph, block):
        backward = works.backward(strategy, block)
        return as_glue(work, own, reduce, dropped, strategy, beside=beside, backward=backward, twice=later)
    experts = unit_experts(works, strategy, block)
    inside = works.backward(strategy, block) if experts else None
    return as_unit(work, own, reduce, strategy, beside=beside, backward=inside, experts=experts)


def unit_experts(works: LocalWorks, strategy: Strategy, block: int) -> list[str]:
    """Names of the parameters that are a unit inside a block's."""
    params = works.tensor_plan(strategy).blocks[block].params if state.expert_shards(strategy).zero else ()
    return [name for name, placement in params if placement.startswith("E")]


def _gone(works: LocalWorks, strategy: Strategy, links: Sequence[Neighbour]) -> int:
    """Of repeated blocks that have been reduced what stood all along: summed gradients, of which shares may be left, and parameters."""
    summed, ranks = state.dtype_bytes(strategy.execution.grad_dtype), state.shard_ranks(strategy)
    left = 0 if state.keeps_share_of_gradients(strategy) else 1
    found = 0
    for block in (block for block, _ in links if _repeated(works.graph, block)):
        work = works.work(strategy, block, "none")
        found += work.trainable * summed * (ranks - left) // ranks
        found += work.parameters * state.computed_bytes(strategy)
    return found


def _ending(works: LocalWorks, strategy: Strategy, links: Sequence[Neighbour]) -> GlueUnit | None:
    """The root unit of a stage with these links."""
    units = [
        root_unit(without(works, strategy, works.work(strategy, block, "none"), block, names), works.graph.blocks[block], names, strategy)
        for block, names in links
        if not _repeated(works.graph, block)
    ]  # fmt: skip
    trained = [unit for unit in units if unit.reduced]
    return joined(trained) if trained else None


def _in_units(strategy: Strategy) -> bool:
    """Whether FSDP2 shards parameters, unit by unit."""
    return strategy.execution.fsdp2 and state.zero_level(strategy) > 0


def _sizes(works: LocalWorks, strategy: Strategy, block: int, dropped: frozenset[str]) -> LinkSizes:
    work = without(works, strategy, works.work(strategy, block, "none"), block, dropped)
    own, repeated = works.graph.blocks[block], _repeated(works.graph, block)
    root = 0 if repeated or state.zero_level(strategy) < 3 else root_bytes(work, own, dropped, strategy)
    stands = None if repeated else last_reduction(work, own, dropped, strategy)
    return link_sizes(work, strategy, stands=stands, root=root)


def _repeated(graph: ModelGraph, block: int) -> bool:
    return any(graph.chain[position].block == block for position in graph.repeated_positions)


def _trained(held: Sequence[tuple[int, bool]]) -> int:
    return sum(numbers for numbers, trainable in held if trainable)
