from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel.costmodel.memory import activation_profile, live_states, memory_by_rank
from autoparallel.costmodel.prediction import StageMemory
from autoparallel.costmodel.program import (
    Action,
    ActionKind,
    BlockWork,
    Collective,
    CollectiveOp,
    StageWork,
    UnderWay,
)
from autoparallel.planner.expand.schedules import BUILT_SCHEDULES, build_schedule, schedule_problem

K = ActionKind


def block(saved: int = 100, **changes: int | Collective | tuple[Collective, ...] | None) -> BlockWork:
    return BlockWork(
        name="b",
        forward=(),
        backward_input=(),
        backward_weight=(),
        saved_bytes=saved,
        **changes,  # type: ignore[arg-type]
    )


def stage(*blocks: tuple[BlockWork, int], **changes: int) -> StageWork:
    base = {
        "parameter_bytes": 1000,
        "gradient_bytes": 2000,
        "optimizer_bytes": 6000,
        "buffer_bytes": 50,
        **changes,
    }
    return StageWork(blocks=blocks, send=None, optimizer=(), after_step=(), **base)


def memory(
    name: str, ranks: int, virtual: int, micro: int, work: StageWork, *, every: bool = False
) -> tuple[StageMemory, ...]:
    schedule = build_schedule(name, ranks, virtual, micro)
    return memory_by_rank(
        [live_states(actions) for actions in schedule], [work] * (ranks * virtual), reduce_every_micro=every
    )


def gather(size: int) -> Collective:
    return Collective(op=CollectiveOp.ALL_GATHER, axes=("dp_shard",), size_bytes=size)


def test_1f1b_holds_one_micro_batch_for_each_rank_behind_and_its_own() -> None:
    found = memory("1f1b", 4, 1, 8, stage((block(), 2)))
    assert [rank.activations for rank in found] == [4 * 200, 3 * 200, 2 * 200, 200]


def test_1f1b_of_few_micro_batches_holds_no_more_than_those() -> None:
    assert [rank.activations for rank in memory("1f1b", 4, 1, 2, stage((block(), 1)))] == [200, 200, 200, 100]


def test_gpipe_holds_every_micro_batch() -> None:
    assert [rank.activations for rank in memory("gpipe", 2, 1, 7, stage((block(), 3)))] == [2100, 2100]


def test_static_state_is_held_by_every_stage_of_a_rank() -> None:
    found = memory("interleaved-1f1b", 2, 2, 4, stage((block(0), 1)))
    assert (found[0].parameters, found[0].gradients, found[0].optimizer, found[0].buffers) == (
        2000,
        4000,
        12000,
        100,
    )


def test_temporaries_count_on_top_of_what_is_saved_when_the_block_runs() -> None:
    """Forward: 100 + 900 in the first block, 100 + 10 + 20 in the second; backward the reverse."""
    first, second = block(100, forward_temp_bytes=900), block(10, forward_temp_bytes=20)
    assert memory("none", 1, 1, 1, stage((first, 1), (second, 1)))[0].activations == 1000
    first, second = block(100), block(10, backward_temp_bytes=30, recomputed_bytes=500)
    assert memory("none", 1, 1, 1, stage((first, 1), (second, 1)))[0].activations == 100 + 10 + 30 + 500
    first, second = block(100, backward_temp_bytes=700), block(10)
    assert memory("none", 1, 1, 1, stage((first, 1), (second, 1)))[0].activations == 100 + 700


def test_recomputation_saves_all_but_one_block() -> None:
    kept = memory("none", 1, 1, 1, stage((block(100), 10)))[0].activations
    recomputed = memory("none", 1, 1, 1, stage((block(5, recomputed_bytes=95), 10)))[0].activations
    assert (kept, recomputed) == (1000, 10 * 5 + 95)


def test_zero3_holds_the_gathered_parameters_of_a_block_and_of_the_next() -> None:
    found = memory(
        "none", 1, 1, 1, stage((block(0, gather=gather(70)), 3), (block(0, gather=gather(500)), 1))
    )
    assert found[0].buffers == 50 + 70 + 500


def test_whole_gradients_live_until_the_reduction_of_every_micro_batch() -> None:
    scatter = Collective(op=CollectiveOp.REDUCE_SCATTER, axes=("dp_shard",), size_bytes=300)
    work = stage((block(0, reduce=(scatter,)), 3))
    assert memory("none", 1, 1, 1, work)[0].buffers == 50
    assert memory("none", 1, 1, 1, work, every=True)[0].buffers == 50 + 300 + 300


def test_a_split_backward_keeps_what_weights_need() -> None:
    """ZB-1P on two ranks; rank 1 runs I0 F1 I1 W0: one micro-batch in flight and one that waits for its W."""
    all_kept = memory("zb1p", 2, 1, 4, stage((block(100), 1)))[1].activations
    part_kept = memory("zb1p", 2, 1, 4, stage((block(100, weight_saved_bytes=40), 1)))[1].activations
    assert (all_kept, part_kept) == (200, 140)


