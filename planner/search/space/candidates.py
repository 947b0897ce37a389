"""One strategy of the space but for its stages: from a row of the columns to a `Strategy`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from autoparallel.errors import UserError
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.partition.problem import Partition
from autoparallel.planner.search.space.build import SCHEDULES, Space, Variants
from autoparallel.planner.search.space.meshes import MESH_KEYS
from autoparallel.planner.search.space.shapes import MODES, Shapes
from autoparallel.planner.search.space.syncs import Compressed, with_bucket
from autoparallel.planner.strategy.types import (
    Batch,
    EmbeddingAccess,
    GradSync,
    Mesh,
    Offload,
    Pipeline,
    Recompute,
    Servers,
    Shard,
    Strategy,
    TensorRule,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """All of a strategy that is chosen before blocks are divided to stages."""

    mesh: Mesh
    micro: int
    micro_batches: int
    zero: int
    sequence_parallel: bool
    schedule: str
    virtual_stages: int
    mode: str
    offload: Offload
    compression: tuple[str, ...]
    weights: str = "none"
    copied: int | None = None  # the level of the network inside which parameters have a second copy,
    secondary: int = 0  # and the ranks that share it

    @property
    def chunks(self) -> int:
        return self.mesh.pp * self.virtual_stages

    @property
    def size(self) -> tuple[int, int, int]:
        """pp, tp and cp: starts and local search look at the best of each."""
        return self.mesh.pp, self.mesh.tp, self.mesh.cp

    @property
    def actions(self) -> int:
        """Forwards and backwards of the schedule."""
        return 2 * self.chunks * self.micro_batches

    @property
    def schedule_key(self) -> object:
        """What the order of the actions depends on."""
        return (self.schedule, self.mesh.pp, self.virtual_stages, self.micro_batches)


def candidate(space: Space, variants: Variants, row: int) -> Candidate:
    """Row `row` of the columns."""
    s, shape = space.shapes, int(variants.shape[row])
    compressed = space.compressions[int(variants.compression[row])]
    sizes: dict[str, Any] = {
        name: int(getattr(s, name)[shape]) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    }
    return Candidate(
        mesh=Mesh(**sizes, order=space.meshes.orders[int(variants.order[row])]),
        micro=int(s.micro[shape]),
        micro_batches=int(s.micro_batches[shape]),
        zero=int(variants.zero[row]),
        sequence_parallel=bool(s.sequence_parallel[shape]),
        schedule=SCHEDULES[int(variants.schedule[row])],
        virtual_stages=int(variants.virtual_stages[row]),
        mode=MODES[int(s.recompute[shape])],
        offload=Offload(
            optimizer=float(s.optimizer_offloaded[shape]), activations=float(s.activations_offloaded[shape])
        ),
        compression=compressed.gradients,
        weights=compressed.weights,
        copied=compressed.copied,
        secondary=int(space.secondary(variants.take(slice(row, row + 1)))[0]),
    )  # fmt: skip


def strategy_of(
    problem: Problem, chosen: Candidate, partition: Partition, *, bucketed: bool = True
) -> Strategy:
    """The complete strategy, tensor placements aside: those follow from it. Without `bucketed` the size of buckets
    is left as it is."""
    fixed = problem.constraints
    keeps = any(partition.recomputed) or bool(fixed.get("recompute.per_stage"))
    groups, zero = problem.fixed.groups, problem.fixed.shard.zero
    mesh = chosen.mesh if groups is None else _with_groups(chosen.mesh, groups)
    strategy = Strategy(
        batch=Batch(global_=problem.global_batch, micro=chosen.micro),
        mesh=mesh,
        shard=Shard(
            zero=chosen.zero if zero is None else zero,
            sequence_parallel=chosen.sequence_parallel,
            secondary=chosen.secondary,
        ),
        pipeline=Pipeline(
            schedule=chosen.schedule, virtual_stages=chosen.virtual_stages, stage_blocks=partition.blocks
        ),
        recompute=Recompute(mode=chosen.mode, per_stage=partition.recomputed if keeps else ()),
        offload=chosen.offload,
        execution=problem.execution,
        grad_sync=sync_of(problem, Compressed(gradients=chosen.compression, weights=chosen.weights)),
        tensor=rules_of(problem),
        embedding_access=access_of(problem),
        servers=servers_of(problem),
    )
    if "grad_sync.bucket_mib" in fixed or not bucketed:
        return strategy
    return with_bucket(problem, strategy)


def sync_of(problem: Problem, compressed: Compressed) -> GradSync:
    """How gradients are synchronised with this compression: as the user says, or as it is by default."""
    fixed = problem.constraints
    given: dict[str, Any] = {
        key: fixed[f"grad_sync.{key}"]
        for key in ("algorithm", "bucket_mib", "overlap")
        if f"grad_sync.{key}" in fixed
    }
    return GradSync(**given, compression=compressed.gradients, weights=compressed.weights)


def access_of(problem: Problem) -> EmbeddingAccess:
    """How the user says that embedding tables are looked up."""
    return EmbeddingAccess(**_given(problem, "embedding_access", EmbeddingAccess))


def servers_of(problem: Problem) -> Servers:
    """What the user says of parameter servers."""
    return Servers(**_given(problem, "servers", Servers))


def _given(problem: Problem, section: str, kind: type[EmbeddingAccess | Servers]) -> dict[str, Any]:
    """The keys of a section that the user has given, by the field that they are of."""
    keys = {f.name: f"{section}.{f.name}" for f in fields(kind)}
    return {name: problem.constraints[key] for name, key in keys.items() if key in problem.constraints}


def _with_groups(mesh: Mesh, groups: tuple[int, ...]) -> Mesh:
    return Mesh(
        pp=mesh.pp, dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard, cp=mesh.cp, tp=mesh.tp, ep=mesh.ep,
        order=mesh.order, groups=groups,
    )  # fmt: skip


def rules_of(problem: Problem) -> tuple[TensorRule, ...]:
    """The user's tensor entries."""
    rules = problem.constraints.get("tensor", ())
    if not isinstance(rules, tuple) or not all(isinstance(rule, TensorRule) for rule in rules):
        raise UserError("tensor: a list of placements by module is needed")
    return rules


def shape_keys(
    mesh: Mesh, micro: int, sequence_parallel: bool, mode: str, offload: Offload
) -> dict[str, float]:
    """What tells a shape from others, by the columns of `Shapes`."""
    keys: dict[str, float] = {"micro": micro} | {key: getattr(mesh, key) for key in MESH_KEYS}
    keys |= {"sequence_parallel": sequence_parallel, "recompute": MODES.index(mode)}
    return keys | {"optimizer_offloaded": offload.optimizer, "activations_offloaded": offload.activations}


def shape_row(
    shapes: Shapes, mesh: Mesh, micro: int, sequence_parallel: bool, mode: str, offload: Offload
) -> int | None:
    """The row of a shape; None where the space does not have it."""
    rows = np.arange(len(shapes))
    for name, value in shape_keys(mesh, micro, sequence_parallel, mode, offload).items():
        rows = rows[getattr(shapes, name)[rows] == value]
    return int(rows[0]) if len(rows) else None
