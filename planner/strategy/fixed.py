"""The keys of a strategy that a user fixes, typed by the schema of its file: what is None is free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypeVar

from pydantic import ValidationError

from autoparallel.errors import UserError
from autoparallel.planner.strategy.errors import explain_validation
from autoparallel.planner.strategy.schema import (
    BatchSection,
    GradSyncSection,
    MeshSection,
    OffloadSection,
    PipelineSection,
    RecomputeSection,
    ShardSection,
    StrategySchema,
)

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """A partial strategy. Lists are read from the properties, as tuples."""

    batch: BatchSection
    mesh: MeshSection
    shard: ShardSection
    pipeline: PipelineSection
    recompute: RecomputeSection
    offload: OffloadSection
    grad_sync: GradSyncSection

    @property
    def groups(self) -> tuple[int, ...]:
        """`mesh.groups`: the device group of each pipeline rank; () where free."""
        return tuple(self.mesh.groups or ())

    @property
    def pp(self) -> int | None:
        """`mesh.pp`, or as many ranks as `mesh.groups` names."""
        return len(self.groups) or self.mesh.pp

    @property
    def sizes(self) -> dict[str, int | None]:
        """Ranks along each axis of the mesh."""
        mesh = self.mesh
        return {
            "pp": self.pp, "dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard, "cp": mesh.cp,
            "tp": mesh.tp, "ep": mesh.ep,
        }  # fmt: skip

    @property
    def order(self) -> tuple[str, ...] | None:
        """`mesh.order`."""
        return None if self.mesh.order is None else tuple(self.mesh.order)

    @property
    def stage_blocks(self) -> tuple[int, ...] | None:
        """`pipeline.stage_blocks`."""
        return None if self.pipeline.stage_blocks is None else tuple(self.pipeline.stage_blocks)

    @property
    def recomputed(self) -> tuple[int, ...] | None:
        """`recompute.per_stage`."""
        return None if self.recompute.per_stage is None else tuple(self.recompute.per_stage)

    @property
    def compression(self) -> tuple[str, ...] | None:
        """`grad_sync.compression`."""
        return None if self.grad_sync.compression is None else tuple(self.grad_sync.compression)


def _given(section: S | None) -> S:
    assert section is not None  # every one of them is there, if empty
    return section


_READ = tuple(f.name for f in fields(Fixed))


def fixed_of(constraints: Mapping[str, object]) -> Fixed:
    """The keys that `constraints` (SECTION.KEY -> value) fixes; encoded gathers of parameters fix ZeRO-3, which alone has them.
    Raises UserError for a value of the wrong type."""
    nested: dict[str, dict[str, object]] = {name: {} for name in _READ}
    for dotted, value in constraints.items():
        section, _, key = dotted.partition(".")
        if section in nested:
            nested[section][key] = list(value) if isinstance(value, tuple) else value
    if nested["grad_sync"].get("weights", "none") != "none":
        nested["shard"].setdefault("zero", 3)
    try:
        parsed = StrategySchema.model_validate(nested)
    except ValidationError as error:
        raise UserError(explain_validation(error, "constraints")) from None
    return Fixed(
        batch=_given(parsed.batch),
        mesh=_given(parsed.mesh),
        shard=_given(parsed.shard),
        pipeline=_given(parsed.pipeline),
        recompute=_given(parsed.recompute),
        offload=_given(parsed.offload),
        grad_sync=_given(parsed.grad_sync),
    )
