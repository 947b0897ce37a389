from __future__ import annotations

from dataclasses import replace

import pytest

from autoparallel.costmodel.collectives import collective_s
from autoparallel.costmodel.kernels import host_s, kernel_s
from autoparallel.costmodel.price import Pricer, price_program, price_stage
from autoparallel.costmodel.program import Axis, Collective, CollectiveOp, Program, StageWork
from autoparallel.costmodel.stage_cost import StageCost
from autoparallel.planner.expand.schedules import build_schedule
from autoparallel.profiles.hardware import Device
from autoparallel.profiles.load import load_cluster
from tests.toy_programs import MEBI, gemm, toy_block, toy_program, toy_stage

CLUSTER = load_cluster("h100-sxm:2x8")
AXES = (Axis(name="dp_shard", size=8, stride=2), Axis(name="tp", size=2, stride=1))


def device(compute_slowdown: float = 0.0, comm_slowdown: float = 0.0) -> Device:
    """An H100 whose streams do not disturb each other, unless told so."""
    own = CLUSTER.device
    constants = {
        **own.constants,
        "overlap.compute_slowdown": compute_slowdown,
        "overlap.comm_slowdown": comm_slowdown,
    }
    return replace(own, constants=constants)


def priced(stage: StageWork, on: Device | None = None, **changes: object) -> StageCost:
    program = replace(toy_program(build_schedule("none", 1, 1, 4), (stage,), 4, axes=AXES), **changes)  # type: ignore[arg-type]
    return price_stage(stage, program, on or device(), Pricer(CLUSTER))


def collective(op: CollectiveOp, size: int, axis: str, label: str) -> Collective:
    return Collective(op=op, axes=(axis,), size_bytes=size, label=label)


def seconds(c: Collective) -> float:
    return collective_s(c, AXES, CLUSTER)


GATHER = collective(CollectiveOp.ALL_GATHER, 32 * MEBI, "dp_shard", "dp")
SCATTER = collective(CollectiveOp.REDUCE_SCATTER, 64 * MEBI, "dp_shard", "dp")
GEMM_S = kernel_s(gemm(), CLUSTER.device, "fused")
GEMM_BACKWARD_S = kernel_s(gemm(backward=True), CLUSTER.device, "fused")


def test_a_stage_takes_its_kernels_and_its_inline_collectives() -> None:
    reduce = collective(CollectiveOp.ALL_REDUCE, 16 * MEBI, "tp", "tp")
    cost = priced(toy_stage(((toy_block(forward=(gemm(), reduce)), 3),), last=True))
    assert dict(cost.forward.parts) == pytest.approx({"forward": 3 * GEMM_S, "tp_comm": 3 * seconds(reduce)})
    assert cost.forward.total_s == pytest.approx(3 * (GEMM_S + seconds(reduce)))
    assert cost.backward.total_s == pytest.approx(6 * GEMM_BACKWARD_S)
    assert cost.backward_input.total_s == pytest.approx(3 * GEMM_BACKWARD_S)
    assert cost.backward_weight.total_s == pytest.approx(3 * GEMM_BACKWARD_S)
    assert cost.last_backward == cost.backward
    assert (cost.send_s, cost.reduce_s) == (0.0, 0.0)


def test_a_collective_beside_its_pass_is_waited_for_only_where_kernels_do_not_hide_it() -> None:
    reduce = replace(collective(CollectiveOp.ALL_REDUCE, 1024 * MEBI, "tp", "tp"), beside=True)
    long, short = seconds(reduce), replace(reduce, size_bytes=1)
    cost = priced(toy_stage(((toy_block(forward=(gemm(), reduce)), 1),), last=True))
    assert long > GEMM_S, "the example is one that kernels do not hide"
    assert dict(cost.forward.parts) == pytest.approx({"forward": GEMM_S, "tp_comm": long - GEMM_S})
    cost = priced(toy_stage(((toy_block(forward=(gemm(), short)), 1),), last=True))
    assert seconds(short) < GEMM_S
    assert cost.forward.total_s == pytest.approx(GEMM_S)


def test_a_host_that_waits_for_each_kernel_hides_no_launch() -> None:
    stage = toy_stage(((toy_block(forward=(gemm(), gemm())), 1),), last=True)
    ahead, waiting = priced(stage), priced(stage, blocking_launches=True)
    more_s = waiting.forward.total_s - ahead.forward.total_s
    assert more_s == pytest.approx(2 * host_s(gemm(), CLUSTER.device, "fused"))


def test_a_host_that_waits_for_the_routing_of_tokens_launches_what_follows_after_the_device() -> None:
    exchange = collective(CollectiveOp.ALL_TO_ALL, MEBI, "ep", "ep")
    axes = (Axis(name="dp_shard", size=8, stride=2), Axis(name="ep", size=2, stride=1))
    many = (gemm(64, 64),) * 200  # that the host takes longer to launch than the device to run
    block = toy_block(forward=(gemm(), exchange, *many))
    cost = priced(toy_stage(((block, 1),), last=True), axes=axes)
    call_s = CLUSTER.device.constants["collective.host_s"]
    launched_s = 200 * host_s(many[0], CLUSTER.device, "fused") + call_s
    assert cost.forward.total_s == pytest.approx(GEMM_S + launched_s)


def test_recomputation_runs_with_the_input_gradient() -> None:
    cost = priced(toy_stage(((toy_block(recompute=(gemm(),)), 2),), last=True))
    assert dict(cost.backward.parts)["recompute"] == pytest.approx(2 * GEMM_S)
    assert dict(cost.backward_input.parts)["recompute"] == pytest.approx(2 * GEMM_S)
    assert "recompute" not in dict(cost.backward_weight.parts)


