"""Every strategy that a problem allows, as numpy columns.

The space is a product in two levels, so that millions of strategies need no million rows:

    Shapes      mesh sizes x micro-batch x sequence parallelism x recomputation x offloading: what memory and work
                depend on
    Variants    of some shapes: x ZeRO level x schedule and chunks x placement of the axes x compression of gradients and gathers, and
                whether backward passes gather from a second copy of the parameters

What is left to `planner/search/partition/solve.py` is inside each variant: blocks per chunk, and blocks recomputed per chunk.
The bucket size follows from the rest (`planner/search/space/syncs.py`).

Devices: all of the cluster, fewer where the batch does not divide among all, or those that an inner level of the network joins,
as the outer ones may be so slow that these alone take less time; `objective = "cost"` may use any divisor of them, too, and a
user who fixes every mesh size fixes the number of devices. Tried only when the user asks for it:
more than `MAX_VIRTUAL_STAGES` chunks per rank; shares of the sequence shorter than `LEAST_TOKENS`; cp anywhere but
right outside tp; tp anywhere but innermost on an irregular network; of many sizes of ep every other; cp and the
micro-batch with a common divisor, which is better taken out of both and into dp_shard (as many tokens a rank, fewer to
exchange).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from autoparallel.errors import UserError
from autoparallel.planner.expand.schedules import SPLIT_BACKWARD
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.space.meshes import (
    Bools,
    Ints,
    Meshes,
    alike,
    build_meshes,
    most_chunks,
    only,
)
from autoparallel.planner.search.space.refused import Refused, refused_kinds
from autoparallel.planner.search.space.shapes import MODES, Shapes, may_copy, open_offloads, shapes_of
from autoparallel.planner.search.space.syncs import Compressed, open_compressions
from autoparallel.planner.strategy.types import AXES, Offload

SCHEDULES = ("none", "gpipe", "1f1b", "interleaved-1f1b", "zb1p", "zbv", "dualpipev")
WHOLE_BACKWARD = SCHEDULES[:4]  # input and weight gradients together
NONE = SCHEDULES.index("none")
MAX_VIRTUAL_STAGES = 8  # chunks per rank tried unasked; bubbles shrink as 1/chunks, messages grow as chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Families:
    """Columns of what variants have in common that differ in what they communicate between blocks alone."""

    shape: Ints
    zero: Ints
    schedule: Ints  # index into SCHEDULES
    virtual_stages: Ints
    placed: Ints  # the number of where blocks communicate, of the orders that place them there

    def __len__(self) -> int:
        return len(self.shape)

    def take(self, rows: Ints | Bools | slice) -> Families:
        return Families(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Variants:
    """Columns of the inner level: the row of the shape, and what is chosen beside it."""

    shape: Ints
    zero: Ints
    schedule: Ints  # index into SCHEDULES
    virtual_stages: Ints
    order: Ints  # index into Meshes.orders
    compression: Ints  # index into Space.compressions

    def __len__(self) -> int:
        return len(self.shape)

    def take(self, rows: Ints | Bools | slice) -> Variants:
        return Variants(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The whole space of a problem: the outer level, and what the inner level is made from."""

    meshes: Meshes
    shapes: Shapes
    compressions: tuple[Compressed, ...]  # those of gathered parameters last
    copy_fixed: int | None  # the user's number of ranks that share a second copy of the parameters
    zeros: tuple[int, ...]
    zero_fixed: int | None  # the user's level
    alone: bool  # the user says that no rank shares its state: mesh.dp_shard = 1
    offloads: tuple[Offload, ...]
    schedules: tuple[tuple[int, int], ...]  # (schedule, chunks per rank), legal for some pp
    chunks: int | None  # number of chunks, where the user divides the blocks
    schedule_fixed: bool  # the user named it: then a pipeline of one rank may carry its name
    repeated: int  # blocks that may be divided to stages
    most_chunks: int  # as many, and one for glue at either end of the model
    refused: Refused

    def plan_fits(self, shapes: Shapes, schedule: int, chunks: int) -> Bools:
        """Shapes that may run a schedule with so many chunks per rank."""
        same = np.ones(len(shapes), dtype=np.int64)
        fits = schedule_fits(
            schedule * same, chunks * same, shapes.pp, shapes.micro_batches, self.most_chunks
        )
        if SCHEDULES[schedule] in SPLIT_BACKWARD:
            fits &= shapes.recompute != MODES.index("operators")
        if self.chunks is not None:
            fits &= shapes.pp * chunks == self.chunks
        if self.schedule_fixed:
            return np.asarray(fits)
        gpipe = any(SCHEDULES[other] == "gpipe" for other, _ in self.schedules)
        if SCHEDULES[schedule] == "1f1b" and gpipe:  # one micro-batch takes the same way as under GPipe
            fits &= shapes.micro_batches > 1
        return np.asarray(fits & ((shapes.pp == 1) == (schedule == NONE)))

    def zero_fits(self, shapes: Shapes, zero: int) -> Bools:
        """Shapes that may have a ZeRO level: 1 to 3 share over several ranks, and of one rank all levels are 0.

        Where the user fixes a level above 0 no rank is alone whose replicas could share with it, but by the user's word.
        """
        one = shapes.dp_shard * shapes.cp == 1
        if self.copy_fixed:
            return np.asarray(may_copy(shapes, self.copy_fixed) & (zero == 3))
        if self.zero_fixed == 0:
            return np.asarray(shapes.dp_shard == 1)
        if zero:
            return np.asarray(~one)
        return np.asarray(one & (self.alone | (shapes.dp_replicate == 1) | (self.zero_fixed is None)))

    def methods(self, zero: int) -> int:
        """How many of the compressions say something at a level of ZeRO, where gradients are summed: 3 alone gathers
        parameters for each pass."""
        if zero == 3:
            return len(self.compressions)
        first = (self.compressions[0].weights, self.compressions[0].copied)
        return sum((one.weights, one.copied) == first for one in self.compressions)

    def copies(self, compression: int) -> bool:
        """Whether a compression is one of those with a second copy, which few variants have."""
        return self.copy_fixed is None and self.compressions[compression].copied is not None

    def actions(self, found: Variants) -> Ints:
        """Forwards and backwards of each variant's schedule."""
        shapes, of = self.shapes, found.shape
        return np.asarray(2 * shapes.pp[of] * found.virtual_stages * shapes.micro_batches[of])

    def secondary(self, found: Variants) -> Ints:
        """The ranks that share a second copy of each variant's parameters; 0 where there is none."""
        ranks = np.zeros(len(found), dtype=np.int64)
        open_ = np.flatnonzero((found.zero == 3) & self.only_data(found.shape))
        for number, one in enumerate(self.compressions if len(open_) else ()):
            rows = open_[found.compression[open_] == number]
            if one.copied is None or not len(rows):
                continue
            shapes, order = self.shapes.take(found.shape[rows]), found.order[rows]
            shared = self._copied(shapes, order, one.copied) if self.copy_fixed is None else self.copy_fixed
            ranks[rows] = np.where(may_copy(shapes, shared), shared, 0)
        return ranks

    def only_data(self, rows: Ints) -> Bools:
        """Which of these shapes are data parallel and nothing else: those that a second copy may have."""
        shapes = self.shapes
        return np.asarray(shapes.pp[rows] * shapes.cp[rows] * shapes.tp[rows] == 1)

    def _copied(self, shapes: Shapes, order: Ints, level: int) -> Ints:
        """Ranks of dp_shard inside a unit of a level of the network; 0 where a level further inside has as many."""
        near = self.meshes.near[order, shapes.mesh, AXES.index("dp_shard")]
        again = (near[:, :level] == near[:, level : level + 1]).any(axis=1)
        return np.asarray(np.where(again, 0, near[:, level]))

    def counts(self) -> Ints:
        """Number of variants of each shape."""
        orders = self.meshes.placed.sum(axis=1)[self.shapes.mesh]
        first, of_plans = alike(self.shapes.pp, self.shapes.micro_batches, self.shapes.recompute)
        few = self.shapes.take(first)
        plans = sum(
            (self.plan_fits(few, s, v) for s, v in self.schedules), np.zeros(len(few), dtype=np.int64)
        )
        first, of_syncs = alike(
            self.shapes.dp_shard, self.shapes.dp_replicate, self.shapes.cp, self.shapes.tp * self.shapes.pp
        )
        few, copies = self.shapes.take(first), [n for n in range(len(self.compressions)) if self.copies(n)]
        alone = few.dp_shard * few.dp_replicate * few.cp == 1
        each = (
            self.zero_fits(few, z) * np.where(alone, 1, self.methods(z) - len(copies) * (z == 3))
            for z in self.zeros
        )
        synced = sum(each, np.zeros(len(few), dtype=np.int64))
        copied = sum(map(self._count_copied, copies), np.zeros(len(self.shapes), dtype=np.int64))
        return np.asarray((orders * synced[of_syncs] + copied) * plans[of_plans], dtype=np.int64)

    def _count_copied(self, compression: int) -> Ints:
        """By shape, the orders that have a second copy with this compression."""
        rows, order = np.nonzero(self.meshes.placed[self.shapes.mesh] * (3 in self.zeros))
        same = np.zeros_like(rows)
        found = Variants(
            shape=rows, order=order, zero=same + 3, schedule=same, virtual_stages=same + 1, compression=same + compression,
        )  # fmt: skip
        return np.bincount(rows[self.secondary(found) > 0], minlength=len(self.shapes))


