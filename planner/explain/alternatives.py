"""Why this, and why not that: the best strategy of each kind that was not chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import numpy as np

from autoparallel.costmodel.prediction import Prediction
from autoparallel.planner.explain.reasons import alternative
from autoparallel.planner.outcome import Alternative
from autoparallel.planner.problem import objective_value
from autoparallel.planner.score import score
from autoparallel.planner.search.bounds.outer import Outer, expand_quickly, expand_shapes
from autoparallel.planner.search.driver import Search, after
from autoparallel.planner.search.evaluate import Evaluation
from autoparallel.planner.search.improve.starts import NARROW, are_open, first_of_each
from autoparallel.planner.search.partition.problem import Partition
from autoparallel.planner.search.partition.quick import even_partition
from autoparallel.planner.search.space.build import SCHEDULES, Space, Variants
from autoparallel.planner.search.space.candidates import Candidate, candidate, shape_keys, strategy_of
from autoparallel.planner.search.space.meshes import Bools, Ints, joined
from autoparallel.planner.search.space.shapes import MODES, Shapes
from autoparallel.planner.side_by_side import side_by_side
from autoparallel.planner.strategy.types import Offload, Strategy

# Work (`Search.work`) that is spent on each kind: enough to see its best strategy or one near it, and little
# enough that a dozen kinds take a second or two. Kind: measured.
WORK = 50.0
EXPLAINED_WORK = 100.0  # where the user asks for an explanation
WORK_WHEN_STOPPED = 10.0  # where the user's time is over
MOST_ACTIONS = 6_000  # of a schedule that is laid out for an alternative
AT_ONCE = 48  # shapes of a kind expanded together
STARTS_OF_KIND = 2  # strategies of a kind simulated before its search
NEAREST = 3  # shapes of a kind like the chosen one whose variants are simulated before these,
NEAREST_TRIED, NEAREST_FITTING = 5, 2  # so many at most, until so many fit
SMALLEST = 1  # shapes of a kind that does not fit, of which the smallest is shown
FEW = 10_000  # variants, whose kinds are searched sooner than another process is started. Kind: measured
EFFORT = 0.02  # of each stage problem: what is shown beside the answer need not be proved


def work_of_kinds(*, explain: bool, out_of_time: bool) -> float:
    """The work that is spent on each kind, by what the user asks for and has time for."""
    if out_of_time:
        return WORK_WHEN_STOPPED
    return EXPLAINED_WORK if explain else WORK


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of strategy: which shapes belong to it, and which of their variants, as columns and as a strategy."""

    name: str
    shapes: Callable[[Shapes], Bools]
    variants: Callable[[Variants, Shapes], Bools] | None = None
    says: Callable[[Strategy], bool] = lambda _: True


def kinds_besides(chosen: Strategy, space: Space) -> tuple[Kind, ...]:
    """The kinds that the chosen strategy is not of."""
    mesh, zero = chosen.mesh, chosen.shard.zero
    alone = mesh.pp == mesh.tp == mesh.cp == mesh.ep == 1
    replicas, sharded = (lambda s: _alone(s) & (s.dp_shard == 1)), (lambda s: _alone(s) & (s.dp_shard > 1))
    found = [
        (not (alone and zero == 0), _kind("data parallelism alone", replicas)),
        (not (alone and zero in (1, 2)), _kind("ZeRO-1/2 alone", sharded, zero=(1, 2))),
        (not (alone and zero == 3), _kind("ZeRO-3 alone", sharded, zero=(3,))),
        (mesh.tp > 1, _kind("no tensor parallelism", lambda s: s.tp == 1)),
        (True, _kind("more tensor parallelism", lambda s: s.tp > mesh.tp)),
        (mesh.tp > 2, _kind("less tensor parallelism", lambda s: (s.tp < mesh.tp) & (s.tp > 1))),
        (mesh.pp > 1, _kind("no pipeline", lambda s: s.pp == 1)),
        (True, _kind("more pipeline stages", lambda s: s.pp > mesh.pp)),
        (mesh.pp > 2, _kind("fewer pipeline stages", lambda s: (s.pp < mesh.pp) & (s.pp > 1))),
        (mesh.cp > 1, _kind("no context parallelism", lambda s: s.cp == 1)),
        (mesh.cp == 1, _kind("context parallelism", lambda s: s.cp > 1)),
        (mesh.ep > 1, _kind("no expert parallelism", lambda s: s.ep == 1)),
        (mesh.ep == 1, _kind("expert parallelism", lambda s: s.ep > 1)),
        (chosen.recompute.mode != "full", _kind("full recomputation", lambda s: s.recompute == 2)),
        (chosen.recompute.mode == "full", _kind("recomputation block by block", lambda s: s.recompute != 2)),
        (chosen.offload != Offload(), _kind("no offloading", lambda s: ~_offloads(s))),
        (chosen.offload == Offload(), _kind("offloading to the host", _offloads)),
        (True, _kind("larger micro-batches", lambda s: s.micro > chosen.batch.micro)),
        (chosen.batch.micro > 1, _kind("smaller micro-batches", lambda s: s.micro < chosen.batch.micro)),
        (True, _kind("more devices", lambda s: s.devices > mesh.devices)),
        (True, _kind("fewer devices", lambda s: s.devices < mesh.devices)),
    ]  # fmt: skip
    return *(kind for differs, kind in found if differs), *_other_variants(chosen, space)


