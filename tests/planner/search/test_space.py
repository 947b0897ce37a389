"""The space: complete, legal, constrained, and fast to lay out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel.costmodel.collectives import collective_s
from autoparallel.costmodel.program import Axis, Collective, CollectiveOp
from autoparallel.errors import UserError
from autoparallel.planner.expand.expander import mesh_axes
from autoparallel.planner.expand.schedules import schedule_problem
from autoparallel.planner.problem import Objective, Problem
from autoparallel.planner.search.partition.quick import even_partition
from autoparallel.planner.search.space.build import (
    SCHEDULES,
    Space,
    Variants,
    build_space,
    schedule_fits,
    variants,
)
from autoparallel.planner.search.space.candidates import candidate, strategy_of
from autoparallel.planner.search.space.meshes import Ints, device_counts, divisors, tensor_degrees
from autoparallel.planner.search.space.shapes import MODES
from autoparallel.planner.strategy.legal import strategy_problems
from autoparallel.planner.strategy.types import AXES, Batch, Mesh, Strategy
from autoparallel.profiles.load import load_cluster
from tests.planned import plan
from tests.toy_graphs import toy_mlp, toy_transformer
from tests.work import calls

GRAPH = toy_transformer(layers=4, hidden=64, heads=4, seq=32)
Columns = Callable[[Space, Variants], Ints]


def problem_of(cluster: str = "h100-sxm:1x4", batch: int = 8, **more: object) -> Problem:
    return Problem(graph=GRAPH, cluster=load_cluster(cluster), global_batch=batch, **more)  # type: ignore[arg-type]


def strategies(problem: Problem, *, one_of_each: Columns | None = None) -> list[Strategy]:
    """Those of the space, or of each kind that `one_of_each` numbers in its variants the first."""
    space = build_space(problem)
    every = variants(space, np.arange(len(space.shapes)))
    rows = np.arange(len(every))
    if one_of_each is not None:
        _, rows = np.unique(one_of_each(space, every), return_index=True, axis=0)
    blocks = len(problem.graph.repeated_positions)
    found = (candidate(space, every, row) for row in rows.tolist())
    return [strategy_of(problem, c, even_partition(blocks, c.chunks)) for c in found]


@cache
def unconstrained() -> list[Strategy]:
    return strategies(problem_of())


def devices_used(problem: Problem) -> set[int]:
    found = strategies(problem, one_of_each=lambda space, every: space.shapes.devices[every.shape])
    return {s.mesh.devices for s in found}


def of_each_compression(problem: Problem) -> list[Strategy]:
    """A strategy of each level of ZeRO with each of the compressions that it may have."""
    return strategies(problem, one_of_each=lambda _, every: np.stack([every.zero, every.compression], axis=1))


@pytest.mark.parametrize("graph", [GRAPH, toy_mlp(layers=3)], ids=["transformer", "mlp"])
@pytest.mark.parametrize("batch", [4, 6])
def test_everything_in_the_space_is_legal_and_different(graph: object, batch: int) -> None:
    problem = Problem(graph=graph, cluster=load_cluster("h100-sxm:1x4"), global_batch=batch)  # type: ignore[arg-type]
    found = strategies(problem)
    assert len(set(found)) == len(found)
    for strategy in found:
        assert not strategy_problems(problem.graph, problem.cluster, strategy), strategy


def test_every_legal_combination_of_sizes_is_in_the_space() -> None:
    problem = problem_of()
    sizes = (1, 2, 4)
    keys = {
        (s.mesh.pp, s.mesh.dp_replicate, s.mesh.dp_shard, s.mesh.tp, s.shard.zero, s.batch.micro,
         s.pipeline.schedule, s.pipeline.virtual_stages, s.shard.sequence_parallel, s.recompute.mode)
        for s in unconstrained()
    }  # fmt: skip
    base = unconstrained()[0]
    missing = []
    for pp, dpr, dps, tp in product(sizes, repeat=4):
        if pp * dpr * dps * tp != 4:
            continue
        for zero, micro, (schedule, chunks), sequence, mode in product(
            range(4), divisors(8), [("none", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2)], (False, True),
            MODES,
        ):  # fmt: skip
            if 8 % (micro * dpr * dps) or (pp == 1) != (schedule == "none"):
                continue
            if (dps == 1 and zero) or pp * chunks > 6:
                continue
            if schedule == "1f1b" and micro * dpr * dps == 8:  # one micro-batch: the same as GPipe
                continue
            partition = even_partition(4, pp * chunks)
            strategy = Strategy(
                batch=type(base.batch)(global_=8, micro=micro),
                mesh=Mesh(pp=pp, dp_replicate=dpr, dp_shard=dps, tp=tp),
                shard=type(base.shard)(zero=zero, sequence_parallel=sequence),
                pipeline=type(base.pipeline)(schedule=schedule, virtual_stages=chunks, stage_blocks=partition.blocks),
                recompute=type(base.recompute)(mode=mode),
            )  # fmt: skip
            key = (pp, dpr, dps, tp, zero, micro, schedule, chunks, sequence, mode)
            if not strategy_problems(GRAPH, problem.cluster, strategy) and key not in keys:
                missing.append(key)
    assert not missing, missing[:5]


@settings(max_examples=200)
@given(
    schedule=st.sampled_from(SCHEDULES),
    chunks=st.integers(1, 4),
    pp=st.integers(1, 6),
    micro=st.integers(1, 16),
)
def test_the_columns_know_the_schedules_rules(schedule: str, chunks: int, pp: int, micro: int) -> None:
    one = np.array([1])
    fits = schedule_fits(SCHEDULES.index(schedule) * one, chunks * one, pp * one, micro * one, 100)
    assert bool(fits[0]) == (schedule_problem(schedule, pp, chunks, micro) is None)


@settings(max_examples=6)
@given(
    sizes=st.permutations([2, 2, 4, 1]),
    cluster=st.sampled_from(["h100-sxm:2x8", "a100-pcie-80gb:4x4", "gb200:4x4"]),
)
def test_orders_left_out_cost_what_a_kept_one_costs(sizes: list[int], cluster: str) -> None:
    pp, dpr, dps, tp = sizes
    problem = Problem(
        graph=toy_transformer(layers=8, heads=4), cluster=load_cluster(cluster), global_batch=16,
        constraints={"mesh.pp": pp, "mesh.dp_replicate": dpr, "mesh.dp_shard": dps, "mesh.tp": tp},
    )  # fmt: skip
    space = build_space(problem)
    assert len(space.meshes.sizes) == 1
    kept = [o for o, placed in zip(space.meshes.orders, space.meshes.placed[0], strict=True) if placed]

    def prices(order: tuple[str, ...]) -> tuple[float, ...]:
        mesh = Mesh(pp=pp, dp_replicate=dpr, dp_shard=dps, tp=tp, order=order)
        axes = mesh_axes(Strategy(batch=Batch(global_=16, micro=1), mesh=mesh))
        groups = [("pp",), ("dp_replicate",), ("dp_shard",), ("tp",), ("dp_replicate", "dp_shard")]
        return tuple(_all_reduce_s(group, axes, problem) for group in groups)

    known = {prices(order) for order in kept}
    assert len(known) <= len(kept)
    for order in permutations(AXES):
        assert prices(order) in known, order


def _all_reduce_s(group: tuple[str, ...], axes: tuple[Axis, ...], problem: Problem) -> float:
    reduce = Collective(op=CollectiveOp.ALL_REDUCE, axes=group, size_bytes=10**8)
    return collective_s(reduce, axes, problem.cluster)


CONSTRAINED = [
    ({"mesh.tp": 2}, lambda s: s.mesh.tp == 2),
    ({"mesh.order": ("tp", "pp", "dp_replicate", "dp_shard", "cp")}, lambda s: s.mesh.order[0] == "tp"),
    ({"shard.zero": 2}, lambda s: s.shard.zero == 2),
    ({"shard.zero": 3, "mesh.tp": 4}, lambda s: s.shard.zero == 3 and s.mesh.dp_shard == 1),
    ({"shard.zero": 0, "mesh.cp": 2}, lambda s: s.shard.zero == 0 and s.mesh.dp_shard == 1 and s.mesh.cp == 2),
    ({"shard.zero": 1, "mesh.dp_shard": 1}, lambda s: s.shard.zero == 1 and s.mesh.dp_shard == 1),
    ({"batch.micro": 2}, lambda s: s.batch.micro == 2),
    ({"shard.sequence_parallel": True}, lambda s: s.shard.sequence_parallel and s.mesh.tp > 1),
    ({"pipeline.schedule": "gpipe", "mesh.pp": 2}, lambda s: s.pipeline.schedule == "gpipe" and s.mesh.pp == 2),
    ({"pipeline.virtual_stages": 2}, lambda s: s.pipeline.virtual_stages == 2),
    ({"recompute.mode": "full"}, lambda s: s.recompute.mode == "full"),
    ({"pipeline.stage_blocks": (1, 3)}, lambda s: s.mesh.pp * s.pipeline.virtual_stages == 2),
    ({"grad_sync.compression": ("none", "bf16")}, lambda s: s.grad_sync.compression == ("none", "bf16")),
]  # fmt: skip


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("constraints", "holds"), CONSTRAINED, ids=lambda c: ", ".join(c) if isinstance(c, dict) else ""
)
def test_constraints_hold_everywhere_and_leave_the_rest_free(constraints: dict, holds: object) -> None:  # type: ignore[type-arg]
    free, bound = unconstrained(), strategies(problem_of(constraints=constraints))
    assert bound
    assert all(holds(s) for s in bound)  # type: ignore[operator]
    if "mesh.order" not in constraints and "grad_sync.compression" not in constraints:
        expected = [s for s in free if holds(s)]  # type: ignore[operator]
        assert {(s.mesh, s.batch, s.shard) for s in expected} <= {(s.mesh, s.batch, s.shard) for s in bound}


def test_no_replica_keeps_to_itself_what_a_level_of_zero_is_asked_to_share() -> None:
    asked = strategies(problem_of(constraints={"shard.zero": 3}))
    assert all(s.mesh.dp_shard * s.mesh.cp > 1 or s.mesh.dp_replicate == 1 for s in asked)


def test_a_schedule_that_cannot_be_searched_for_is_refused() -> None:
    with pytest.raises(UserError, match="use one of none, gpipe, 1f1b"):
        build_space(problem_of(constraints={"pipeline.schedule": "program"}))


def test_fewer_devices_only_for_cost_or_when_every_size_is_fixed() -> None:
    assert devices_used(problem_of()) == {4}
    assert devices_used(problem_of(objective=Objective.COST)) == {1, 2, 4}
    fixed = {"mesh.pp": 1, "mesh.dp_replicate": 2, "mesh.dp_shard": 1, "mesh.tp": 1}
    assert devices_used(problem_of(constraints=fixed)) == {2}


@given(nodes=st.integers(1, 4), devices=st.integers(1, 8), batch=st.integers(1, 40))
@settings(max_examples=20, deadline=None)
def test_what_is_fast_may_be_cheap(nodes: int, devices: int, batch: int) -> None:
    """Every number of devices that a plan for time may use is open to one for cost."""
    fast = problem_of(f"h100-sxm:{nodes}x{devices}", batch)
    assert set(device_counts(fast)) <= set(device_counts(replace(fast, objective=Objective.COST)))


def test_a_plan_for_cost_costs_no_more_than_one_for_time_where_memory_is_short() -> None:
    """Of every size the fewest devices are cheapest, and do not fit: that hides no larger mesh."""
    cluster = load_cluster("h100-sxm:1x4")
    (group,) = cluster.groups
    device = replace(group.device, memory_bytes=1.5e6, reserve_bytes=0.0)
    fast = replace(problem_of(batch=8), cluster=replace(cluster, groups=(replace(group, device=device),)))
    found, cheap = plan(fast), plan(replace(fast, objective=Objective.COST))
    spent = [one.prediction.step_time_s * one.strategy.mesh.devices for one in (found, cheap)]
    assert cheap.strategy.mesh.devices > 1
    assert spent[1] <= spent[0] * (1 + 1e-9)


def test_far_fewer_devices_are_tried_where_a_step_is_little_work_and_all_where_all_must_work() -> None:
    def used(**changes: object) -> set[int]:
        return devices_used(problem_of("h100-sxm:2x8", **changes))

    assert min(used(batch=2)) == 2
    assert used(batch=2, all_devices=True) == {16}
    assert used(batch=16) == {16, 8}  # 8: a node, which the network does not slow
    assert used(batch=16, all_devices=True) == {16}


def test_compression_is_in_the_space_only_where_lossy_methods_are_allowed() -> None:
    def kinds(problem: Problem) -> set[tuple[str, ...]]:
        return {s.grad_sync.compression for s in of_each_compression(problem)}

    assert kinds(problem_of("h100-sxm:2x2")) == {()}
    assert ("none", "bf16") in kinds(problem_of("h100-sxm:2x2", allow_lossy=True))


def test_compressed_gathers_are_in_the_space_where_zero_3_gathers_and_lossy_methods_are_allowed() -> None:
    def found(**options: Any) -> set[tuple[int, str]]:
        every = of_each_compression(problem_of("h100-sxm:2x2", **options))
        return {(s.shard.zero, s.grad_sync.weights) for s in every}

    assert {weights for _, weights in found()} == {"none"}
    lossy = found(allow_lossy=True)
    assert {zero for zero, weights in lossy if weights == "int8"} == {3}
    assert (3, "none") in lossy
    asked = found(constraints={"grad_sync.weights": "fp8"})
    assert asked == {(3, "fp8")}, "ZeRO-3 alone gathers"


def test_degrees_that_divide_no_sharding_or_not_the_heads_are_left_out() -> None:
    assert tensor_degrees(GRAPH, range(1, 9)) == (1, 2, 4)


def test_counts_are_those_of_the_variants() -> None:
    space = build_space(problem_of("h100-sxm:2x4", 16, allow_lossy=True))
    every = variants(space, np.arange(len(space.shapes)))
    assert np.array_equal(np.bincount(every.shape, minlength=len(space.shapes)), space.counts())


def test_a_million_strategies_are_laid_out_in_a_moment() -> None:
    graph = toy_transformer(layers=126, hidden=256, heads=128, seq=8192)
    problem = Problem(graph=graph, cluster=load_cluster("h100-sxm:2048x8"), global_batch=16384)
    counts: list[int] = []
    made = calls(lambda: counts.append(int(build_space(problem).counts().sum())))
    assert counts[0] > 1_000_000
    assert made < counts[0] / 100, f"{made:,} calls for {counts[0]:,} strategies"


def test_contradictory_lists_are_refused() -> None:
    with pytest.raises(UserError, match=r"sums to 3, but toy has 4"):
        build_space(problem_of(constraints={"pipeline.stage_blocks": (1, 2)}))
    with pytest.raises(UserError, match="one per chunk"):
        build_space(
            problem_of(constraints={"pipeline.stage_blocks": (2, 2), "recompute.per_stage": (1, 1, 1)})
        )
    with pytest.raises(UserError, match="contradicts"):
        problem_of(constraints={"batch.global": 4})
    with pytest.raises(UserError, match="whole number"):
        build_space(problem_of(constraints={"mesh.tp": "two"}))
