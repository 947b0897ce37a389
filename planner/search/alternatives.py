"""Why this, and why not that: the best strategy of each kind that was not chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from autoparallel.costmodel.prediction import Prediction
from autoparallel.planner.score import score
from autoparallel.planner.search.candidates import Candidate, candidate, strategy_of
from autoparallel.planner.search.deals import even_deal
from autoparallel.planner.search.evaluate import Evaluation
from autoparallel.planner.search.frontier import Frontier, Stopped
from autoparallel.planner.search.outcome import GIB, Alternative
from autoparallel.planner.search.outer import Outer, expand_shapes
from autoparallel.planner.search.space import MODES, Bools, Ints, Shapes, Variants
from autoparallel.planner.search.stage_problem import Deal
from autoparallel.planner.strategy.types import Strategy

SHAPES_TRIED = 8  # the most promising shapes of a kind, bounded again with all their variants
SIMULATED = 2  # deals simulated per kind
SOLVED = 6  # stage problems solved per kind
EFFORT = 0.05  # of each stage problem: what is shown beside the answer need not be proved


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of strategy: which shapes and variants belong to it."""

    name: str
    shapes: Callable[[Shapes], Bools]
    variants: Callable[[Variants, Shapes], Bools] | None = None


def kinds_besides(chosen: Strategy) -> tuple[Kind, ...]:
    """The kinds that the chosen strategy is not of."""
    mesh, zero = chosen.mesh, chosen.shard.zero
    alone = mesh.pp == 1 and mesh.tp == 1
    found = [
        (not (alone and zero == 0), _kind("data parallelism alone", lambda s: (s.pp == 1) & (s.tp == 1), zero=(0,))),
        (not (alone and zero in (1, 2)), _kind("ZeRO-1/2 alone", lambda s: (s.pp == 1) & (s.tp == 1), zero=(1, 2))),
        (not (alone and zero == 3), _kind("ZeRO-3 alone", lambda s: (s.pp == 1) & (s.tp == 1), zero=(3,))),
        (mesh.tp > 1, _kind("no tensor parallelism", lambda s: s.tp == 1)),
        (True, _kind("more tensor parallelism", lambda s: s.tp > mesh.tp)),
        (mesh.tp > 2, _kind("less tensor parallelism", lambda s: (s.tp < mesh.tp) & (s.tp > 1))),
        (mesh.pp > 1, _kind("no pipeline", lambda s: s.pp == 1)),
        (True, _kind("more pipeline stages", lambda s: s.pp > mesh.pp)),
        (mesh.pp > 2, _kind("fewer pipeline stages", lambda s: (s.pp < mesh.pp) & (s.pp > 1))),
        (chosen.recompute.mode != "full", _kind("full recomputation", lambda s: s.recompute == 2)),
        (chosen.recompute.mode == "full", _kind("recomputation block by block", lambda s: s.recompute != 2)),
        (True, _kind("larger micro-batches", lambda s: s.micro > chosen.batch.micro)),
        (chosen.batch.micro > 1, _kind("smaller micro-batches", lambda s: s.micro < chosen.batch.micro)),
    ]  # fmt: skip
    return tuple(kind for differs, kind in found if differs)


def _kind(name: str, shapes: Callable[[Shapes], Bools], *, zero: tuple[int, ...] = ()) -> Kind:
    if not zero:
        return Kind(name=name, shapes=shapes)
    return Kind(name=name, shapes=shapes, variants=lambda v, _: np.isin(v.zero, zero))


def alternatives(outer: Outer, best: Evaluation, seen: Sequence[Evaluation]) -> tuple[Alternative, ...]:
    """The best strategy found of each other kind, fastest first; those that do not fit last.

    `seen` are the strategies that the search simulated, best bounds first: where they have some of a kind, the
    kind is not searched again.
    """
    reference = score(
        outer.problem.graph, outer.problem.cluster, best.strategy, outer.book.expander, spans=False
    )
    found = [_best_of(outer, kind, reference, seen) for kind in kinds_besides(best.strategy)]
    kept: dict[Strategy, Alternative] = {}
    for one in found:
        if one is not None and one.strategy != best.strategy:
            kept.setdefault(one.strategy, one)
    return tuple(sorted(kept.values(), key=lambda a: (not a.feasible, a.step_time_s, a.kind)))


def _best_of(
    outer: Outer, kind: Kind, reference: Prediction, seen: Sequence[Evaluation]
) -> Alternative | None:
    known = [e for e in seen if e.peak_bytes <= outer.capacity_bytes and _belongs(kind, e.strategy)]
    if known:
        fastest = min(known, key=lambda e: e.step_time_s)
        return _alternative(outer, kind.name, fastest.strategy, reference)
    rows = np.flatnonzero(kind.shapes(outer.space.shapes))
    if not len(rows):
        return None
    fits = outer.bounds.memory_bytes[rows] <= outer.capacity_bytes
    if fits.any():
        order = rows[fits][np.argsort(outer.bounds.time_s[rows[fits]], kind="stable")][:SHAPES_TRIED]
        strategy = _fastest(outer, kind, order)
        if strategy is not None:
            return _alternative(outer, kind.name, strategy, reference)
    order = rows[np.argsort(outer.bounds.memory_bytes[rows], kind="stable")][:1]
    least = smallest(outer, order, kind.variants)
    return _alternative(outer, kind.name, least, reference) if least is not None else None


