"""Strategies one or two keys beside a given one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from autoparallel.planner.problem import Problem
from autoparallel.planner.strategy.types import AXES, EmbeddingRule, Mesh, Strategy
from autoparallel.profiles.parts import devices_of_nodes
from benchmarks.random_problems.choices import (
    ALL,
    Choices,
    copies,
    divisors,
    has_experts,
    least_of_chunks,
    legal,
    prime_factors,
)
from benchmarks.random_problems.draw import draw_partition, draw_pipeline, draw_recompute

TRIES = 60
Move = Callable[[Problem, Random, Strategy, Choices], "Strategy | None"]


def neighbours(
    problem: Problem, strategy: Strategy, rng: Random, choices: Choices = ALL
) -> Iterator[tuple[str, Strategy]]:
    """Legal strategies of the problem that differ from `strategy` in one key or two, without end; each with the names of what
    was changed. Keys that follow (the partition of blocks when there are more stages) are drawn anew. Ends where nothing is left
    to change."""
    while True:
        for _ in range(TRIES):
            told, found = _changed(problem, rng, strategy, choices)
            if found is not None and found != strategy and legal(problem, found):
                yield told, found
                break
        else:
            return


def _changed(
    problem: Problem, rng: Random, strategy: Strategy, choices: Choices
) -> tuple[str, Strategy | None]:
    """One move in two of three draws, else two."""
    names, found = [], strategy
    for name in rng.choices(list(MOVES), [MOVES[n][1] for n in MOVES], k=1 if rng.random() < 0.65 else 2):
        made = MOVES[name][0](problem, rng, found, choices)
        if made is None:
            return "", None
        names.append(name)
        found = made
    return " + ".join(names), found


def _factor(problem: Problem, rng: Random, strategy: Strategy, choices: Choices) -> Strategy | None:
    """A factor of one axis, or of several micro-batches, goes to another axis."""
    mesh = strategy.mesh
    giver, taker = rng.sample(AXES, 2)
    primes = prime_factors(getattr(mesh, giver))
    if not primes:
        return None
    factor = rng.choice(primes) * (rng.choice(primes) if len(primes) > 1 and rng.random() < 0.3 else 1)
    if getattr(mesh, giver) % factor:
        return None
    sizes = {giver: getattr(mesh, giver) // factor, taker: getattr(mesh, taker) * factor}
    return _followed(problem, rng, strategy, replace(mesh, **sizes), choices)


def _followed(problem: Problem, rng: Random, strategy: Strategy, mesh: Mesh, choices: Choices) -> Strategy:
    """The strategy on another mesh; what no longer fits to it follows."""
    shared = mesh.dp_shard * mesh.cp * mesh.tp
    ep = max(d for d in divisors(shared) if mesh.ep % d == 0 and d <= mesh.ep)
    groups = mesh.groups if len(mesh.groups) == mesh.pp else ()
    mesh = replace(mesh, ep=ep, groups=groups)
    per_rank = max(strategy.batch.global_ // mesh.data_parallel, 1)
    micro = max(d for d in divisors(per_rank) if strategy.batch.micro % d == 0 and d <= strategy.batch.micro)
    zero = strategy.shard.zero or (rng.choice((1, 2, 3)) if mesh.dp_shard > 1 else 0)
    parallel = strategy.shard.sequence_parallel if mesh.tp > 1 and strategy.mesh.tp > 1 else mesh.tp > 1
    found = replace(
        strategy, mesh=mesh, batch=replace(strategy.batch, micro=micro), tensor=_tensor(strategy, mesh),
        shard=replace(strategy.shard, zero=zero, sequence_parallel=parallel, secondary=0),
    )  # fmt: skip
    return found if mesh.pp == strategy.mesh.pp else _restaged(problem, rng, found, choices)


def _tensor(strategy: Strategy, mesh: Mesh) -> tuple[object, ...]:
    """The plan's own placements where the same degrees still stand; else pricing chooses them."""
    same = (mesh.tp, mesh.ep) == (strategy.mesh.tp, strategy.mesh.ep)
    return strategy.tensor if same else ()