def test_the_second_half_of_a_backward_makes_gradients_beside_what_was_reduced_last() -> None:
    """Blocks back to front, each of 300 bytes that are reduced: 100 of its own and 40 made; then 450 beside the other's 100."""
    scatter = Collective(op=CollectiveOp.REDUCE_SCATTER, axes=("dp_shard",), size_bytes=300)
    one = block(100, weight_temp_bytes=40, weight_reduced_bytes=450, reduce=(scatter,))
    found = activation_profile(stage((one, 2)), reduce_every_micro=True).weight
    assert (found.activations, found.buffers) == (100, 450)


def test_a_second_half_that_is_a_pass_of_its_own_is_as_large_as_one() -> None:
    scatter = Collective(op=CollectiveOp.REDUCE_SCATTER, axes=("dp_shard",), size_bytes=300)
    one = block(100, backward_temp_bytes=70)
    assert activation_profile(stage((one, 2)), reduce_every_micro=False).weight.activations == 200
    again = activation_profile(stage((replace(one, weight_again=(scatter,)), 2)), reduce_every_micro=False)
    assert again.weight == again.backward


def walk(actions: tuple[Action, ...], works: list[StageWork]) -> int:
    """The definition for blocks without temporaries: the largest sum of saved bytes after any forward."""
    live = peak = 0
    for action in actions:
        saved = sum(b.saved_bytes * count for b, count in works[action.stage].blocks)
        if action.kind is K.FORWARD:
            live += saved
        elif action.kind in (K.BACKWARD, K.BACKWARD_WEIGHT):
            live -= saved
        peak = max(peak, live)
    return peak


@settings(max_examples=60)
@given(st.data())
def test_peak_is_that_of_a_walk_over_all_actions_and_its_parts_sum_to_it(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(BUILT_SCHEDULES))
    ranks = 1 if name == "none" else data.draw(st.integers(2, 4))
    virtual = 2 if name in ("zbv", "dualpipev", "interleaved-1f1b") else 1
    micro = data.draw(st.integers(1, 9).filter(lambda m: schedule_problem(name, ranks, virtual, m) is None))
    works = [
        stage((block(data.draw(st.integers(0, 1000))), data.draw(st.integers(1, 3))))
        for _ in range(ranks * virtual)
    ]
    schedule = build_schedule(name, ranks, virtual, micro)
    found = memory_by_rank([live_states(a) for a in schedule], works, reduce_every_micro=False)
    for actions, rank in zip(schedule, found, strict=True):
        assert rank.activations == walk(actions, works)
        assert rank.peak == sum(
            (rank.parameters, rank.gradients, rank.optimizer, rank.activations, rank.buffers)
        )


def test_states_repeat_in_the_steady_state() -> None:
    few, many = (len(live_states(build_schedule("1f1b", 4, 1, m)[0])) for m in (16, 256))
    assert few == many


@pytest.mark.parametrize("name", ["1f1b", "zb1p"])
def test_more_micro_batches_than_ranks_cost_no_memory(name: str) -> None:
    work = stage((block(), 2))
    assert memory(name, 4, 1, 8, work) == memory(name, 4, 1, 32, work)


def test_what_a_stage_hands_on_lives_until_its_backward() -> None:
    work = stage((block(100, backward_temp_bytes=7), 2), output_bytes=30)
    assert [rank.activations for rank in memory("1f1b", 2, 1, 4, work)] == [2 * 230 + 7, 230 + 7]


def test_what_a_stage_was_handed_lives_until_its_backward_is_over() -> None:
    work = stage((block(100, backward_temp_bytes=7), 2), input_bytes=30)
    assert [rank.activations for rank in memory("1f1b", 2, 1, 4, work)] == [2 * 230 + 7, 230 + 7]


SCATTER = Collective(op=CollectiveOp.REDUCE_SCATTER, axes=("dp_shard",), size_bytes=700)


def test_fsdp1_has_no_reduction_beside_the_next_block() -> None:
    work = stage((block(0, gather=gather(500), reduce=(SCATTER,)), 3))
    beside, alone = (activation_profile(work, reduce_every_micro=True, flat=flat) for flat in (False, True))
    assert (beside.forward.buffers, beside.backward.buffers) == (1000, 2400)
    assert (alone.forward.buffers, alone.backward.buffers) == (1000, 1700)


@pytest.mark.parametrize(
    ("standing", "left", "flat", "peak"),
    [
        (1400, 100, True, 100 + 1400 + 500),  # while it runs: beside its parameters
        (900, 800, True, 100 + 800 + 700 + 500),  # when it is over: beside their copy, and the parameters
        (900, -50, True, 100 + 900 + 500),
        (100, -50, True, 100 - 50 + 700 + 500),
        (1400, 100, False, 100 + 30 + 500 + 700),  # plans: all that its peak may meet
    ],
)
def test_fsdp1_s_gradients_stand_until_the_pass_is_over_and_are_copied_then(
    standing: int, left: int, flat: bool, peak: int
) -> None:
    one = block(
        100, gather=gather(500), reduce=(SCATTER,), backward_temp_bytes=30, standing_temp_bytes=standing,
        left_bytes=left,
    )  # fmt: skip
    found = activation_profile(stage((one, 1)), reduce_every_micro=True, flat=flat).backward
    assert found.activations + found.buffers == peak
    assert found.activations >= 100


