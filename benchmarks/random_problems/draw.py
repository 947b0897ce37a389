"""Draws a complete strategy of a problem of any size at random."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from autoparallel.planner.problem import Problem
from autoparallel.planner.strategy.legal import head_counts, sequence_lengths
from autoparallel.planner.strategy.types import (
    AXES,
    Batch,
    GradSync,
    Mesh,
    Offload,
    Pipeline,
    Recompute,
    Shard,
    Strategy,
)
from autoparallel.profiles.parts import devices_of_nodes
from benchmarks.random_problems.choices import (
    ALL,
    Choices,
    copies,
    device_counts,
    draw_divisor,
    even_blocks,
    has_experts,
    least_of_chunks,
    legal,
    prime_factors,
    virtual_stages,
)

TRIES = 200


def draw_strategy(problem: Problem, rng: Random, choices: Choices = ALL) -> Strategy | None:
    """A legal complete strategy that meets the constraints; None where many draws gave none.

    Mostly on all devices and with everyday values, so that what is drawn often fits; nothing is left out.
    """
    for _ in range(TRIES):
        mesh = _mesh(problem, rng)
        if mesh is None:
            continue
        strategy = Strategy(
            batch=_batch(problem, rng, mesh), mesh=mesh, shard=_shard(problem, rng, mesh),
            execution=problem.execution, grad_sync=draw_sync(problem, rng, choices),
            offload=Offload(optimizer=draw_share(rng, choices), activations=draw_share(rng, choices)),
        )  # fmt: skip
        strategy = replace(strategy, pipeline=draw_pipeline(problem, rng, strategy, choices))
        strategy = replace(strategy, recompute=draw_recompute(rng, strategy, choices))
        strategy = keeping(problem, strategy)
        if legal(problem, strategy):
            return strategy
    return None


def keeping(problem: Problem, strategy: Strategy) -> Strategy:
    """The strategy with what the user fixed, key by key; it need not be legal any more."""
    for key, wanted in problem.constraints.items():
        section, _, name = key.partition(".")
        if section in ("tensor", "embedding"):
            continue
        part = replace(getattr(strategy, section), **{"global_" if name == "global" else name: wanted})
        strategy = replace(strategy, **{section: part})
    return strategy


def _mesh(problem: Problem, rng: Random) -> Mesh | None:
    """Each prime factor of the devices goes to an axis; those that could not take it are left out."""
    counts = device_counts(problem)
    devices = counts[0] if rng.random() < 0.7 else rng.choice(counts)
    if rng.random() < 0.08:
        devices = max(1, devices // rng.choice((2, 3, 4)))
    sizes = dict.fromkeys(AXES, 1)
    sizes |= {
        axis: int(str(problem.constraints[f"mesh.{axis}"]))
        for axis in AXES
        if f"mesh.{axis}" in problem.constraints
    }
    fixed = 1
    for size in sizes.values():
        fixed *= size
    if devices % fixed:
        return None
    free = [axis for axis in AXES if f"mesh.{axis}" not in problem.constraints]
    weights = {axis: rng.choice((0.0, 0.3, 1.0, 1.0)) for axis in free}
    for prime in sorted(prime_factors(devices // fixed), reverse=True):
        able = [axis for axis in free if _can_take(problem, sizes, axis, prime)]
        if not able:
            return None
        chosen = rng.choices(able, [weights[axis] + 0.05 for axis in able])[0]
        sizes[chosen] *= prime
    shared = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
    ep = draw_divisor(rng, shared) if has_experts(problem) and rng.random() < 0.7 else 1
    order = AXES if rng.random() < 0.7 else tuple(rng.sample(AXES, len(AXES)))
    mesh = Mesh(**sizes, ep=ep, order=order)
    return replace(mesh, **_nodes(problem, rng, mesh))


def _can_take(problem: Problem, sizes: dict[str, int], axis: str, prime: int) -> bool:
    """Whether the axis may grow by the factor, as far as a glance says."""
    size, graph = sizes[axis] * prime, problem.graph
    if axis == "pp":
        return size <= len(graph.repeated_positions) + 2 and (graph.pipeline_cuts or size == 1)
    if axis == "tp":
        return all(heads % size == 0 for heads in head_counts(graph))
    if axis == "cp":
        lengths = sequence_lengths(graph)
        return bool(lengths) and all(length % size == 0 for length in lengths)
    other = sizes["dp_shard" if axis == "dp_replicate" else "dp_replicate"]
    return problem.global_batch % (size * other) == 0


def _nodes(problem: Problem, rng: Random, mesh: Mesh) -> dict[str, tuple[int, ...] | int]:
    """Which nodes, and which groups: mostly as pricing takes them."""
    cluster = problem.cluster
    have = devices_of_nodes(cluster)
    if len(cluster.groups) > 1 and rng.random() < 0.7:
        named = tuple(sorted(rng.randrange(len(cluster.groups)) for _ in range(mesh.pp)))
        return {"groups": named if rng.random() < 0.7 else named[::-1]}
    if cluster.network is not None and rng.random() < 0.6:
        return {"placement": tuple(rng.sample(range(len(have)), len(have)))}
    if len(set(have)) > 1 and rng.random() < 0.5:
        least = rng.choice(sorted(set(have)))
        return {"placement": tuple(n for n, count in enumerate(have) if count >= least), "per_node": least}
    return {}


def _batch(problem: Problem, rng: Random, mesh: Mesh) -> Batch:
    per_rank = max(problem.global_batch // mesh.data_parallel, 1)
    micro = 1 if rng.random() < 0.4 else draw_divisor(rng, per_rank)
    return Batch(global_=problem.global_batch, micro=micro)


def _shard(problem: Problem, rng: Random, mesh: Mesh) -> Shard:
    zero = rng.choice((1, 2, 3)) if mesh.dp_shard > 1 else rng.choice((0, 0, 1, 3))
    parallel = mesh.tp > 1 and problem.graph.tokens_per_sample % mesh.tp == 0 and rng.random() < 0.7
    several = copies(problem, mesh, zero)
    secondary = rng.choice(several) if several and rng.random() < 0.5 else 0
    return Shard(zero=zero, sequence_parallel=parallel, secondary=secondary)


def draw_share(rng: Random, choices: Choices) -> float:
    """Mostly nothing on the host."""
    return 0.0 if rng.random() < 0.75 else rng.choice(choices.shares)


def draw_pipeline(problem: Problem, rng: Random, strategy: Strategy, choices: Choices) -> Pipeline:
    """A schedule of several ranks, chunks and how the blocks are divided."""
    pp, repeated = strategy.mesh.pp, len(problem.graph.repeated_positions)
    if pp == 1:
        return Pipeline(schedule="none", virtual_stages=1, stage_blocks=(repeated,) if repeated else ())
    schedule = rng.choice(choices.schedules)
    most = max(1, min(choices.most_virtual, (repeated + 2) // pp))
    virtual = rng.choice(virtual_stages(schedule, most) or (1,))
    return Pipeline(
        schedule=schedule, virtual_stages=virtual, stage_blocks=draw_partition(problem, rng, pp * virtual)
    )


def draw_partition(problem: Problem, rng: Random, chunks: int) -> tuple[int, ...]:
    """Blocks of each chunk: even, or some of them moved to other chunks."""
    least = least_of_chunks(problem, chunks)
    blocks = list(even_blocks(problem, chunks))
    rng.shuffle(blocks) if rng.random() < 0.3 else None
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 4)) if chunks > 1 else 0):
        giver, taker = rng.sample(range(chunks), 2)
        if blocks[giver] > least[giver]:
            blocks[giver] -= 1
            blocks[taker] += 1
    return tuple(blocks)


def draw_recompute(rng: Random, strategy: Strategy, choices: Choices) -> Recompute:
    """A mode, sometimes with some blocks of some chunks in full."""
    mode, blocks = rng.choice(choices.modes), strategy.pipeline.stage_blocks
    full: tuple[int, ...] = ()
    if mode != "full" and blocks and choices.partly and rng.random() < 0.4:
        share = rng.random()
        full = tuple(min(n, round(n * share * rng.choice((0.5, 1.0, 1.0)))) for n in blocks)
    return Recompute(mode=mode, per_stage=full if any(full) else ())


def draw_sync(problem: Problem, rng: Random, choices: Choices) -> GradSync:
    """Mostly the defaults."""
    methods: tuple[str, ...] = ()
    weights = "int8" if problem.allow_lossy and rng.random() < 0.3 else "none"
    if problem.allow_lossy and rng.random() < 0.5:
        levels = len(problem.cluster.levels)
        methods = tuple(rng.choice(("none", "bf16", *choices.methods)) for _ in range(levels))
    return GradSync(
        algorithm="auto" if rng.random() < 0.6 else rng.choice(choices.algorithms),
        bucket_mib=rng.choice(choices.buckets_mib), overlap=rng.random() < 0.85, compression=methods,
        weights=weights,
    )  # fmt: skip
