"""How much there is to a strategy: what a person prefers less of where predictions do not differ."""

from __future__ import annotations

from autoparallel.planner.strategy.types import Strategy

# Mesh axes that cut the model, data-parallel axes, recomputation, pipeline, offload, compression, sequence parallelism, ZeRO level: the first that differs
# decides.
Complexity = tuple[int, int, int, int, int, int, int, int]


def complexity(strategy: Strategy) -> Complexity:
    """How much there is to a strategy; less is simpler."""
    mesh, recompute, pipeline = strategy.mesh, strategy.recompute, strategy.pipeline
    sync = strategy.grad_sync
    model_axes = (mesh.pp, mesh.cp, mesh.tp, mesh.ep)
    return (
        sum(size > 1 for size in model_axes),
        (mesh.dp_replicate > 1) + (mesh.dp_shard > 1),
        (recompute.mode != "none") + any(recompute.per_stage),
        (pipeline.virtual_stages > 1) + (pipeline.schedule not in ("none", "gpipe", "1f1b")),
        (strategy.offload.optimizer > 0) + (strategy.offload.activations > 0),
        len({method for method in sync.compression if method != "none"}) + (sync.weights != "none"),
        int(strategy.shard.sequence_parallel),
        2 * strategy.shard.zero + (strategy.shard.secondary > 0),
    )