def _other_variants(chosen: Strategy, space: Space) -> Iterator[Kind]:
    """Kinds that differ in what is chosen beside a shape: another schedule, other messages of data parallelism."""
    schedule, every = chosen.pipeline.schedule, space.compressions
    if chosen.mesh.pp > 1:
        own = SCHEDULES.index(schedule)
        yield Kind(
            name=f"another schedule than {schedule}", shapes=lambda s: s.pp > 1, variants=lambda v, _: v.schedule != own,
            says=lambda s: s.pipeline.schedule != schedule,
        )  # fmt: skip
    yield from _with_or_without(
        "compressed gradients", chosen, lambda s: s.grad_sync.compresses,
        lambda v: np.isin(v.compression, [i for i, one in enumerate(every) if any(m != "none" for m in one.gradients)]),
        open_=len({one.gradients for one in every}) > 1,
    )  # fmt: skip
    yield from _with_or_without(
        "compressed gathers of parameters", chosen, lambda s: s.grad_sync.weights != "none",
        lambda v: np.isin(v.compression, [i for i, one in enumerate(every) if one.weights != "none"]),
        open_=len({one.weights for one in every}) > 1,
    )  # fmt: skip
    yield from _with_or_without(
        "a second copy of the parameters", chosen, lambda s: s.shard.secondary > 0, lambda v: space.secondary(v) > 0,
        open_=len({one.copied for one in every}) > 1,
    )  # fmt: skip


def _with_or_without(
    what: str,
    chosen: Strategy,
    says: Callable[[Strategy], bool],
    has: Callable[[Variants], Bools],
    *,
    open_: bool,
) -> Iterator[Kind]:
    """Where the space has both, the kind that the chosen strategy is not of."""
    own = says(chosen)
    if open_:
        yield Kind(
            name=f"without {what}" if own else f"with {what}", shapes=lambda s: s.pp > 0,
            variants=lambda v, _: has(v) != own, says=lambda s: says(s) != own,
        )  # fmt: skip


def _alone(shapes: Shapes) -> Bools:
    """Neither pipeline nor tensor, context or expert parallelism."""
    return np.asarray((shapes.pp == 1) & (shapes.tp == 1) & (shapes.cp == 1) & (shapes.ep == 1))


def _offloads(shapes: Shapes) -> Bools:
    """Something on the host."""
    return np.asarray((shapes.optimizer_offloaded > 0) | (shapes.activations_offloaded > 0))


def _kind(name: str, shapes: Callable[[Shapes], Bools], *, zero: tuple[int, ...] = ()) -> Kind:
    if not zero:
        return Kind(name=name, shapes=shapes)
    return Kind(
        name=name,
        shapes=shapes,
        variants=lambda v, _: np.isin(v.zero, zero),
        says=lambda s: s.shard.zero in zero,
    )


def alternatives(
    outer: Outer, best: Evaluation, seen: Sequence[Evaluation], *, work: float = WORK, processes: int = 1
) -> tuple[Alternative, ...]:
    """The best strategy found of each other kind, best first; those that do not fit last.

    `seen` are the strategies that the search simulated: the best of a kind among them is where the kind's own
    search begins, which ends with its proof or after `work`. Kinds with the same best strategy are one. They are looked
    for in so many `processes`; an interrupt leaves those that this one has found.
    """
    cluster = outer.problem.cluster
    reference = score(outer.problem.graph, cluster, best.strategy, outer.book.expander)
    found: list[Alternative | None] = []

    def look(kind: Kind) -> Alternative | None:
        found.append(_best_of(outer, kind, best, reference, seen, work))
        return found[-1]

    pieces = [partial(look, kind) for kind in kinds_besides(best.strategy, outer.space)]
    with suppress(KeyboardInterrupt):  # the plan is there; what is missing is said of fewer kinds
        found = side_by_side(pieces, [1.0] * len(pieces), processes if outer.counts.sum() > FEW else 1)
    kept: dict[Strategy, Alternative] = {}
    for one in found:
        if one is None or one.strategy == best.strategy:
            continue
        same = kept.get(one.strategy)
        kept[one.strategy] = one if same is None else replace(same, kind=f"{same.kind}; {one.kind}")
    return tuple(sorted(kept.values(), key=lambda one: one.rank))