def build_space(problem: Problem) -> Space:
    """Every mesh, shape and choice that is legal and respects the constraints; empty columns where none is."""
    meshes, schedules = build_meshes(problem), _schedules(problem)
    return Space(
        meshes=meshes,
        shapes=shapes_of(problem, meshes),
        compressions=open_compressions(problem),
        copy_fixed=problem.fixed.shard.secondary,
        offloads=open_offloads(problem),
        zeros=_zeros(problem),
        zero_fixed=problem.fixed.shard.zero,
        alone=problem.fixed.mesh.dp_shard == 1,
        schedules=schedules,
        chunks=_fixed_chunks(problem),
        schedule_fixed=problem.fixed.pipeline.schedule is not None,
        repeated=len(problem.graph.repeated_positions),
        most_chunks=most_chunks(problem.graph),
        refused=refused_kinds(problem, SCHEDULES, {schedule for schedule, _ in schedules}),
    )


def families(space: Space, rows: Ints, placed: Ints) -> tuple[Families, Ints]:
    """Every family of the shapes `rows` whose blocks communicate there, in a fixed order: simpler choices first; and which
    row each is of."""
    columns: list[tuple[Ints, int, int, int]] = []
    for schedule, chunks in space.schedules:
        planned = np.flatnonzero(space.plan_fits(space.shapes.take(rows), schedule, chunks))
        for zero in space.zeros if len(planned) else ():
            shapes = space.shapes.take(rows[planned])
            sharded = planned[space.zero_fits(shapes, zero) & ~space.refused.of(shapes, schedule, zero)]
            columns.append((sharded, zero, schedule, chunks))
    at, (zeros, schedules, chunk_counts) = _columns(columns, 3)
    return Families(
        shape=rows[at], zero=zeros, schedule=schedules, virtual_stages=chunk_counts, placed=placed[at]
    ), at


