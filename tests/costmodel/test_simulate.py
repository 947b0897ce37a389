from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel.costmodel.prediction import BREAKDOWN_KEYS, Prediction, Span
from autoparallel.costmodel.price import Pricer, price_program
from autoparallel.costmodel.program import Axis, BlockWork, Collective, CollectiveOp, Program, StageWork
from autoparallel.costmodel.simulate import prepare_simulation, simulate
from autoparallel.costmodel.timeline import timeline
from autoparallel.costmodel.timetable import pipeline_times, prepare
from autoparallel.planner.expand.schedules import BUILT_SCHEDULES, build_schedule, schedule_problem
from autoparallel.profiles.hardware import Cluster
from autoparallel.profiles.load import load_cluster
from tests.toy_programs import MEBI, gemm, toy_block, toy_program, toy_stage

CLUSTER = load_cluster("h100-sxm:2x8")


def faster(cluster: Cluster, factor: float) -> Cluster:
    levels = tuple(replace(level, bytes_per_s=level.bytes_per_s * factor) for level in cluster.levels)
    return replace(cluster, levels=levels)


def spans_of(program: Program) -> tuple[Span, ...]:
    order, costs = prepare(program.ranks, overlap=program.overlap), price_program(program, CLUSTER)
    return timeline(order, pipeline_times(order, costs), costs)[0]


