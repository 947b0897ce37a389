"""Every complete strategy of a tiny problem: brute force that knows nothing of the search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import permutations, product

from autoparallel.errors import UserError
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.expand.state import zero_level
from autoparallel.planner.problem import NOTHING, Problem, Value, objective_value
from autoparallel.planner.score import score
from autoparallel.planner.strategy.legal import strategy_problems
from autoparallel.planner.strategy.types import (
    Batch,
    GradSync,
    Mesh,
    Offload,
    Pipeline,
    Recompute,
    Shard,
    Strategy,
)
from benchmarks.random_problems.choices import (
    ALL,
    Choices,
    compositions,
    copies,
    device_counts,
    divisors,
    even_blocks,
    has_experts,
    least_of_chunks,
    meets,
    orders_of,
    sizes_of,
    virtual_stages,
)


def every_strategy(
    problem: Problem, choices: Choices = ALL, *, devices: tuple[int, ...] | None = None
) -> Iterator[Strategy]:
    """Each legal complete strategy that meets the problem's constraints, on `devices` (as many as there are).

    Their number is a product over all keys: a model of few blocks on few devices, or few `choices`.
    """
    for count in devices or device_counts(problem):
        for sizes in sizes_of(count):
            for bare in _meshes(problem, sizes, count):
                for shaped in _shaped(problem, bare, choices):
                    for staged in _staged(problem, shaped, choices):
                        yield from _synchronised(problem, staged, choices)


def best_of_all(
    problem: Problem, strategies: Iterable[Strategy], expander: Expander | None = None
) -> tuple[Value, Strategy | None, int]:
    """The best objective of those that fit, who has it (None where none fits), and how many were priced."""
    expander = expander or Expander(graph=problem.graph, cluster=problem.cluster)
    best: tuple[Value, Strategy | None] = (NOTHING, None)
    count = 0
    for strategy in strategies:
        try:
            found = score(problem.graph, problem.cluster, strategy, expander)
        except UserError:  # what only pricing can refuse: tensors that cannot be sharded so
            continue
        count += 1
        if found.feasible and (value := objective_value(problem, found)) < best[0]:
            best = (value, strategy)
    return (*best, count)


def _meshes(problem: Problem, sizes: dict[str, int], devices: int) -> Iterator[Strategy]:
    """Each mesh of these sizes and each micro-batch, in the usual order of axes, legal so far."""
    ranks = devices // (sizes["pp"] * sizes["cp"] * sizes["tp"])
    if problem.global_batch % ranks:
        return
    expert = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
    for ep in divisors(expert) if has_experts(problem) else (1,):
        for micro in divisors(problem.global_batch // ranks):
            yield Strategy(
                batch=Batch(global_=problem.global_batch, micro=micro), mesh=Mesh(**sizes, ep=ep),
                execution=problem.execution,
            )  # fmt: skip


def _shaped(problem: Problem, bare: Strategy, choices: Choices) -> Iterator[Strategy]:
    """Order of the axes, ZeRO, sequence parallelism and what is offloaded; refused as early as can be."""
    mesh = bare.mesh
    zeros = (0, 1, 2, 3) if mesh.dp_shard == 1 else (1, 2, 3)
    sequence = (False, True) if mesh.tp > 1 else (False,)
    for zero, parallel in product(zeros, sequence):
        shard = Shard(zero=zero, sequence_parallel=parallel)
        probe = replace(bare, shard=shard, pipeline=Pipeline(schedule="1f1b"))
        if not _may_be(problem, probe):
            continue
        for order in orders_of(mesh) if choices.orders else (mesh.order,):
            for place, secondary in product(
                _places(problem, mesh.pp, choices), (0, *copies(problem, replace(mesh, order=order), zero))
            ):
                placed, shard = replace(mesh, order=order, **place), replace(shard, secondary=secondary)
                for optimizer, activations in product(choices.shares, choices.shares):
                    offload = Offload(optimizer=optimizer, activations=activations)
                    yield replace(bare, mesh=placed, shard=shard, offload=offload)


def _may_be(problem: Problem, probe: Strategy) -> bool:
    """Whether the mesh is legal under some schedule: a chunk for each rank is all that is asked."""
    blocks = len(problem.graph.repeated_positions)
    if probe.mesh.pp > blocks + 2:
        return False
    found = strategy_problems(problem.graph, problem.cluster, probe)
    return all(text.startswith("mesh.pp x pipeline.virtual_stages") for text in found)


def _places(problem: Problem, pp: int, choices: Choices) -> Iterator[dict[str, tuple[int, ...]]]:
    """Device groups of the pipeline ranks, or nodes in rank order: none named, then each way to name them."""
    yield {}
    cluster = problem.cluster
    if len(cluster.groups) > 1:
        yield from ({"groups": named} for named in product(range(len(cluster.groups)), repeat=pp))
    elif choices.places and (cluster.network is not None or cluster.groups[0].short):
        yield from ({"placement": nodes} for nodes in permutations(range(cluster.nodes)))


def _staged(problem: Problem, shaped: Strategy, choices: Choices) -> Iterator[Strategy]:
    """Schedule, chunks, blocks of each chunk, and what is recomputed."""
    pp, repeated = shaped.mesh.pp, len(problem.graph.repeated_positions)
    for schedule in choices.schedules if pp > 1 else ("none",):
        for virtual in virtual_stages(schedule, min(choices.most_virtual, repeated + 2)):
            chunks = pp * virtual
            if chunks > repeated + 2:
                continue
            for blocks in _partitions(problem, chunks, choices):
                pipeline = Pipeline(schedule=schedule, virtual_stages=virtual, stage_blocks=blocks)
                for recompute in _recomputed(blocks, choices):
                    yield replace(shaped, pipeline=pipeline, recompute=recompute)


def _partitions(problem: Problem, chunks: int, choices: Choices) -> Iterator[tuple[int, ...]]:
    repeated = len(problem.graph.repeated_positions)
    if not repeated:
        yield ()
    elif choices.uneven:
        yield from compositions(repeated, chunks, least_of_chunks(problem, chunks))
    else:
        yield even_blocks(problem, chunks)


def _recomputed(blocks: tuple[int, ...], choices: Choices) -> Iterator[Recompute]:
    for mode in choices.modes:
        yield Recompute(mode=mode)
        if choices.partly and mode != "full":
            for full in product(*(range(n + 1) for n in blocks)):
                if any(full):
                    yield Recompute(mode=mode, per_stage=full)


def _synchronised(problem: Problem, staged: Strategy, choices: Choices) -> Iterator[Strategy]:
    """How gradients are summed; one way where nothing is."""
    if strategy_problems(problem.graph, problem.cluster, staged):
        return
    if staged.mesh.data_parallel * staged.mesh.cp == 1:
        if meets(problem, staged):
            yield staged
        return
    levels = len(problem.cluster.levels)
    compressions: list[tuple[str, ...]] = [()]
    if problem.allow_lossy:
        compressions += [c for c in product(("none", *choices.methods), repeat=levels) if set(c) != {"none"}]
    gathers = zero_level(staged) == 3 and problem.allow_lossy
    for algorithm, bucket, overlap, compression, weights in product(
        choices.algorithms,
        choices.buckets_mib,
        choices.overlaps,
        compressions,
        ("none", "int8") if gathers else ("none",),
    ):
        sync = GradSync(
            algorithm=algorithm, bucket_mib=bucket, overlap=overlap, compression=compression, weights=weights
        )
        strategy = replace(staged, grad_sync=sync)
        if meets(problem, strategy):
            yield strategy
