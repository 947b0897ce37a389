"""A strategy in a few words, as tables and the command line show it."""

from __future__ import annotations

from autoparallel.costmodel.graph import ModelGraph, OpKind
from autoparallel.planner.strategy.types import Strategy

IMAGE_FILTER_DIMS = 4  # channels out and in, height, width

# What each recompute.mode runs a second time in the backward pass.
RECOMPUTED = {
    "selective": "attention",  # its core alone
    "operators": "cheap operators",  # all but matrix products, attention and sums over ranks
    "full": "every block",
}


def sample_word(graph: ModelGraph) -> str:
    """What a sample of a model is: "sequence", "image", or "sample" where it is neither."""
    if graph.tokens_per_sample > 1:
        return "sequence"
    filters = any(
        operator.kind is OpKind.CONV and any(len(p.shape) == IMAGE_FILTER_DIMS for p in block.parameters)
        for block in graph.blocks
        for operator in block.operators
    )
    return "image" if filters else "sample"


def counted(sample: str) -> str:
    """What speeds and prices count, where a sample is called so: "tokens" of sequences, else the samples."""
    return "tokens" if sample == "sequence" else f"{sample}s"


def strategy_label(strategy: Strategy) -> str:
    """A strategy in a few words: `pp 2 × dp_shard 8, zero 1, 1f1b, micro 1, recompute attention`."""
    mesh = strategy.mesh
    axes = [f"{axis} {getattr(mesh, axis)}" for axis in (*mesh.order, "ep") if getattr(mesh, axis) > 1]
    words = [" × ".join(axes) or "one device"]
    if mesh.dp_shard * mesh.cp > 1:
        copied = f" with a second copy in {strategy.shard.secondary}" if strategy.shard.secondary else ""
        words.append(f"zero {strategy.shard.zero}{copied}")
    if strategy.shard.sequence_parallel:
        words.append("sequence parallel")
    if mesh.tp > 1 and whole_matrices(strategy):
        words.append("some matrices whole")
    if mesh.pp > 1:
        chunks = strategy.pipeline.virtual_stages
        words.append(strategy.pipeline.schedule + (f" × {chunks}" if chunks > 1 else ""))
    words.append(f"micro {strategy.batch.micro}")
    if again := recompute_label(strategy):
        words.append(f"recompute {again}")
    if away := offload_label(strategy):
        words.append(f"on the host: {away}")
    if strategy.embedding:
        words.append(tables_label(strategy))
    lossy = [c for c in strategy.grad_sync.compression if c != "none"]
    if lossy:
        words.append("gradients " + "/".join(strategy.grad_sync.compression))
    if strategy.grad_sync.weights != "none" and strategy.shard.zero == 3:
        words.append(f"gathers {strategy.grad_sync.weights}")
    return ", ".join(words)


def whole_matrices(strategy: Strategy) -> tuple[str, ...]:
    """Modules with a parameter that tensor entries keep whole on every tensor-parallel rank."""
    return tuple(
        rule.module for rule in strategy.tensor if any(placed == "replicate" for _, placed in rule.params)
    )


def recompute_label(strategy: Strategy) -> str:
    """What runs a second time: `attention`, `cheap operators + 5 of 32 blocks`, `every block`; "" for nothing."""
    mode, whole = strategy.recompute.mode, sum(strategy.recompute.per_stage)
    blocks = sum(strategy.pipeline.stage_blocks)
    if mode == "full" or (whole and whole == blocks):
        return RECOMPUTED["full"]
    parts = [RECOMPUTED[mode]] if mode != "none" else []
    if whole:
        parts.append(f"{whole} of {blocks} blocks")
    return " + ".join(parts)


def offload_label(strategy: Strategy) -> str:
    """What is kept on the host: `optimizer state, 50 % of the activations`; "" where nothing is."""
    shares = (
        ("optimizer state", strategy.offload.optimizer),
        ("activations", strategy.offload.activations),
    )
    return ", ".join(
        what if share == 1 else f"{100 * share:.3g} % of the {what}" for what, share in shares if share
    )


def tables_label(strategy: Strategy) -> str:
    """Where embedding tables are: `tables sharded + on servers, some rows hot`."""
    tiers = {rule.tier for rule in strategy.embedding}
    names = (("device", "on devices"), ("sharded", "sharded"), ("parameter-server", "on servers"))
    where = " + ".join(words for tier, words in names if tier in tiers)
    hot = any(rule.tier != "device" and rule.hot_rows for rule in strategy.embedding)
    return f"tables {where}" + (" with hot rows" if hot else "")