def _best_of(
    outer: Outer, kind: Kind, best: Evaluation, reference: Prediction, seen: Sequence[Evaluation], work: float
) -> Alternative | None:
    rows = np.flatnonzero(kind.shapes(outer.space.shapes))
    if not len(rows):
        return None

    rejected = partial(alternative, outer.problem, kind.name, chosen=reference, expander=outer.book.expander)
    known = [e for e in seen if e is not best and outer.fits(e) and _belongs(kind, e.strategy)]
    if known and work <= WORK_WHEN_STOPPED:  # the search has looked at it no less than at the answer
        best_of = min(known, key=partial(objective_value, outer.problem))
        return rejected(best_of.strategy, proved=False)
    found, proved = _searched(outer, kind, rows, known, work, best.strategy)
    if found is not None:
        return rejected(found.strategy, proved=proved)
    order = outer.best_first(_leanest(outer.space.shapes, rows), SMALLEST, by_memory=True)
    least = smallest(outer, order, kind.variants, most_actions=MOST_ACTIONS)
    return rejected(least) if least is not None else None


def _leanest(shapes: Shapes, rows: Ints) -> Ints:
    """Shapes that keep as little of a micro-batch as can be."""
    least = rows[shapes.micro[rows] == shapes.micro[rows].min()]
    full = least[shapes.recompute[least] == MODES.index("full")]
    return np.asarray(full if len(full) else least)


def _searched(
    outer: Outer, kind: Kind, rows: Ints, known: Sequence[Evaluation], work: float, chosen: Strategy
) -> tuple[Evaluation | None, bool]:
    """The best strategy of some shapes of a kind after so much work, and whether it is proved to be."""
    search = Search(
        outer=outer, check=after(work), only=kind.variants, effort=EFFORT, starts=STARTS_OF_KIND,
        climbs=False, most_actions=MOST_ACTIONS, breadth=NARROW, at_once=AT_ONCE,
    )  # fmt: skip
    search.consider(*known)
    fitting = 0
    for near in _nearest(outer, kind, rows, chosen):
        fitting += search.sims.try_quickly(near) is not None
        if fitting == NEAREST_FITTING or search.work >= work:
            break
    proved = search.ended(rows) and not search.may_win(search.bound())
    return search.incumbent, proved


def _nearest(outer: Outer, kind: Kind, rows: Ints, chosen: Strategy) -> list[Candidate]:
    """Of the shapes of a kind that differ from the chosen strategy in the fewest keys the best variant of each level of ZeRO, the
    least bound first."""
    shapes, differing = outer.space.shapes, np.zeros(len(rows), dtype=np.int64)
    for key, value in _keys_of(chosen).items():
        differing += getattr(shapes, key)[rows] != value
    near = outer.best_first(rows[differing == differing.min()], NEAREST)
    found, bounds = expand_quickly(outer, near)
    open_ = are_open(outer, found, bounds, kind.variants) & (outer.space.actions(found) <= MOST_ACTIONS)
    open_ &= outer.communication.inner_placements(found) == 0
    order = np.flatnonzero(open_)
    order = order[np.argsort(bounds.time_s[order], kind="stable")]
    first = first_of_each(joined(found.shape[order], found.zero[order]), order, 1)
    return [candidate(outer.space, found, row) for row in first[:NEAREST_TRIED].tolist()]


def _belongs(kind: Kind, strategy: Strategy) -> bool:
    """Whether a strategy is of a kind."""
    row = {"mesh": 0, "micro_batches": strategy.micro_batches, **_keys_of(strategy)}
    shapes = Shapes(**{name: np.array([value]) for name, value in row.items()})
    return bool(kind.shapes(shapes)[0]) and kind.says(strategy)


def _keys_of(strategy: Strategy) -> dict[str, float]:
    """What tells a strategy's shape from others."""
    micro, mode = strategy.batch.micro, strategy.recompute.mode
    return shape_keys(strategy.mesh, micro, strategy.shard.sequence_parallel, mode, strategy.offload)


def smallest(
    outer: Outer,
    rows: Ints,
    belongs: Callable[[Variants, Shapes], Bools] | None = None,
    *,
    most_actions: float = inf,
) -> Strategy | None:
    """Of the variants of some shapes the one that needs least memory, with everything recomputed; None where their
    schedules have more actions than asked for."""
    rows = rows[np.isfinite(outer.bounds.time_s[rows])]  # of others not even one block fits
    found, bounds = expand_shapes(outer, rows, inf, memory=True)
    fits = outer.space.actions(found) <= most_actions
    if belongs is not None:
        fits &= belongs(found, outer.space.shapes.take(found.shape))
    index = np.flatnonzero(fits)
    if not len(index):
        return None
    row = int(index[np.argmin(bounds.memory_bytes[index])])
    chosen = candidate(outer.space, found, row)
    return strategy_of(outer.problem, chosen, _all_recomputed(outer, chosen))


def _all_recomputed(outer: Outer, chosen: Candidate) -> Partition:
    partition = even_partition(len(outer.chain.kinds), chosen.chunks)
    if chosen.mode == "full" or outer.problem.fixed.recomputed is not None:
        return Partition(
            blocks=outer.problem.fixed.stage_blocks or partition.blocks,
            recomputed=outer.problem.fixed.recomputed or partition.recomputed,
        )
    return Partition(blocks=partition.blocks, recomputed=partition.blocks)
