"""Context and expert parallelism, split backwards and buckets in the search: true bounds, and found where they help."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from autoparallel.costmodel.buckets import fill_buckets
from autoparallel.planner.problem import Problem
from autoparallel.planner.score import score
from autoparallel.planner.search.bounds.exchanges import ExchangePrices
from autoparallel.planner.search.bounds.outer import bound_variants, expand_quickly, expand_shapes, outer_of
from autoparallel.planner.search.evaluate import evaluate
from autoparallel.planner.search.partition.inner import price_candidate, stage_problem
from autoparallel.planner.search.partition.problem import Partition, partition_value, row_values
from autoparallel.planner.search.partition.quick import even_partition
from autoparallel.planner.search.partition.sizes import chunk_sizes
from autoparallel.planner.search.space.build import build_space, variants
from autoparallel.planner.search.space.candidates import candidate, strategy_of
from autoparallel.planner.strategy.stacks import told
from autoparallel.planner.strategy.types import Execution
from autoparallel.profiles.load import load_cluster
from tests.capture.models import captured
from tests.planned import plan
from tests.toy_graphs import toy_transformer

FOREVER = float("inf")
LLAMA = toy_transformer(layers=4, hidden=256, heads=4, seq=256, vocab=1024)
EAGER = Execution(kernels="eager")
PLAIN = EAGER.stack


def problem(model: str, cluster: str, **constraints: object) -> Problem:
    graph = LLAMA if model == "toy" else captured(model)[2]
    named = {key.replace("__", "."): value for key, value in constraints.items()}
    return Problem(
        graph=graph, cluster=load_cluster(cluster), global_batch=8, constraints=named, execution=EAGER
    )


def running(stack: str, case: Problem, **flags: bool) -> Problem:
    """The problem of who runs this software."""
    return replace(case, execution=replace(told(Execution(), {"execution.stack": stack}), **flags))


CASES: list[tuple[str, str, str, dict[str, object], dict[str, bool]]] = [
    ("toy", "a100-pcie-80gb:2x2", PLAIN, {"mesh.cp": 2}, {}),
    (
        "toy",
        "h100-sxm:1x4",
        PLAIN,
        {"mesh.cp": 2, "mesh.order": ("pp", "dp_replicate", "dp_shard", "tp", "cp")},
        {},
    ),
    ("mixtral", "a100-pcie-80gb:2x2", PLAIN, {}, {}),
    ("mixtral", "h100-sxm:1x4", PLAIN, {"mesh.ep": 4}, {}),
    ("deepseek", "a100-pcie-80gb:2x2", PLAIN, {"mesh.ep": 2}, {}),
    ("toy", "h100-sxm:1x4", PLAIN, {"pipeline.schedule": "zb1p"}, {}),
    ("toy", "h100-sxm:1x4", PLAIN, {"pipeline.schedule": "zbv"}, {}),
    ("toy", "a100-pcie-80gb:2x2", PLAIN, {"shard.zero": 0, "mesh.cp": 2}, {}),
    ("toy", "h100-sxm:1x4", PLAIN, {"shard.zero": 3, "mesh.dp_shard": 1}, {}),
    ("toy", "h100-sxm:1x4", PLAIN, {"pipeline.schedule": "dualpipev"}, {}),
    ("toy", "a100-pcie-80gb:2x2", "megatron-core", {"shard.zero": 1, "mesh.pp": 2}, {}),
    ("toy", "a100-pcie-80gb:2x2", "megatron-deepspeed", {"mesh.pp": 2}, {"blocking_launches": True}),
    ("toy", "h100-sxm:2x4", "deepspeed", {"shard.zero": 3}, {}),
    ("mixtral", "a100-pcie-80gb:2x2", "megatron-2021", {"shard.zero": 3, "mesh.pp": 2}, {}),
    ("toy", "a100-pcie-80gb:2x2", "autoparallel", {}, {}),
    ("toy", "h100-sxm:2x4", "autoparallel", {"shard.zero": 3}, {}),
    ("mixtral", "h100-sxm:2x4", "autoparallel", {"shard.zero": 2}, {}),
    ("mixtral", "h100-sxm:2x4", "megatron-bridge-a2a", {"mesh.ep": 8}, {}),
]


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("model", "cluster", "stack", "constraints", "flags"),
    CASES,
    ids=[f"{m} {stack} {c}" for m, _, stack, c, _ in CASES],
)
def test_no_bound_exceeds_the_simulation(
    model: str, cluster: str, stack: str, constraints: dict[str, object], flags: dict[str, bool]
) -> None:
    case = problem(model, cluster, **constraints)
    if stack != PLAIN:
        case = running(stack, case, **flags)
    outer, rng = outer_of(case), random.Random(1)
    assert outer is not None
    every, bounds = expand_shapes(outer, np.arange(len(outer.space.shapes)), FOREVER, memory=True)
    for row in rng.sample(range(len(every)), min(len(every), 20)):
        chosen = candidate(outer.space, every, row)
        partition = even_partition(len(outer.chain.kinds), chosen.chunks)
        found = evaluate(outer.book.expander, strategy_of(case, chosen, partition))
        shape, shown = int(every.shape[row]), f"{chosen}\n{partition}"
        assert outer.bounds.time_s[shape] <= found.step_time_s * (1 + 1e-9), shown
        assert outer.bounds.memory_bytes[shape] <= found.peak_bytes, shown
        assert bounds.memory_bytes[row] <= found.peak_bytes + 1, shown
        tight = replace(outer, capacity_bytes=float(found.peak_bytes))
        one = every.take(np.array([row]))
        assert bound_variants(tight, one, FOREVER).time_s[0] <= found.step_time_s * (1 + 1e-9), shown
        priced = price_candidate(case, outer.chain, outer.book, chosen)
        states = outer.book.expander.prepared(priced.strategy).states
        stages = stage_problem(case, outer.chain, outer.book, priced, states, 1e18)
        assert partition_value(stages, partition) / 1e12 <= found.step_time_s * (1 + 1e-9), shown
        for r in stages.memory:
            most = found.peak_bytes if r.capacity_bytes is None else found.host_bytes
            assert next(row_values(stages, (r,), partition)) <= most, shown


def test_experts_and_the_rest_are_summed_over_replicas_as_in_the_simulation() -> None:
    """By one collective, which starts once."""
    case = problem(
        "mixtral", "a100-pcie-80gb:4x2", mesh__ep=2, mesh__dp_replicate=2, mesh__tp=2, shard__zero=3
    )
    outer = outer_of(case)
    assert outer is not None
    every, _ = expand_shapes(outer, np.arange(len(outer.space.shapes)), FOREVER)
    priced = price_candidate(case, outer.chain, outer.book, candidate(outer.space, every, 0))
    program = outer.book.expander.program(priced.strategy)
    reduced = [block.reduce for block, _ in program.stages[0].blocks]
    seconds = {
        sum(outer.book.pricer.collective_s(c, program.axes) for c in bucket.collectives)
        for bucket in fill_buckets(reduced, program.bucket_bytes)
    }
    assert {link.reduce_s for link in priced.prices.kept[0]} <= seconds
    assert any(len({(c.op, c.axes) for c in one}) < len(one) for one in reduced), "nothing to be merged"


def test_what_is_exchanged_costs_the_same_whatever_was_priced_before() -> None:
    """Gathers of experts, too, are of other sizes where parameters are encoded."""
    case = replace(
        problem("mixtral", "h100-sxm:2x4", shard__zero=3, mesh__ep=2, mesh__pp=1, batch__micro=1),
        allow_lossy=True,
    )
    outer = outer_of(case)
    assert outer is not None
    every, _ = expand_quickly(outer, np.arange(len(outer.space.shapes)))
    every = every.take(np.array(random.Random(2).sample(range(len(every)), 60)))
    encoded = {outer.space.compressions[one].weights for one in every.compression.tolist()}
    assert len(encoded) > 1, encoded
    together = outer.communication.exchanges.rates(every)
    for row in range(len(every)):
        alone = ExchangePrices.of(case, outer.space, outer.prices, outer.book)
        assert alone.rates(every.take(np.array([row])))[0].tolist() == together[row].tolist()


def nearly_alike(case: Problem, *, experts: int, dense: int) -> Problem:
    """The model grown to so many blocks with experts after so many without."""
    graph = case.graph
    first, *_, last = graph.repeated_positions
    of_block = {graph.chain[i].block: graph.chain[i] for i in graph.repeated_positions}
    small, large = sorted(of_block, key=lambda b: sum(p.numel for p in graph.blocks[b].parameters))
    links = (of_block[small],) * dense + (of_block[large],) * experts
    named = tuple(replace(link, path=f"layers.{i}") for i, link in enumerate(links))
    return replace(case, graph=replace(graph, chain=(*graph.chain[:first], *named, *graph.chain[last + 1 :])))


@pytest.mark.parametrize("ep", [2, 4])
def test_no_bound_of_a_model_of_nearly_equal_blocks_exceeds_the_simulation(ep: int) -> None:
    """Bounds look at the blocks with experts alone; those without may stand anywhere."""
    case = nearly_alike(problem("deepseek", "h100-sxm:2x4", mesh__ep=ep), experts=12, dense=1)
    outer, rng = outer_of(case), random.Random(ep)
    assert outer is not None
    assert outer.repeated == 12
    every, quick = expand_quickly(outer, np.arange(len(outer.space.shapes)))
    for row in rng.sample(range(len(every)), 8):
        chosen = candidate(outer.space, every, row)
        blocks, most = chunk_sizes(case.graph, chosen.chunks)
        while sum(blocks) < len(outer.chain.kinds):
            more = rng.choice([c for c, n in enumerate(blocks) if n < most[c]])
            blocks = tuple(n + (c == more) for c, n in enumerate(blocks))
        free = chosen.mode != "full"
        partition = Partition(
            blocks=blocks, recomputed=tuple(rng.randint(0, n) if free else 0 for n in blocks)
        )
        found = evaluate(outer.book.expander, strategy_of(case, chosen, partition))
        tight = replace(outer, capacity_bytes=float(found.peak_bytes))
        one, limit_s = every.take(np.array([row])), found.step_time_s * (1 + 1e-9)
        assert bound_variants(tight, one, FOREVER).time_s[0] <= limit_s, f"{chosen}\n{partition}"
        assert not np.isfinite(quick.time_s[row]) or quick.time_s[row] <= limit_s, f"{chosen}\n{partition}"


def test_the_best_of_all_axes_is_found() -> None:
    case = problem(
        "mixtral",
        "a100-pcie-80gb:2x2",
        mesh__pp=1,
        mesh__cp=1,
        batch__micro=1,
        recompute__mode="none",
        shard__zero=1,
    )
    space = build_space(case)
    every = variants(space, np.arange(len(space.shapes)))
    blocks = len(case.graph.repeated_positions)
    found = [
        score(case.graph, case.cluster, strategy_of(case, c, even_partition(blocks, 1))).step_time_s
        for c in (candidate(space, every, row) for row in range(len(every)))
    ]
    assert {int(n) for n in space.shapes.ep} == {1, 2, 4}
    best = plan(case)
    assert best.prediction.step_time_s == pytest.approx(min(found), rel=1e-6)


def test_long_sequences_of_few_samples_are_shared() -> None:
    graph = toy_transformer(layers=2, hidden=1024, heads=2, seq=8192, vocab=1024)
    case = Problem(graph=graph, cluster=load_cluster("h100-sxm:1x8"), global_batch=1, execution=EAGER)
    best = plan(case)
    assert best.strategy.mesh.cp > 1, best.strategy.mesh
    alone = plan(replace(case, constraints={"mesh.cp": 1}))
    assert best.prediction.step_time_s < alone.prediction.step_time_s


def test_buckets_grow_with_the_ranks() -> None:
    sizes = []
    for nodes in (1, 64):
        graph = toy_transformer(layers=8, hidden=4096, heads=32, seq=512)
        case = Problem(
            graph=graph, cluster=load_cluster(f"h100-sxm:{nodes}x8"), global_batch=512,
            constraints={"mesh.tp": 1, "mesh.pp": 1, "shard.zero": 1, "mesh.dp_replicate": 1, "recompute.mode": "none", "batch.micro": 1},
        )  # fmt: skip
        sizes.append(plan(case).strategy.grad_sync.bucket_mib)
    assert sizes[0] < sizes[1]
