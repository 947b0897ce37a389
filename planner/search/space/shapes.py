"""The outer level of the space, as columns: what memory and work depend on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import product

import numpy as np

from autoparallel.costmodel.graph import OpKind
from autoparallel.costmodel.host_memory import host_capacity_bytes
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.space.meshes import MESH_KEYS, Bools, Floats, Ints, Meshes, divisors, only
from autoparallel.planner.strategy.types import Offload

MODES = ("none", "selective", "full", "operators")  # recompute.mode


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
    optimizer_offloaded: Floats  # shares on the host: `offload.optimizer`
    activations_offloaded: Floats  # `offload.activations`

    def __len__(self) -> int:
        return len(self.mesh)

    def take(self, rows: Ints | Bools) -> Shapes:
        return Shapes(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    @property
    def devices(self) -> Ints:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp


def may_copy(shapes: Shapes, ranks: Ints | int) -> Bools:
    """As `planner.strategy.legal` has it of ZeRO-3: which shapes may have a second copy that so many ranks share."""
    alone = shapes.pp * shapes.cp * shapes.tp == 1
    return np.asarray(
        alone
        & (np.asarray(ranks) > 1)
        & (shapes.dp_shard > ranks)
        & (shapes.dp_shard % np.maximum(ranks, 1) == 0)
    )


def shapes_of(problem: Problem, meshes: Meshes) -> Shapes:
    """Every shape that is legal and respects the constraints."""
    graph, sizes = problem.graph, meshes.sizes
    rows: dict[str, list[Ints | Floats]] = {f.name: [] for f in fields(Shapes)}
    modes = _modes(problem)
    fixed_sp = problem.fixed.shard.sequence_parallel
    always = problem.runs.sequence_parallel if fixed_sp is None else None  # the software's, under tp
    replicas = sizes[:, 1] * sizes[:, 2]
    per_rank = problem.global_batch // np.maximum(replicas, 1)
    micros = only(problem.fixed.batch.micro, divisors(problem.global_batch))
    for offload, micro, mode, sequence in product(open_offloads(problem), micros, modes, (0, 1)):
        if offload.activations and MODES[mode] == "operators":  # keeps no whole blocks' (`strategy.legal`)
            continue
        fits = (per_rank % micro == 0) if micro > 0 else np.zeros(len(sizes), dtype=np.bool_)
        if fixed_sp is not None and bool(sequence) != bool(fixed_sp):
            continue
        tp = sizes[:, 4]
        if sequence:
            fits = fits & (tp > 1) & (graph.tokens_per_sample % tp == 0)
        if always is not None and bool(sequence) != always:
            fits = fits & (tp == 1)
        if _moves_to_shards(problem):
            fits = fits & (np.gcd(sizes[:, 3], max(micro, 1)) == 1)
        hit = np.flatnonzero(fits)
        columns: dict[str, Ints | Floats] = {
            "mesh": hit,
            "micro": np.full_like(hit, micro),
            "recompute": np.full_like(hit, mode),
        }
        columns |= {key: sizes[hit, i] for i, key in enumerate(MESH_KEYS)}
        columns |= {
            "micro_batches": per_rank[hit] // max(micro, 1),
            "sequence_parallel": np.full_like(hit, sequence),
        }
        columns |= {
            "optimizer_offloaded": np.full(len(hit), offload.optimizer),
            "activations_offloaded": np.full(len(hit), offload.activations),
        }
        for key, column in columns.items():
            rows[key].append(column)
    empty = np.zeros(0, dtype=np.int64)
    return Shapes(**{key: np.concatenate([empty, *parts]) for key, parts in rows.items()})


def open_offloads(problem: Problem) -> tuple[Offload, ...]:
    """Shares of optimizer state (or half of it) and of activations on the host, where the user fixes none and every host's
    memory is known."""
    known = host_capacity_bytes(problem.cluster) > 0

    def shares(fixed: float | None, tried: tuple[float, ...]) -> tuple[float, ...]:
        return (0.0, *tried) if fixed is None else (fixed,)

    repeated = bool(problem.graph.repeated_positions)
    of_optimizer = shares(problem.fixed.offload.optimizer, (0.5, 1.0) if known else ())
    of_activations = shares(problem.fixed.offload.activations, (1.0,) if known and repeated else ())
    return tuple(Offload(optimizer=o, activations=a) for o, a in product(of_optimizer, of_activations))


def _moves_to_shards(problem: Problem) -> bool:
    """Whether a divisor of cp and of the micro-batch may move to dp_shard."""
    moved = ("mesh.cp", "mesh.dp_shard", "batch.micro", "mesh.order")
    return not any(key in problem.constraints for key in moved)


def _modes(problem: Problem) -> tuple[int, ...]:
    """Recompute modes that differ: "selective" needs attention in a repeated block, "full" a repeated block, and
    "operators" one whose attention is one kernel."""
    word = problem.fixed.recompute.mode
    if word is not None:
        return (MODES.index(word),)
    repeated = {problem.graph.chain[i].block for i in problem.graph.repeated_positions}
    attention = any(op.kind == OpKind.ATTENTION for b in repeated for op in problem.graph.blocks[b].operators)
    whole = bool(repeated) and (not attention or problem.execution.attention != "unfused")
    whole &= not problem.fixed.offload.activations
    legal = {"none": True, "selective": attention, "full": bool(repeated), "operators": whole}
    return tuple(n for n, mode in enumerate(MODES) if legal[mode])