def _restaged(problem: Problem, rng: Random, strategy: Strategy, choices: Choices) -> Strategy:
    """With a schedule and a partition for its pipeline ranks: its own schedule where that can be."""
    pipeline = draw_pipeline(problem, rng, strategy, choices)
    own, pp = strategy.pipeline, strategy.mesh.pp
    if own.schedule not in ("none",) and pp > 1 and rng.random() < 0.6:
        partition = draw_partition(problem, rng, pp * own.virtual_stages)
        pipeline = replace(own, stage_blocks=partition)
    return replace(strategy, pipeline=pipeline, recompute=replace(strategy.recompute, per_stage=()))


def _schedule(problem: Problem, rng: Random, strategy: Strategy, choices: Choices) -> Strategy | None:
    if strategy.mesh.pp == 1:
        return None
    pipeline = draw_pipeline(problem, rng, strategy, choices)
    same = len(pipeline.stage_blocks) == len(strategy.pipeline.stage_blocks)
    if same and rng.random() < 0.7:
        return replace(strategy, pipeline=replace(pipeline, stage_blocks=strategy.pipeline.stage_blocks))
    return replace(strategy, pipeline=pipeline, recompute=replace(strategy.recompute, per_stage=()))


def _partition(problem: Problem, rng: Random, strategy: Strategy, _: Choices) -> Strategy | None:
    """A block or two go from one chunk to another."""
    blocks = list(strategy.pipeline.stage_blocks)
    if len(blocks) < 2:
        return None
    giver, taker = rng.sample(range(len(blocks)), 2)
    count = rng.choice((1, 1, 1, 2))
    if blocks[giver] - count < least_of_chunks(problem, len(blocks))[giver]:
        return None
    blocks[giver] -= count
    blocks[taker] += count
    full = strategy.recompute.per_stage
    kept = tuple(min(f, n) for f, n in zip(full, blocks, strict=True)) if full else ()
    return replace(
        strategy, pipeline=replace(strategy.pipeline, stage_blocks=tuple(blocks)),
        recompute=replace(strategy.recompute, per_stage=kept if any(kept) else ()),
    )  # fmt: skip


def _partly(_: Problem, rng: Random, strategy: Strategy, choices: Choices) -> Strategy | None:
    """Recomputation of one chunk, of all of them, or the mode."""
    blocks = strategy.pipeline.stage_blocks
    if rng.random() < 0.4 or not blocks:
        return replace(strategy, recompute=draw_recompute(rng, strategy, choices))
    mode = strategy.recompute.mode
    base = tuple(blocks) if mode == "full" else (strategy.recompute.per_stage or (0,) * len(blocks))
    full, step = list(base), rng.choice((-1, 1, -2, 2))
    for chunk in range(len(full)) if rng.random() < 0.3 else [rng.randrange(len(full))]:
        full[chunk] = min(blocks[chunk], max(0, full[chunk] + step))
    mode = rng.choice(choices.modes[:-1]) if mode == "full" else mode
    per_stage = tuple(full) if any(full) else ()
    return replace(strategy, recompute=replace(strategy.recompute, mode=mode, per_stage=per_stage))