def test_messages_take_the_time_of_the_send() -> None:
    stage = toy_stage(((toy_block(), 1),))
    axes = (Axis(name="pp", size=8, stride=1),)
    cost = priced(stage, axes=axes)
    assert stage.send is not None
    assert cost.send_s == pytest.approx(collective_s(stage.send, axes, CLUSTER))


def test_gathers_hide_behind_the_block_before_but_the_first() -> None:
    cost = priced(toy_stage(((toy_block(gather=GATHER), 4),), last=True))
    exposed = seconds(GATHER) + 3 * max(0.0, seconds(GATHER) - GEMM_S)
    assert dict(cost.forward.parts).get("dp_comm") == pytest.approx(exposed)
    backward_exposed = seconds(GATHER) + 3 * max(0.0, seconds(GATHER) - 2 * GEMM_BACKWARD_S)
    assert dict(cost.backward.parts).get("dp_comm") == pytest.approx(backward_exposed)


def test_reductions_run_beside_the_last_backward_and_the_last_bucket_is_left() -> None:
    cost = priced(toy_stage(((toy_block(reduce=(SCATTER,)), 4),), last=True))
    assert cost.backward.total_s == pytest.approx(8 * GEMM_BACKWARD_S)
    assert cost.last_backward.total_s == pytest.approx(8 * GEMM_BACKWARD_S)
    queue = seconds(SCATTER)
    for _ in range(3):
        queue = max(0.0, queue - 2 * GEMM_BACKWARD_S) + seconds(SCATTER)
    assert cost.reduce_s == pytest.approx(queue)


def test_without_overlap_the_whole_reduction_is_left() -> None:
    cost = priced(toy_stage(((toy_block(reduce=(SCATTER,)), 4),), last=True), overlap=False)
    assert cost.reduce_s == pytest.approx(4 * seconds(SCATTER))
    assert cost.last_backward == cost.backward


def test_one_bucket_for_all_is_reduced_after_the_backward() -> None:
    stage = toy_stage(((toy_block(reduce=(SCATTER,)), 4),), last=True)
    cost = priced(stage, bucket_bytes=10**12)
    assert cost.reduce_s == pytest.approx(seconds(replace(SCATTER, size_bytes=256 * MEBI)))


def test_zero2_reduces_in_every_backward() -> None:
    cost = priced(toy_stage(((toy_block(reduce=(SCATTER,)), 1),), last=True), reduce_every_micro=True)
    assert cost.backward == cost.last_backward
    assert dict(cost.backward.parts)["dp_comm"] == pytest.approx(seconds(SCATTER))
    assert dict(cost.backward_weight.parts)["dp_comm"] == pytest.approx(seconds(SCATTER))
    assert cost.reduce_s == 0.0


def test_what_overlaps_slows_down() -> None:
    stage = toy_stage(((toy_block(reduce=(SCATTER,)), 4),), last=True)
    quiet, loud = priced(stage), priced(stage, device(compute_slowdown=0.2, comm_slowdown=0.3))
    assert quiet.last_backward.total_s < loud.last_backward.total_s <= 1.2 * quiet.last_backward.total_s
    assert quiet.backward == loud.backward


def test_the_optimizer_step_is_followed_by_the_gather_of_parameters() -> None:
    cost = priced(toy_stage(((toy_block(), 1),), last=True, after_step=(GATHER,), tied_reduce=(SCATTER,)))
    assert dict(cost.step.parts)["dp_comm"] == pytest.approx(seconds(GATHER))
    assert dict(cost.step.parts)["optimizer"] > 0.0
    assert cost.tied_s == pytest.approx(seconds(SCATTER))


def test_a_late_gather_of_parameters_is_no_part_of_the_optimizer_step() -> None:
    stage = toy_stage(((toy_block(), 1),), last=True, after_step=(GATHER,))
    plain, late = priced(stage), priced(stage, late_gathers=True)
    assert plain.updated_s == plain.updated_rest_s == 0.0
    assert late.updated_s == pytest.approx(seconds(GATHER))
    assert plain.step.total_s == pytest.approx(late.step.total_s + late.updated_s)


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("gather_bytes", [10**3, 10**9])
def test_a_late_gather_runs_beside_the_forwards_of_the_blocks_that_have_theirs(
    blocks: int, gather_bytes: int
) -> None:
    """A forward of n blocks waits for the first gather, and where gathers are longer than blocks for all but what n - 1 blocks hide."""
    gather = replace(GATHER, size_bytes=gather_bytes)
    stage = toy_stage(((toy_block(), blocks),), last=True, after_step=(gather,))
    cost, whole_s = priced(stage, late_gathers=True), seconds(gather)
    of_one_s = cost.forward.total_s / blocks
    hidden_s = (blocks - 1) * min(of_one_s, whole_s / blocks)
    assert cost.updated_s == pytest.approx(whole_s - hidden_s)
    assert cost.updated_s + cost.updated_rest_s == pytest.approx(whole_s)


def test_equal_stages_are_priced_once_and_groups_pick_the_device() -> None:
    mixed = load_cluster("h100-sxm:1x8")
    slow = load_cluster("a100-sxm-80gb:1x8")
    both = replace(mixed, groups=(*mixed.groups, *slow.groups))
    stage = toy_stage(((toy_block(), 2),), last=True)
    program: Program = toy_program(build_schedule("1f1b", 2, 1, 2), (stage, stage), 2, groups=(0, 1))
    fast_cost, slow_cost = price_program(program, both)
    assert fast_cost.forward.total_s < slow_cost.forward.total_s
    ungrouped = price_program(replace(program, groups=()), both)
    assert ungrouped[0] is ungrouped[1]
    assert ungrouped[0].forward == slow_cost.forward