def spread(space: Space, found: Families, inner: Ints) -> tuple[Variants, Ints]:
    """Every variant of some families, in a fixed order, and which family each is of. `inner`: by family and order the number
    of where blocks communicate, -1 where the order is no other placement."""
    first, which = alike(found.schedule, found.virtual_stages, found.zero)
    columns: list[tuple[Ints, int, int]] = []
    for number in range(len(first)):
        own = np.flatnonzero(which == number)
        placed = inner[own] == found.placed[own][:, None]
        several = _data_parallel(space.shapes, found.shape[own]) > 1
        alone = space.only_data(found.shape[own])
        for order in np.flatnonzero(placed.any(axis=0)).tolist():
            there = placed[:, order]
            columns.append((own[there], order, 0))
            reduces = own[there & several]
            for method in range(1, space.methods(int(found.zero[first[number]]))):
                rows = reduces
                if space.copies(method):
                    rows = own[there & several & alone]
                    rows = rows[_has_copy(space, found.take(rows), order, method)] if len(rows) else rows
                columns.append((rows, order, method))
    of, (orders, methods) = _columns(columns, 2)
    kept = found.take(of)
    return Variants(
        shape=kept.shape, zero=kept.zero, schedule=kept.schedule, virtual_stages=kept.virtual_stages,
        order=orders, compression=methods,
    ), of  # fmt: skip


def variants(space: Space, rows: Ints) -> Variants:
    """Every variant of the shapes `rows`, in a fixed order: simpler choices first."""
    found, _ = families(space, rows, np.zeros_like(rows))
    anywhere = np.where(space.meshes.placed[space.shapes.mesh[found.shape]], 0, -1)
    return spread(space, found, anywhere)[0]


