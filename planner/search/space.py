"""Every strategy that a problem allows, as numpy columns.

The space is a product in two levels, so that millions of strategies need no million rows:

    Shapes      mesh sizes x micro-batch x sequence parallelism x recomputation: what memory and work depend on
    Variants    of some shapes: x ZeRO level x schedule and chunks x placement of the axes x compression

What is left to `planner/search/stages.py` is inside each variant: blocks per chunk, and blocks recomputed per chunk.

Devices: all of the cluster, except that `objective = "cost"` may use any divisor of them, and that a user who
fixes every mesh size fixes the number of devices. cp and ep are axes of the space with the sizes in
`OPEN_AXES`. More than `MAX_VIRTUAL_STAGES` chunks per rank are tried only when the user asks for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import permutations, product
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autoparallel.costmodel.graph import ModelGraph, OpKind
from autoparallel.errors import UserError
from autoparallel.planner.problem import Objective, Problem
from autoparallel.planner.strategy.legal import head_counts, tensor_sizes
from autoparallel.planner.strategy.types import AXES
from autoparallel.profiles.hardware import Cluster

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

T = TypeVar("T")

MODES = ("none", "selective", "full")  # recompute.mode
SCHEDULES = ("none", "gpipe", "1f1b", "interleaved-1f1b", "zb1p", "zbv", "dualpipev")
OPEN_SCHEDULES = SCHEDULES[:4]  # tried unasked; the others when the user names them
NONE = SCHEDULES.index("none")
MESH_KEYS = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
OPEN_AXES = frozenset({"pp", "dp_replicate", "dp_shard", "tp"})  # axes that may be larger than one
# Models with more repeated blocks than this have their chunks of interleaved schedules dealt evenly (`even_share`):
# the ways to deal them grow beyond proof, and a rank waits in every round for the largest chunk of its turn.
UNEVEN_CHUNKS_BLOCKS = 8
MAX_VIRTUAL_STAGES = 8  # chunks per rank tried unasked; bubbles shrink as 1/chunks, messages grow as chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """Mesh sizes, one row a mesh; `placed[i, k]`: order k is the first of those that place mesh i alike;
    `near[k, i, a, u]`: neighbours along AXES[a] inside a unit of level u, when mesh i has order k."""

    sizes: Ints  # columns MESH_KEYS
    orders: tuple[tuple[str, ...], ...]
    placed: Bools
    near: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Columns of the outer level; `mesh` is the row of `Meshes`, `recompute` the index into MODES."""

    mesh: Ints
    pp: Ints
    dp_replicate: Ints
    dp_shard: Ints
    cp: Ints
    tp: Ints
    ep: Ints
    micro: Ints
    micro_batches: Ints
    sequence_parallel: Ints
    recompute: Ints

    def __len__(self) -> int:
        return len(self.mesh)

    def take(self, rows: Ints | Bools) -> Shapes:
        return Shapes(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    @property
    def devices(self) -> Ints:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp


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

    def take(self, rows: Ints | Bools) -> Variants:
        return Variants(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The whole space of a problem: the outer level, and what the inner level is made from."""

    meshes: Meshes
    shapes: Shapes
    compressions: tuple[tuple[str, ...], ...]
    zeros: tuple[int, ...]
    schedules: tuple[tuple[int, int], ...]  # (schedule, chunks per rank), legal for some pp
    chunks: int | None  # number of chunks, where the user deals the blocks
    schedule_fixed: bool  # the user named it: then a pipeline of one rank may carry its name
    uneven: bool  # the user named schedule or chunks: then chunks that cannot be even are tried too
    repeated: int  # blocks that may be dealt to stages
    most_chunks: int  # as many, and one for glue at either end of the model

    def plan_fits(self, shapes: Shapes, schedule: int, chunks: int) -> Bools:
        """Shapes that may run a schedule with so many chunks per rank."""
        same = np.ones(len(shapes), dtype=np.int64)
        fits = schedule_fits(
            schedule * same, chunks * same, shapes.pp, shapes.micro_batches, self.most_chunks
        )
        if self.chunks is not None:
            fits &= shapes.pp * chunks == self.chunks
        elif chunks > 1 and not self.uneven:
            fits &= even_share(self.repeated, shapes.pp * chunks, self.most_chunks)[1]
        return fits if self.schedule_fixed else fits & ((shapes.pp == 1) == (schedule == NONE))

    def counts(self) -> Ints:
        """Number of variants of each shape."""
        shard, replicas = self.shapes.dp_shard, self.shapes.dp_replicate
        orders = self.meshes.placed.sum(axis=1)[self.shapes.mesh]
        zeros = sum(
            zero_fits(np.full_like(shard, z), shard * self.shapes.cp).astype(np.int64) for z in self.zeros
        )
        plans = sum(self.plan_fits(self.shapes, s, v).astype(np.int64) for s, v in self.schedules)
        wires = np.where(shard * replicas * self.shapes.cp > 1, len(self.compressions), 1)
        return np.asarray(orders * zeros * plans * wires, dtype=np.int64)


def divisors(n: int) -> tuple[int, ...]:
    """All divisors of `n`, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def build_space(problem: Problem) -> Space:
    """Every mesh, shape and choice that is legal and respects the constraints; empty columns where none is."""
    meshes = _meshes(problem)
    lossy = problem.allow_lossy
    fixed = problem.fixed_words("grad_sync.compression")
    return Space(
        meshes=meshes,
        shapes=_shapes(problem, meshes),
        compressions=(fixed,) if fixed is not None else compressions(problem.cluster, lossy=lossy),
        zeros=_only(problem.fixed_int("shard.zero"), (0, 1, 2, 3)),
        schedules=_schedules(problem),
        chunks=_fixed_chunks(problem),
        schedule_fixed=problem.fixed_word("pipeline.schedule") is not None,
        uneven=any(key in problem.constraints for key in ("pipeline.schedule", "pipeline.virtual_stages")),
        repeated=len(problem.graph.repeated_positions),
        most_chunks=most_chunks(problem.graph),
    )


def compressions(cluster: Cluster, *, lossy: bool) -> tuple[tuple[str, ...], ...]:
    """None, and where lossy methods are allowed bf16 on each outer part of the network levels."""
    levels = len(cluster.levels)
    if not lossy:
        return ((),)
    return ((), *(("none",) * i + ("bf16",) * (levels - i) for i in range(levels)))


def variants(space: Space, rows: Ints) -> Variants:
    """Every variant of the shapes `rows`, in a fixed order: simpler choices first."""
    columns: list[tuple[Ints, int, int, int, int, int]] = []
    for schedule, chunks in space.schedules:
        planned = rows[space.plan_fits(space.shapes.take(rows), schedule, chunks)]
        for zero in space.zeros if len(planned) else ():
            shard = space.shapes.dp_shard[planned] * space.shapes.cp[planned]
            sharded = planned[zero_fits(np.full_like(planned, zero), shard)]
            placed = space.meshes.placed[space.shapes.mesh[sharded]]
            for order in np.flatnonzero(placed.any(axis=0)):
                hit = sharded[placed[:, order]]
                columns.append((hit, zero, schedule, chunks, int(order), 0))
                reduces = hit[_data_parallel(space.shapes, hit) > 1]
                for wire in range(1, len(space.compressions)):
                    columns.append((reduces, zero, schedule, chunks, int(order), wire))
    lengths = [len(column[0]) for column in columns]
    named = [np.repeat(np.array([c[i] for c in columns], dtype=np.int64), lengths) for i in range(1, 6)]
    shape = np.concatenate([np.zeros(0, dtype=np.int64), *(column[0] for column in columns)])
    zeros, schedules, chunk_counts, orders, wires = named
    return Variants(
        shape=shape, zero=zeros, schedule=schedules, virtual_stages=chunk_counts, order=orders, compression=wires
    )  # fmt: skip


def _data_parallel(shapes: Shapes, rows: Ints) -> Ints:
    """Ranks over which gradients are summed."""
    return shapes.dp_replicate[rows] * shapes.dp_shard[rows] * shapes.cp[rows]


def zero_fits(zero: Ints, shard_ranks: Ints) -> Bools:
    """ZeRO 1 to 3 shard over several ranks; zero 0 needs dp_shard = 1, where every level is the same."""
    return np.asarray((zero == 0) == (shard_ranks == 1))


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


def even_share(repeated: int, chunks: Ints, most_chunks: int) -> tuple[Ints, Bools]:
    """Blocks of a chunk that is not at an end of the model, where several chunks per rank are dealt evenly, and
    whether they can be: all such chunks have as many, the two at the ends share the rest and have no more."""
    share = -(-repeated // chunks)
    bare_ends = 2 - (most_chunks - repeated)  # ends of the model without glue need a block
    even = (chunks - 2) * share + bare_ends <= repeated
    return share, np.asarray(even | (repeated <= UNEVEN_CHUNKS_BLOCKS))


def most_chunks(graph: ModelGraph) -> int:
    """How many pieces the chain may be cut into: its repeated blocks, and the glue at either end."""
    repeated = len(graph.repeated_positions)
    if not graph.pipeline_cuts or not repeated:
        return 1
    return repeated + (not graph.chain[0].repeated) + (not graph.chain[-1].repeated)


def _only(fixed: T | None, choices: Iterable[T]) -> tuple[T, ...]:
    return tuple(choices) if fixed is None else (fixed,)


def _schedules(problem: Problem) -> tuple[tuple[int, int], ...]:
    """(schedule, chunks per rank) that may be tried: "none" without a pipeline, and the open ones with one."""
    repeated = len(problem.graph.repeated_positions)
    word, chunks = problem.fixed_word("pipeline.schedule"), problem.fixed_int("pipeline.virtual_stages")
    most = max(chunks or 0, min(MAX_VIRTUAL_STAGES, repeated // 2))
    several = {"interleaved-1f1b": range(2, most + 1), "zb1p": range(1, most + 1)}
    several |= {"zbv": range(2, 3), "dualpipev": range(2, 3)}
    return tuple(
        (SCHEDULES.index(name), v)
        for name in _only(word, OPEN_SCHEDULES)
        for v in several.get(name, range(1, 2))
        if chunks in (None, v)
    )


def _fixed_chunks(problem: Problem) -> int | None:
    """Number of chunks that `stage_blocks` or `per_stage` names."""
    blocks, full = problem.fixed_ints("pipeline.stage_blocks"), problem.fixed_ints("recompute.per_stage")
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


def tensor_degrees(graph: ModelGraph, degrees: Iterable[int]) -> tuple[int, ...]:
    """Those of `degrees` that `planner.legal` admits: 1, and what divides the attention heads and at least one
    way to shard a parameter."""
    sizes, heads = tensor_sizes(graph), head_counts(graph)
    return tuple(
        d
        for d in degrees
        if d == 1
        or (all(h % d == 0 for h in heads) and any(all(s % d == 0 for s in group) for group in sizes))
    )


def _mesh_sizes(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Sizes of pp, dp_replicate, dp_shard, cp, tp, ep whose product (ep aside) is a device count in use."""
    graph = problem.graph
    fixed = {key: problem.fixed_int(f"mesh.{key}") for key in MESH_KEYS}
    parts = divisors(_usable(problem))
    choices = {key: _only(fixed[key], parts if key in OPEN_AXES else (1,)) for key in MESH_KEYS}
    choices["pp"] = tuple(p for p in choices["pp"] if p <= most_chunks(graph))
    choices["tp"] = tensor_degrees(graph, choices["tp"])
    whole = device_counts(problem)
    for pp, tp, cp, ep in product(choices["pp"], choices["tp"], choices["cp"], choices["ep"]):
        for devices in whole:
            rest, odd = divmod(devices, pp * tp * cp)
            if odd or not rest:
                continue
            for replicate in choices["dp_replicate"]:
                shard, odd = divmod(rest, replicate)
                if odd or (problem.global_batch % rest) or shard not in _only(fixed["dp_shard"], (shard,)):
                    continue
                if shard * cp * tp % ep == 0:
                    yield (pp, replicate, shard, cp, tp, ep)


def device_counts(problem: Problem) -> tuple[int, ...]:
    """How many devices a strategy may use: see the module's docstring."""
    total = _usable(problem)
    sizes = [problem.fixed_int(f"mesh.{key}") for key in AXES]
    known = [size for size in sizes if size is not None]
    if len(known) == len(sizes) or (len(known) == len(sizes) - 1 and sizes[AXES.index("cp")] is None):
        used = int(np.prod(known))
        return (used,) if used <= total else ()
    return divisors(total) if problem.objective == Objective.COST else (total,)


def _usable(problem: Problem) -> int:
    """Devices of the cluster; of the groups that the user names for the pipeline ranks, as many for each rank."""
    groups = problem.fixed_ints("mesh.groups")
    if not groups:
        return problem.cluster.devices
    have = problem.cluster.groups
    return len(groups) * min(have[g].devices // groups.count(g) for g in groups)


def _meshes(problem: Problem) -> Meshes:
    sizes = np.array(sorted(set(_mesh_sizes(problem))), dtype=np.int64).reshape(-1, len(MESH_KEYS))
    fixed = problem.fixed_words("mesh.order")
    orders = (fixed,) if fixed is not None else _orders(sizes)
    if problem.fixed_ints("mesh.groups") and fixed is None:  # each pipeline rank has devices of one group
        orders = tuple(order for order in orders if order[0] == "pp")
    near = neighbours(sizes, orders, problem.cluster)
    return Meshes(sizes=sizes, orders=orders, placed=distinct_orders(sizes, near), near=near)


def _orders(sizes: Ints) -> tuple[tuple[str, ...], ...]:
    """Permutations of the axes that are ever larger than one, the usual order first."""
    used = [axis for axis in AXES if len(sizes) and sizes[:, MESH_KEYS.index(axis)].max() > 1]
    slots = [AXES.index(axis) for axis in used]
    found = []
    for order in permutations(used):
        axes = list(AXES)
        for slot, axis in zip(slots, order, strict=True):
            axes[slot] = axis
        found.append(tuple(axes))
    return tuple(found)


def neighbours(sizes: Ints, orders: tuple[tuple[str, ...], ...], cluster: Cluster) -> Ints:
    """`Meshes.near`: what `costmodel.topology.crossings` prices collectives by."""
    units = [level.size for level in cluster.levels] or [1]
    near = np.zeros((len(orders), len(sizes), len(AXES), len(units)), dtype=np.int64)
    for k, order in enumerate(orders):
        stride = np.ones(len(sizes), dtype=np.int64)
        for axis in reversed(order):
            size = sizes[:, MESH_KEYS.index(axis)]
            for u, unit in enumerate(units):
                aligned = np.gcd(size, np.maximum(unit // stride, 1))
                inside = (u == len(units) - 1) & (stride * size <= unit)
                near[k, :, AXES.index(axis), u] = np.where(inside, size, np.where(unit % stride, 1, aligned))
            stride = stride * size
    return near


def distinct_orders(sizes: Ints, near: Ints) -> Bools:
    """For each mesh, the orders that place it in a new way; none where a group would leave the network.

    Two orders place a mesh alike when every axis has as many neighbours in a unit of each level.
    """
    whole = sizes[:, [MESH_KEYS.index(axis) for axis in AXES]]
    placed = np.ones((len(sizes), len(near)), dtype=np.bool_)
    for k in range(len(near)):
        placed[:, k] = (near[k, :, :, -1] == whole).all(axis=1)
        for earlier in range(k):
            placed[:, k] &= ~(near[k] == near[earlier]).all(axis=(1, 2))
    return placed


def _shapes(problem: Problem, meshes: Meshes) -> Shapes:
    graph, sizes = problem.graph, meshes.sizes
    rows: dict[str, list[Ints]] = {f.name: [] for f in fields(Shapes)}
    modes = _modes(problem)
    fixed_sp = problem.constraints.get("shard.sequence_parallel")
    replicas = sizes[:, 1] * sizes[:, 2]
    per_rank = problem.global_batch // np.maximum(replicas, 1)
    micros = _only(problem.fixed_int("batch.micro"), divisors(problem.global_batch))
    for micro, mode, sequence in product(micros, modes, (0, 1)):
        fits = (per_rank % micro == 0) if micro > 0 else np.zeros(len(sizes), dtype=np.bool_)
        if fixed_sp is not None and bool(sequence) != bool(fixed_sp):
            continue
        if sequence:
            tp = sizes[:, 4]
            fits = fits & (tp > 1) & (graph.tokens_per_sample % tp == 0)
        hit = np.flatnonzero(fits)
        columns = {"mesh": hit, "micro": np.full_like(hit, micro), "recompute": np.full_like(hit, mode)}
        columns |= {key: sizes[hit, i] for i, key in enumerate(MESH_KEYS)}
        columns |= {
            "micro_batches": per_rank[hit] // max(micro, 1),
            "sequence_parallel": np.full_like(hit, sequence),
        }
        for key, column in columns.items():
            rows[key].append(column)
    empty = np.zeros(0, dtype=np.int64)
    return Shapes(**{key: np.concatenate([empty, *parts]) for key, parts in rows.items()})


def _modes(problem: Problem) -> tuple[int, ...]:
    """Recompute modes that differ: "selective" needs attention in a repeated block, "full" a repeated block."""
    word = problem.fixed_word("recompute.mode")
    if word is not None:
        return (MODES.index(word),)
    repeated = {problem.graph.chain[i].block for i in problem.graph.repeated_positions}
    attention = any(op.kind == OpKind.ATTENTION for b in repeated for op in problem.graph.blocks[b].operators)
    return tuple(i for i, kept in enumerate((True, attention, bool(repeated))) if kept)