def _belongs(kind: Kind, strategy: Strategy) -> bool:
    """Whether a strategy is of a kind."""
    mesh = strategy.mesh
    row = {
        "mesh": 0, "pp": mesh.pp, "dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard, "cp": mesh.cp,
        "tp": mesh.tp, "ep": mesh.ep, "micro": strategy.batch.micro, "micro_batches": strategy.micro_batches,
        "sequence_parallel": int(strategy.shard.sequence_parallel),
        "recompute": MODES.index(strategy.recompute.mode),
    }  # fmt: skip
    shapes = Shapes(**{name: np.array([value]) for name, value in row.items()})
    zero = np.array([strategy.shard.zero])
    one = Variants(
        shape=zero * 0, zero=zero, schedule=zero, virtual_stages=zero, order=zero, compression=zero
    )
    return bool(kind.shapes(shapes)[0] and (kind.variants is None or kind.variants(one, shapes)[0]))


def _fastest(outer: Outer, kind: Kind, rows: Ints) -> Strategy | None:
    """Simulate a few of the kind's most promising variants; the fastest that fits."""

    def check(frontier: Frontier) -> None:
        if len(frontier.seen) >= SIMULATED or frontier.solved >= SOLVED:
            raise Stopped

    frontier = Frontier(outer=outer, check=check, only=_simple(kind), effort=EFFORT)
    with suppress(Stopped):
        frontier.run(rows)
    return frontier.incumbent.strategy if frontier.incumbent is not None else None


def _simple(kind: Kind) -> Callable[[Variants, Shapes], Bools]:
    """The kind's variants with one chunk per rank: what they show, and quickly."""
    return lambda v, s: (v.virtual_stages == 1) & (True if kind.variants is None else kind.variants(v, s))


def smallest(
    outer: Outer, rows: Ints, belongs: Callable[[Variants, Shapes], Bools] | None = None
) -> Strategy | None:
    """Of the variants of some shapes the one that needs least memory, with everything recomputed."""
    found, bounds = expand_shapes(outer, rows, float("inf"), memory=True)
    index = np.arange(len(found))
    if belongs is not None:
        index = np.flatnonzero(belongs(found, outer.space.shapes.take(found.shape)))
    if not len(index):
        return None
    row = int(index[np.argmin(bounds.memory_bytes[index])])
    chosen = candidate(outer.space, found, row)
    return strategy_of(outer.problem, chosen, _all_recomputed(outer, chosen))


def _all_recomputed(outer: Outer, chosen: Candidate) -> Deal:
    deal = even_deal(len(outer.chain.kinds), chosen.chunks)
    if chosen.mode == "full" or "recompute.per_stage" in outer.problem.constraints:
        return Deal(
            blocks=outer.problem.fixed_ints("pipeline.stage_blocks") or deal.blocks,
            recomputed=outer.problem.fixed_ints("recompute.per_stage") or deal.recomputed,
        )
    return Deal(blocks=deal.blocks, recomputed=deal.blocks)


def _alternative(outer: Outer, name: str, strategy: Strategy, reference: Prediction) -> Alternative:
    problem = outer.problem
    prediction = score(problem.graph, problem.cluster, strategy, outer.book.expander, spans=False)
    return Alternative(
        kind=name, strategy=strategy, step_time_s=prediction.step_time_s,
        peak_memory_gib=prediction.peak_bytes / GIB, feasible=prediction.feasible,
        reason=reason(prediction, reference),
    )  # fmt: skip


def reason(prediction: Prediction, reference: Prediction) -> str:
    """Why a strategy lost, in words."""
    if not prediction.feasible:
        return f"does not fit: {prediction.peak_bytes / GIB:.1f} GiB of {prediction.capacity_bytes / GIB:.1f} GiB"
    ratio = prediction.step_time_s / reference.step_time_s - 1.0
    if ratio <= 0:
        return "as fast, but worse in what was asked for"
    theirs, ours = dict(prediction.breakdown_s), dict(reference.breakdown_s)
    worst = max(theirs, key=lambda key: theirs[key] - ours[key])
    words = {
        "bubble": "pipeline bubble", "dp_comm": "gradient communication", "tp_comm": "tensor-parallel communication",
        "pp_comm": "communication between stages", "recompute": "recomputation", "forward": "computation",
        "backward": "computation", "optimizer": "the optimizer", "ep_comm": "expert communication",
        "cp_comm": "context-parallel communication", "other": "other work",
    }  # fmt: skip
    return f"{ratio:.1%} slower, most of it {words[worst]}: {_seconds(theirs[worst])} instead of {_seconds(ours[worst])}"


def _seconds(value: float) -> str:
    """Three digits; what is left of subtracting equal times is nothing."""
    return f"{value:.3g} s" if value > 1e-9 else "0 s"
