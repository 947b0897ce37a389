"""A strategy in a few words, as tables and the command line show it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from autoparallel.planner.strategy.types import Strategy

SHORT_LIST = 8  # numbers that a sentence may list one by one
# What each recompute.mode runs a second time in the backward pass.
RECOMPUTED = {
    "selective": "attention",  # its core alone
    "operators": "cheap operators",  # all but matrix products, attention and sums over ranks
    "full": "every block",
}


def strategy_label(strategy: Strategy) -> str:
    """A strategy in a few words: `pp 2 × dp_shard 8, zero 1, 1f1b, micro 1, recompute attention`."""
    mesh = strategy.mesh
    axes = [f"{axis} {getattr(mesh, axis)}" for axis in (*mesh.order, "ep") if getattr(mesh, axis) > 1]
    words = [" × ".join(axes) or "one device"]
    if mesh.dp_shard * mesh.cp > 1:
        words.append(f"zero {strategy.shard.zero}")
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
    return ", ".join(words)


def runs(numbers: Sequence[int]) -> str:
    """A list, long ones with their runs told once: `[8 × 12, 3 × 10]`, `[0 … 15]`; what has no runs is cut short."""
    if len(numbers) <= SHORT_LIST:
        return f"[{', '.join(map(str, numbers))}]"
    parts = [list(same) for _, same in groupby(numbers)]
    told = [f"{len(same)} × {same[0]}" if len(same) > 1 else str(same[0]) for same in parts]
    if len(parts) == len(numbers):
        told = list(_counted_up(numbers))
    if len(told) > SHORT_LIST:
        told = [*map(str, numbers[: SHORT_LIST - 1]), f"… {len(numbers)} in all"]
    return f"[{', '.join(told)}]"


def _counted_up(numbers: Sequence[int]) -> Iterator[str]:
    """`0 … 15` for neighbours that go up by one."""
    first = 0
    for i in range(1, len(numbers) + 1):
        if i < len(numbers) and numbers[i] == numbers[i - 1] + 1:
            continue
        yield str(numbers[first]) if i == first + 1 else f"{numbers[first]} … {numbers[i - 1]}"
        first = i


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