def test_gradients_that_are_not_reduced_every_micro_batch_pass_through_a_buffer_of_their_own() -> None:
    one = block(100, reduce=(SCATTER,), backward_temp_bytes=30, standing_temp_bytes=900, left_bytes=800)
    assert activation_profile(stage((one, 1)), reduce_every_micro=False).backward.activations == 130


def test_shares_of_gradients_appear_when_they_are_reduced() -> None:
    """Two blocks of 100 saved bytes; of 40 and 60 bytes of shares, the second's are there when the first runs back."""
    work = stage((block(100, backward_temp_bytes=200), 1), (block(100), 1))
    late = activation_profile(work, reduce_every_micro=False, shards=(40, 60))
    early = activation_profile(work, reduce_every_micro=False)
    assert (early.forward.gradients, late.forward.gradients) == (0, -100)
    assert (early.backward.activations, early.backward.gradients) == (300, 0)
    assert (late.backward.activations, late.backward.gradients) == (300, -40 - 60 + 60)


def test_gradients_and_parameters_of_a_step_s_only_micro_batch_come_and_go() -> None:
    """Two blocks with 100 saved bytes; each makes a gradient of 70 bytes, and has 30 bytes of parameters while a pass needs them."""
    one = block(100, forward_temp_bytes=5, backward_temp_bytes=10, made_bytes=70, passing_bytes=30)
    work = stage((one, 2), parameter_bytes=60, gradient_bytes=140, optimizer_bytes=400, buffer_bytes=0)
    states = live_states(
        [Action(kind=K.FORWARD, stage=0, micro=0), Action(kind=K.BACKWARD, stage=0, micro=0)]
    )
    found = memory_by_rank([states], [work], reduce_every_micro=False)[0]
    # When the second block goes back: both are there, and no gradient. When the first does: one gradient, without the second's.
    assert found.peak == max(400 + 60 + 200 + 10, 400 + 70 + 30 + 100 + 10)
    assert (found.parameters, found.gradients, found.activations) == (60, 0, 210)
    small = replace(work, blocks=((replace(one, saved_bytes=0, backward_temp_bytes=0), 2),))
    last = memory_by_rank([states], [small], reduce_every_micro=False)[0]
    assert last.peak == 400 + 140, "when the step ends, all gradients are there and no parameter is"
    assert (last.parameters, last.gradients) == (0, 140)


def test_the_gradient_of_a_tied_tensor_s_later_use_waits_for_the_first() -> None:
    """Beside the backward of every block before the later use, and not beside that of the later use itself."""
    head, tail = block(100, backward_temp_bytes=50), block(100, backward_temp_bytes=60)
    between = block(100, backward_temp_bytes=200)

    def peak(waiting: int, temp: int) -> int:
        last = replace(tail, waiting_bytes=waiting, backward_temp_bytes=temp)
        work = stage((head, 1), (between, 2), (last, 1))
        return activation_profile(work, reduce_every_micro=False).backward.activations

    assert peak(0, 60) == peak(0, 90) == 500
    assert peak(40, 60) == 540
    assert peak(40, 900) == peak(0, 900) == 1300


def _ending_beside(left: int) -> StageMemory:
    """Of a rank with two stages, the first to end with reductions that leave so many bytes under way."""
    work = stage((block(), 2))
    own = UnderWay(beside=(30, 20), after=(30, 20), gone=(0, 0), left=left, ending=left)
    actions = [Action(s, kind, 0) for s, kind in ((0, K.FORWARD), (1, K.FORWARD), (1, K.BACKWARD), (0, K.BACKWARD))]  # fmt: skip
    works = [work, replace(work, under_way=own)]
    return memory_by_rank([live_states(actions)], works, reduce_every_micro=False, ranks=[actions])[0]


def test_what_reductions_hold_stands_beside_the_last_backward_and_those_of_stages_that_end_later() -> None:
    """The second stage's backward, beside both micro-batches (400) and 20 bytes; the first one's, beside 200 and what is left."""
    assert _ending_beside(0).peak == 2 * (1000 + 2000 + 6000 + 50) + 400 + 20
    assert _ending_beside(500).peak == 2 * (1000 + 2000 + 6000 + 50) + 200 + 500


@given(left=st.integers(0, 1000), more=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_reductions_that_hold_more_never_lower_a_peak(left: int, more: int) -> None:
    assert _ending_beside(left + more).peak >= _ending_beside(left).peak


def test_a_first_half_keeps_what_the_second_needs_of_blocks_that_have_run() -> None:
    """Two blocks that are run again (300 each) and keep 80 of that: the second one beside what the first one keeps."""
    one = block(10, recomputed_bytes=300, weight_saved_bytes=80)
    work = stage((one, 2))
    found = activation_profile(work, reduce_every_micro=False, halves=True).first_half
    assert found is not None
    assert found.activations == 10 + 300 + 80
    assert activation_profile(work, reduce_every_micro=False).backward.activations == 20 + 300
