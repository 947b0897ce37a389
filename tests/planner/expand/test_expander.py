"""Programs of strategies: what the ranks hold and do adds up to the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel.costmodel.program import Kernel, Program
from autoparallel.planner.expand.chain import even_stages, stage_ranges
from autoparallel.planner.expand.expander import Expander, mesh_axes
from autoparallel.planner.score import score
from autoparallel.planner.strategy.types import (
    Batch,
    Execution,
    GradSync,
    Mesh,
    Pipeline,
    Recompute,
    Shard,
    Strategy,
)
from autoparallel.profiles.load import load_cluster
from tests.toy_graphs import toy_transformer

CLUSTER = load_cluster("h100-sxm:1x8")
GRAPH = toy_transformer(layers=4)
EXPANDER = Expander(GRAPH, CLUSTER)
ADAMW_BYTES = 12  # fp32 master copy and two fp32 moments


def plan(*, pp: int = 1, blocks: tuple[int, ...] = (), zero: int = 0, schedule: str = "", **mesh) -> Strategy:
    return Strategy(
        batch=Batch(global_=16, micro=1), mesh=Mesh(pp=pp, **mesh), shard=Shard(zero=zero),
        pipeline=Pipeline(
            schedule=schedule or ("1f1b" if pp > 1 else "none"), stage_blocks=blocks or even_stages(4, pp)
        ),
    )  # fmt: skip


def program(strategy: Strategy, graph=GRAPH) -> Program:
    return (EXPANDER if graph is GRAPH else Expander(graph, CLUSTER)).program(strategy)


def parameters(found: Program) -> int:
    return sum(work.parameters * count for stage in found.stages for work, count in stage.blocks)


def flops(found: Program) -> int:
    return sum(
        s.flops * s.count * count
        for stage in found.stages
        for work, count in stage.blocks
        for s in (*work.forward, *work.backward_input, *work.backward_weight)
        if isinstance(s, Kernel)
    )


@pytest.mark.parametrize("blocks", [(4,), (2, 2), (1, 3), (1, 1, 1, 1)])
def test_stages_hold_the_model_and_run_its_flops(blocks: tuple[int, ...]) -> None:
    found = program(plan(pp=len(blocks), blocks=blocks))
    assert parameters(found) == GRAPH.parameter_count
    assert flops(found) == GRAPH.model_flops(1)
    assert [sum(n for w, n in s.blocks if w.name.startswith("ToyLayer")) for s in found.stages] == list(
        blocks
    )


@pytest.mark.parametrize("blocks", [(4, 0), (0, 4), (0, 4, 0)])
def test_a_stage_at_an_end_may_be_glue_alone(blocks: tuple[int, ...]) -> None:
    strategy = replace(plan(pp=len(blocks), blocks=blocks), mesh=Mesh(pp=len(blocks)))
    found = program(strategy)
    assert parameters(found) == GRAPH.parameter_count
    names = [[w.name for w, _ in stage.blocks] for stage in found.stages]
    assert all(names), names
    assert names[0][0] == "Embedding"
    assert names[-1][-1] == "Head"


def test_tensor_parallel_ranks_hold_the_matrices_once() -> None:
    found = program(plan(tp=4))
    expected = 0
    placed = EXPANDER.tensor_plan(plan(tp=4)).blocks
    for link in GRAPH.chain:
        shapes = {p.name: p.numel for p in GRAPH.blocks[link.block].parameters}
        expected += sum(shapes[n] // (4 if p.startswith("S") else 1) for n, p in placed[link.block].params)
    assert parameters(found) == expected < GRAPH.parameter_count


def test_glue_stands_in_the_first_and_last_stage() -> None:
    first, second = program(plan(pp=2)).stages
    assert first.blocks[0][0].name == "Embedding"
    assert second.blocks[-1][0].name == "Head"
    assert first.send is not None
    assert second.send is None


@pytest.mark.parametrize(("zero", "shares"), [(0, (1, 1, 1)), (1, (1, 1, 4)), (2, (1, 4, 4)), (3, (4, 4, 4))])
def test_zero_levels_shard_optimizer_then_gradients_then_parameters(
    zero: int, shares: tuple[int, ...]
) -> None:
    mesh = {"dp_replicate": 4} if zero == 0 else {"dp_shard": 4}
    (stage,) = program(plan(zero=zero, **mesh)).stages
    n = GRAPH.parameter_count
    found = (stage.parameter_bytes, stage.gradient_bytes, stage.optimizer_bytes)
    assert found == tuple(n * b // share for b, share in zip((2, 4, ADAMW_BYTES), shares, strict=True))


@pytest.mark.parametrize(
    ("zero", "mesh", "expected"),
    [
        (0, {"dp_replicate": 4}, [("all_reduce", ("dp_replicate",))]),
        (1, {"dp_shard": 4}, [("reduce_scatter", ("dp_shard",))]),
        (3, {"dp_shard": 2, "dp_replicate": 2},
         [("reduce_scatter", ("dp_shard",)), ("all_reduce", ("dp_replicate",))]),
        (1, {"dp_shard": 2, "cp": 2}, [("reduce_scatter", ("dp_shard", "cp"))]),
        (0, {}, []),
    ],
)  # fmt: skip
def test_gradients_are_reduced_over_every_rank_that_saw_other_tokens(zero, mesh, expected) -> None:
    (stage,) = program(plan(zero=zero, **mesh)).stages
    for work, _ in stage.blocks:
        assert [(c.op.value, c.axes) for c in work.reduce] == expected
        if expected:
            assert work.reduce[0].size_bytes == work.trainable * 4
        if len(expected) == 2:
            assert work.reduce[1].size_bytes == work.trainable * 4 // 2


def test_only_zero_3_gathers_parameters_and_only_zero_1_and_2_gather_after_the_step() -> None:
    for zero in (1, 2, 3):
        (stage,) = program(plan(zero=zero, dp_shard=4)).stages
        assert all((work.gather is not None) == (zero == 3) for work, _ in stage.blocks)
        assert bool(stage.after_step) == (zero < 3)
        assert program(plan(zero=zero, dp_shard=4)).reduce_every_micro == (zero >= 2)


def test_gathered_parameters_travel_in_the_compute_dtype() -> None:
    wide = replace(plan(zero=3, dp_shard=4), execution=Execution(param_dtype="fp32", master_weights=False))
    (stage,) = program(wide).stages
    assert all(w.gather is not None and w.gather.size_bytes == 2 * w.parameters for w, _ in stage.blocks)


def test_tied_parameters_count_once_on_one_rank_and_are_summed_across_two() -> None:
    tied = toy_transformer(tied=True)
    assert parameters(program(plan(), tied)) == tied.parameter_count
    alone = program(plan(), tied).stages[0]
    assert alone.tied_reduce == ()
    first, last = program(plan(pp=2), tied).stages
    assert (
        [c.size_bytes for c in first.tied_reduce]
        == [c.size_bytes for c in last.tied_reduce]
        == [128 * 64 * 4]
    )
    v = replace(plan(pp=2), pipeline=Pipeline(schedule="zbv", virtual_stages=2, stage_blocks=(1, 1, 1, 1)))
    assert all(s.tied_reduce == () for s in program(v, tied).stages), "a V puts both ends on one rank"


def test_messages_between_stages_are_one_hidden_state_and_shrink_under_sequence_parallelism() -> None:
    strategy = plan(pp=2, tp=2)
    eager = replace(strategy, execution=Execution(kernels="eager"))
    sequence = replace(strategy, shard=Shard(sequence_parallel=True))
    size = 32 * 64 * 2
    found = [(s.stages[0].send, s.stages[0].received) for s in map(program, (eager, sequence, strategy))]
    sent = [send.size_bytes for send, _ in found if send is not None]
    joined = [gather and (gather.op.value, gather.axes, gather.size_bytes) for _, gather in found]
    assert sent == [size, size // 2, size // 2]
    assert joined == [None, None, ("all_gather", ("tp",), size)], (
        "Megatron sends shares of what all ranks have"
    )


def test_recomputation_may_differ_by_stage() -> None:
    strategy = replace(plan(pp=2), recompute=Recompute(mode="none", per_stage=(2, 1)))
    first, second = program(strategy).stages
    assert [bool(w.recompute) for w, _ in first.blocks] == [False, True]
    assert [bool(w.recompute) for w, _ in second.blocks] == [True, False, False]


def test_axes_are_strided_by_their_order() -> None:
    order = ("dp_replicate", "dp_shard", "cp", "pp", "tp")
    axes = mesh_axes(replace(plan(), mesh=Mesh(pp=2, dp_shard=2, tp=2, order=order)))
    assert {a.name: a.stride for a in axes if a.size > 1} == {"dp_shard": 4, "pp": 2, "tp": 1}
    assert [a.name for a in axes] == list(order)


@pytest.mark.parametrize(
    ("execution", "per_parameter"),
    [
        (Execution(), 12),
        (Execution(master_weights=False), 4),  # as torch: in the dtype of what is updated
        (Execution(param_dtype="fp32"), 8),
        (Execution(optimizer="sgd"), 4),
        (Execution(optimizer="sgd-momentum", param_dtype="fp32"), 4),
    ],
)
def test_optimizer_state_follows_the_dtype_policy(execution: Execution, per_parameter: int) -> None:
    (stage,) = program(replace(plan(), execution=execution)).stages
    assert stage.optimizer_bytes == per_parameter * GRAPH.parameter_count


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_that_no_product_adds_up_are_read_and_written_once_more(zero: int) -> None:
    strategy = plan(zero=zero, dp_shard=4)
    adding = replace(strategy, execution=replace(strategy.execution, added_gradients=True))

    def moved(found: Program) -> int:
        steps = (step for block, _ in found.stages[0].blocks for step in block.backward_weight)
        return sum(step.bytes_moved for step in steps if isinstance(step, Kernel))

    blocks = [block for block, _ in program(strategy).stages[0].blocks]
    own = sum(block.trainable for block in blocks) // (4 if zero >= 2 else 1)
    bf16, fp32 = 2, 4
    products = [step for block in blocks for step in block.backward_weight if isinstance(step, Kernel)]
    results = sum(step.product[1] * step.product[2] for step in products if step.product)
    written_once = results * (2 * fp32 - bf16)  # by fused products, which read the sum and write it
    assert moved(program(adding)) - moved(program(strategy)) == own * (bf16 + 2 * fp32) - written_once


def test_compression_and_algorithm_reach_the_gradient_collectives() -> None:
    sync = GradSync(algorithm="ring", compression=("none", "bf16"))
    (stage,) = program(replace(plan(dp_replicate=8), grad_sync=sync)).stages
    found = {(c.algorithm, c.compression) for w, _ in stage.blocks for c in w.reduce if c.label == "dp"}
    assert found == {("ring", ("none", "bf16"))}


def test_gathers_of_zero_3_are_compressed_on_every_level_and_no_others() -> None:
    def gathers(zero: int) -> set[str]:
        sync = GradSync(weights="int8")
        (stage,) = program(replace(plan(zero=zero, dp_shard=8), grad_sync=sync)).stages
        every = [c for w, _ in stage.blocks for c in (w.gather, w.expert_gather, *w.reduce) if c is not None]
        coded = [c for c in (*every, *stage.after_step) if c.compression]
        assert all(set(c.compression) == {"int8"} and c.item_bytes == 2 for c in coded)
        return {c.op.value for c in coded}

    assert gathers(3) == {"all_gather"}
    assert gathers(2) == set()


def test_an_expander_made_anew_gives_the_same_program() -> None:
    strategy = plan(pp=2, tp=2, dp_shard=2, zero=1)
    assert program(strategy) == Expander(GRAPH, CLUSTER).program(strategy)


@given(layers=st.integers(1, 12), chunks=st.integers(1, 6))
def test_even_stages_cover_the_chain_once(layers: int, chunks: int) -> None:
    graph = toy_transformer(layers=layers)
    counts = even_stages(layers, min(chunks, layers))
    ranges = stage_ranges(graph, counts)
    assert [p for r in ranges for p in r] == list(range(len(graph.chain)))
    assert max(counts) - min(counts) <= 1


@settings(max_examples=25)
@given(
    pp=st.sampled_from([1, 2]), tp=st.sampled_from([1, 2]), zero=st.sampled_from([0, 1, 2, 3]),
    recompute=st.sampled_from(["none", "selective", "full"]), micro=st.sampled_from([1, 2]),
)  # fmt: skip
def test_every_product_of_choices_is_scored(pp: int, tp: int, zero: int, recompute: str, micro: int) -> None:
    mesh = {"dp_replicate": 2} if zero == 0 else {"dp_shard": 2}
    strategy = replace(
        plan(pp=pp, tp=tp, zero=zero, **mesh),
        recompute=Recompute(mode=recompute),
        batch=Batch(global_=16, micro=micro),
    )
    found = score(GRAPH, CLUSTER, strategy, EXPANDER)
    assert found.step_time_s > 0
    assert sum(s for _, s in found.breakdown_s) == pytest.approx(found.step_time_s)
    assert found.devices == strategy.mesh.devices
    assert found.hardware_flops >= found.model_flops == GRAPH.model_flops(16)