def _columns(parts: Sequence[tuple[Ints, *tuple[int, ...]]], numbers: int) -> tuple[Ints, list[Ints]]:
    """Rows one after the other, and so many numbers that each part says of all of its rows."""
    lengths = [len(part[0]) for part in parts]
    rows = np.concatenate([np.zeros(0, dtype=np.int64), *(part[0] for part in parts)])
    named = [
        np.repeat(np.array([part[1 + i] for part in parts], dtype=np.int64), lengths) for i in range(numbers)
    ]
    return rows, named


def _has_copy(space: Space, found: Families, order: int, compression: int) -> Bools:
    """Which families have a second copy of their parameters under this order and compression."""
    same = np.zeros_like(found.shape)
    every = Variants(
        shape=found.shape, zero=found.zero, schedule=found.schedule, virtual_stages=found.virtual_stages,
        order=same + order, compression=same + compression,
    )  # fmt: skip
    return space.secondary(every) > 0


def _data_parallel(shapes: Shapes, rows: Ints) -> Ints:
    """Ranks over which gradients are summed."""
    return shapes.dp_replicate[rows] * shapes.dp_shard[rows] * shapes.cp[rows]


def schedule_fits(schedule: Ints, chunks: Ints, pp: Ints, micro_batches: Ints, most_chunks: int) -> Bools:
    """What `planner.schedules.schedule_problem` says, on columns; and no more chunks than can be filled."""
    word = {name: schedule == i for i, name in enumerate(SCHEDULES)}
    v_shaped, looped = word["zbv"] | word["dualpipev"], word["interleaved-1f1b"] | word["zb1p"]
    single = word["none"] | word["gpipe"] | word["1f1b"]
    rounds = np.maximum(1, micro_batches // pp)
    fits = (pp * chunks <= most_chunks) & np.where(word["none"], pp == 1, single | (pp > 1))
    fits &= ~v_shaped | (chunks == 2)
    fits &= ~word["interleaved-1f1b"] | (chunks >= 2)
    fits &= v_shaped | looped | (chunks == 1)
    fits &= ~looped | (micro_batches % rounds == 0)
    fits &= ~word["dualpipev"] | (micro_batches >= 2 * pp)
    return np.asarray(fits)


def _schedules(problem: Problem) -> tuple[tuple[int, int], ...]:
    """(schedule, chunks per rank) that may be tried: "none" without a pipeline, and the open ones with one."""
    repeated = len(problem.graph.repeated_positions)
    word, chunks = problem.fixed.pipeline.schedule, problem.fixed.pipeline.virtual_stages
    if word not in (None, *SCHEDULES):
        raise UserError(
            f"pipeline.schedule = {word}: cannot be searched for; use one of {', '.join(SCHEDULES)}"
        )
    most = max(chunks or 0, min(MAX_VIRTUAL_STAGES, repeated // 2))
    tried = only(word, problem.runs.schedules or SCHEDULES)
    several = {"interleaved-1f1b": range(2, most + 1), "zb1p": range(1, most + 1)}
    several |= {"zbv": range(2, 3), "dualpipev": range(2, 3)}
    return tuple(
        (SCHEDULES.index(name), v)
        for name in SCHEDULES
        if name in tried
        for v in several.get(name, range(1, 2))
        if chunks in (None, v)
    )


def _zeros(problem: Problem) -> tuple[int, ...]:
    """Levels of ZeRO that may be tried: the user's or what the software has, and 0 where there is nothing to share."""
    zero = problem.fixed.shard.zero
    tried = problem.runs.zeros or (0, 1, 2, 3) if zero is None else (zero,)
    return tuple(sorted({0, *tried}))


def _fixed_chunks(problem: Problem) -> int | None:
    """Number of chunks that `stage_blocks` or `per_stage` names."""
    blocks, full = problem.fixed.stage_blocks, problem.fixed.recomputed
    if blocks and full and len(blocks) != len(full):
        raise UserError(
            f"pipeline.stage_blocks has {len(blocks)} entries and recompute.per_stage {len(full)}: one per chunk"
        )
    repeated = len(problem.graph.repeated_positions)
    if blocks and sum(blocks) != repeated:
        raise UserError(
            f"pipeline.stage_blocks sums to {sum(blocks)}, but {problem.graph.name} has {repeated} repeated blocks"
        )
    return len(blocks or full or ()) or None