def _micro(_: Problem, rng: Random, strategy: Strategy, __: Choices) -> Strategy | None:
    own, most = strategy.batch.micro, strategy.micro_batches
    up = [own * p for p in sorted(set(prime_factors(most)))]
    down = [own // p for p in sorted(set(prime_factors(own)))]
    if not up and not down:
        return None
    return replace(strategy, batch=replace(strategy.batch, micro=rng.choice([*up, *down])))


def _zero(_: Problem, rng: Random, strategy: Strategy, __: Choices) -> Strategy:
    return replace(strategy, shard=replace(strategy.shard, zero=rng.choice((0, 1, 2, 3)), secondary=0))


def _secondary(problem: Problem, rng: Random, strategy: Strategy, _: Choices) -> Strategy | None:
    several = copies(problem, strategy.mesh, strategy.shard.zero)
    if not several:
        return None
    other = rng.choice([n for n in (0, *several) if n != strategy.shard.secondary])
    return replace(strategy, shard=replace(strategy.shard, secondary=other))


def _sequence(_: Problem, __: Random, strategy: Strategy, ___: Choices) -> Strategy | None:
    if strategy.mesh.tp == 1:
        return None
    shard = replace(strategy.shard, sequence_parallel=not strategy.shard.sequence_parallel)
    return replace(strategy, shard=shard, tensor=())


def _experts(problem: Problem, rng: Random, strategy: Strategy, _: Choices) -> Strategy | None:
    mesh = strategy.mesh
    if not has_experts(problem):
        return None
    changed = replace(mesh, ep=rng.choice(divisors(mesh.dp_shard * mesh.cp * mesh.tp)))
    return replace(strategy, mesh=changed, tensor=_tensor(strategy, changed))


def _order(_: Problem, rng: Random, strategy: Strategy, __: Choices) -> Strategy:
    order = list(strategy.mesh.order)
    a, b = rng.sample(range(len(order)), 2)
    order[a], order[b] = order[b], order[a]
    mesh, shard = replace(strategy.mesh, order=tuple(order)), replace(strategy.shard, secondary=0)
    return replace(strategy, mesh=mesh, shard=shard)


def _nodes(problem: Problem, rng: Random, strategy: Strategy, _: Choices) -> Strategy | None:
    """Two nodes, or the groups of two pipeline ranks, change places; or one rank goes to another group."""
    mesh, have = strategy.mesh, devices_of_nodes(problem.cluster)
    if len(problem.cluster.groups) > 1 and mesh.groups:
        groups = list(mesh.groups)
        groups[rng.randrange(len(groups))] = rng.randrange(len(problem.cluster.groups))
        return replace(strategy, mesh=replace(mesh, groups=tuple(groups)))
    nodes = list(mesh.placement or range(len(have)))
    if len(nodes) < 2 or (problem.cluster.network is None and len(set(have)) == 1):
        return None
    a, b = rng.sample(range(len(nodes)), 2)
    nodes[a], nodes[b] = nodes[b], nodes[a]
    return replace(strategy, mesh=replace(mesh, placement=tuple(nodes)))


def _offload(_: Problem, rng: Random, strategy: Strategy, choices: Choices) -> Strategy:
    key = rng.choice(("optimizer", "activations"))
    share = rng.choice((*choices.shares, 0.25, 0.75))
    return replace(strategy, offload=replace(strategy.offload, **{key: share}))


def _sync(problem: Problem, rng: Random, strategy: Strategy, choices: Choices) -> Strategy | None:
    """One key of `[grad_sync]`."""
    sync, key = (
        strategy.grad_sync,
        rng.choice(("algorithm", "bucket_mib", "overlap", "compression", "weights")),
    )
    if key == "compression":
        if not problem.allow_lossy:
            return None
        methods = list(sync.compression or ("none",) * len(problem.cluster.levels))
        methods[rng.randrange(len(methods))] = rng.choice(("none", *choices.methods))
        return replace(strategy, grad_sync=replace(sync, compression=tuple(methods)))
    if key == "weights":
        other = "none" if sync.weights != "none" else "int8"
        return replace(strategy, grad_sync=replace(sync, weights=other)) if problem.allow_lossy else None
    value = {
        "algorithm": rng.choice(choices.algorithms), "bucket_mib": rng.choice(choices.buckets_mib), "overlap": not sync.overlap,
    }[key]  # fmt: skip
    return replace(strategy, grad_sync=replace(sync, **{key: value}))


def _tables(_: Problem, rng: Random, strategy: Strategy, __: Choices) -> Strategy:
    """All embedding tables in another tier."""
    tier, hot = rng.choice(("device", "sharded", "parameter-server")), rng.choice((0, 0, 1000))
    rules = () if tier == "device" else (EmbeddingRule(module="*", tier=tier, hot_rows=hot),)
    return replace(strategy, embedding=rules)


def _unpinned(_: Problem, __: Random, strategy: Strategy, ___: Choices) -> Strategy | None:
    """The usual tensor placements instead of the plan's own."""
    return replace(strategy, tensor=()) if strategy.tensor else None


# Each move and how often it is drawn.
MOVES: dict[str, tuple[Move, float]] = {
    "mesh": (_factor, 5), "pipeline.schedule": (_schedule, 4), "pipeline.stage_blocks": (_partition, 2), "recompute": (_partly, 3),
    "batch.micro": (_micro, 3), "shard.zero": (_zero, 2), "shard.secondary": (_secondary, 1), "shard.sequence_parallel": (_sequence, 1), "mesh.ep": (_experts, 1),
    "mesh.order": (_order, 2), "mesh.placement": (_nodes, 1), "offload": (_offload, 2), "grad_sync": (_sync, 2),
    "embedding": (_tables, 0.5), "tensor": (_unpinned, 0.3),
}  # fmt: skip
