"""Tensor-parallel placements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoparallel.costmodel.block_index import BlockIndex
from autoparallel.costmodel.graph import ModelGraph
from autoparallel.errors import UserError
from autoparallel.planner.strategy import Execution, TensorRule
from autoparallel.planner.tensor_plan import TensorPlan
from autoparallel.profiles.hardware import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRequest:
    """What a tensor plan is asked for: all that it depends on besides model and cluster."""

    tp: int
    stride: int
    sequence_parallel: bool
    execution: Execution
    rules: tuple[TensorRule, ...] = ()


def solve_tensor_plan(
    graph: ModelGraph, indices: Sequence[BlockIndex], cluster: Cluster, request: TensorRequest
) -> TensorPlan:
    """Placements of every operator of every distinct block."""
    del graph, indices, cluster
    raise UserError(f"mesh.tp = {request.tp}: tensor parallelism is not planned yet; use mesh.tp = 1")