def explain(found: Prediction) -> str:
    return ", ".join(f"{key} {seconds * 1e3:.3f} ms" for key, seconds in found.breakdown_s)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Pipelines of uneven stages with tensor and data parallelism, ZeRO and recomputation."""
    name = draw(st.sampled_from(BUILT_SCHEDULES))
    ranks = 1 if name == "none" else draw(st.sampled_from((2, 4)))
    virtual = 2 if name in ("zbv", "dualpipev", "interleaved-1f1b") else 1
    micro = draw(st.integers(1, 8).filter(lambda m: schedule_problem(name, ranks, virtual, m) is None))
    zero3, every = draw(st.booleans()), draw(st.booleans())
    stages: list[StageWork] = []
    for stage in range(ranks * virtual):
        work = draw(blocks(zero3))
        last = stage == ranks * virtual - 1
        stages.append(toy_stage(((work, draw(st.integers(1, 4))),), last=last))
    axes = (
        Axis(name="pp", size=ranks, stride=4),
        Axis(name="dp_shard", size=2, stride=2),
        Axis(name="tp", size=2, stride=1),
    )
    schedule = build_schedule(name, ranks, virtual, micro)
    overlap, bucket_bytes = draw(st.booleans()), draw(st.sampled_from((0, 25 * MEBI)))
    return toy_program(
        schedule, tuple(stages), micro,
        axes=axes, overlap=overlap, bucket_bytes=bucket_bytes, reduce_every_micro=every,
    )  # fmt: skip


@st.composite
def blocks(draw: st.DrawFn, zero3: bool) -> BlockWork:
    tokens = draw(st.sampled_from((256, 4096)))
    inline = Collective(
        op=CollectiveOp.ALL_REDUCE, axes=("tp",), size_bytes=draw(st.integers(1, 64)) * MEBI, label="tp"
    )
    gather = Collective(op=CollectiveOp.ALL_GATHER, axes=("dp_shard",), size_bytes=32 * MEBI, label="dp")
    reduce = Collective(op=CollectiveOp.REDUCE_SCATTER, axes=("dp_shard",), size_bytes=64 * MEBI, label="dp")
    return toy_block(
        forward=(gemm(tokens), inline),
        recompute=(gemm(tokens), inline) if draw(st.booleans()) else (),
        gather=gather if zero3 else None,
        reduce=(reduce,),
    )


@settings(max_examples=40)
@given(programs())
def test_parts_sum_to_the_whole(program: Program) -> None:
    found = simulate(program, CLUSTER)
    assert tuple(key for key, _ in found.breakdown_s) == BREAKDOWN_KEYS
    assert sum(seconds for _, seconds in found.breakdown_s) == pytest.approx(found.step_time_s, rel=1e-9), (
        explain(found)
    )
    assert all(seconds >= 0.0 for _, seconds in found.breakdown_s), explain(found)
    for rank in found.memory:
        assert (
            rank.peak == rank.parameters + rank.gradients + rank.optimizer + rank.activations + rank.buffers
        )


@settings(max_examples=40)
@given(programs(), st.floats(1.0, 16.0))
def test_more_bandwidth_never_costs_time(program: Program, factor: float) -> None:
    slow, fast = simulate(program, CLUSTER), simulate(program, faster(CLUSTER, factor))
    assert fast.step_time_s <= slow.step_time_s * (1 + 1e-9)


@settings(max_examples=30)
@given(programs())
def test_spans_of_one_rank_compute_one_at_a_time_and_end_with_the_step(program: Program) -> None:
    spans = spans_of(program)
    assert max(span.end_s for span in spans) == pytest.approx(simulate(program, CLUSTER).step_time_s)
    for rank in range(len(program.ranks)):
        computing = [s for s in spans if s.rank == rank and s.label in ("forward", "backward", "optimizer")]
        for before, after in pairwise(computing):
            assert after.start_s >= before.end_s - 1e-12, (before, after)


@settings(max_examples=20)
@given(programs())
def test_shared_simulations_say_the_same(program: Program) -> None:
    pricer, prepared = Pricer(CLUSTER), prepare_simulation(program.ranks, overlap=program.overlap)
    alone = simulate(program, CLUSTER)
    for _ in range(2):
        assert simulate(program, CLUSTER, pricer=pricer, prepared=prepared) == alone


def test_one_device_communicates_nothing() -> None:
    alone = toy_program(build_schedule("none", 1, 1, 3), (toy_stage(((toy_block(), 4),), last=True),), 3)
    found = dict(simulate(alone, CLUSTER).breakdown_s)
    assert {key for key, seconds in found.items() if seconds > 1e-12} == {"forward", "backward", "optimizer"}


def test_hiding_the_reduction_is_never_slower_than_waiting_for_it() -> None:
    reduce = Collective(op=CollectiveOp.ALL_REDUCE, axes=("dp_replicate",), size_bytes=64 * MEBI, label="dp")
    stage = toy_stage(((toy_block(reduce=(reduce,)), 8),), last=True)
    axes = (Axis(name="dp_replicate", size=8, stride=1),)
    program = toy_program(build_schedule("none", 1, 1, 4), (stage,), 4, axes=axes)
    beside = simulate(program, CLUSTER)
    after = simulate(replace(program, overlap=False), CLUSTER)
    assert beside.step_time_s < after.step_time_s
    assert dict(after.breakdown_s)["dp_comm"] > dict(beside.breakdown_s)["dp_comm"]


def test_the_busiest_rank_is_the_one_broken_down() -> None:
    stages = tuple(toy_stage(((toy_block(), count),), last=count == 4) for count in (2, 8, 3, 4))
    program = toy_program(build_schedule("1f1b", 4, 1, 6), stages, 6)
    forward = [s for s in spans_of(program) if s.rank == 1 and s.label == "forward"]
    assert dict(simulate(program, CLUSTER).breakdown_s)["forward"] == pytest.approx(
        sum(span.end_s - span.start_s for span in forward)
    )


def test_hardware_flops_count_what_is_recomputed_on_every_device() -> None:
    axes = (Axis(name="pp", size=2, stride=2), Axis(name="tp", size=2, stride=1))
    stages = tuple(toy_stage(((toy_block(recompute=(gemm(),)), 3),), last=last) for last in (False, True))
    found = simulate(toy_program(build_schedule("1f1b", 2, 1, 5), stages, 5, axes=axes), CLUSTER)
    assert found.hardware_flops - found.model_flops == gemm().flops * 3 * 2 * 5 * 2
    assert found.devices == 4
    assert found.tokens == 5 * 4096
