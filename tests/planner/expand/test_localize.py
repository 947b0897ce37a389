"""Local work of a block: kernels and bytes divide as the sharding says, and recomputation moves them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.costmodel.block_index import index_block
from autoparallel.costmodel.graph import OpKind
from autoparallel.costmodel.kernels import DTENSOR, device_s, host_s
from autoparallel.costmodel.program import BlockWork, Collective, Kernel
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.expand.layout import Layout
from autoparallel.planner.expand.local import Setting
from autoparallel.planner.expand.localize import PER_MOVE, localize, passes_of
from autoparallel.planner.sharding.plan import conjugates, replicated_plan
from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Pipeline, Shard, Strategy
from autoparallel.profiles.load import load_cluster
from tests.toy_graphs import toy_transformer

SEQ, HIDDEN, HEADS, FFN = 32, 64, 4, 256
GRAPH = toy_transformer(seq=SEQ, hidden=HIDDEN, heads=HEADS)


def work(block: int = 1, *, micro: int = 2, recompute: str = "none", cp: int = 1, **execution) -> BlockWork:
    index = index_block(GRAPH.blocks[block], carried=(0,) if block else (), dropout=False)
    setting = Setting(graph_dtype=GRAPH.dtype, micro=micro, cp=cp, execution=Execution(**execution))
    layout = Layout(index=index, plan=replicated_plan(GRAPH.blocks[block]))
    return localize(passes_of(layout, setting), recompute)


def parallel(tp: int, *, sequence: bool, **execution) -> BlockWork:
    strategy = Strategy(
        batch=Batch(global_=2, micro=2), mesh=Mesh(tp=tp), shard=Shard(sequence_parallel=sequence),
        pipeline=Pipeline(stage_blocks=(4,)), execution=Execution(**execution),
    )  # fmt: skip
    return Expander(GRAPH, load_cluster("h100-sxm:1x8")).work(strategy, 1, "none")


def dispatched(steps) -> int:
    return sum(s.count for s in steps if isinstance(s, Kernel) and s.kind == DTENSOR)


def flops(steps) -> int:
    return sum(s.flops * s.count for s in steps if isinstance(s, Kernel))


def test_one_rank_runs_the_flops_of_the_graph() -> None:
    for block in range(len(GRAPH.blocks)):
        ops, found = GRAPH.blocks[block].operators, work(block)
        assert flops(found.forward) == sum(k.flops.at(2) for op in ops for k in op.forward)
        assert flops((*found.backward_input, *found.backward_weight)) == sum(
            k.flops.at(2) for op in ops for k in op.backward
        )


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_ranks_share_the_flops_of_products_and_attention(tp: int, sequence: bool) -> None:
    whole, local = work(kernels="eager"), parallel(tp, sequence=sequence, kernels="eager")
    assert flops(local.forward) * tp == flops(whole.forward)
    assert flops(local.backward_weight) * tp == flops(whole.backward_weight)
    assert flops(local.backward_input) * tp == flops(whole.backward_input)


def test_saved_bytes_are_the_captured_storages_once() -> None:
    sbh = 2 * SEQ * HIDDEN * 2
    statistics = 2 * HEADS * SEQ * 4
    # norm1's input, norm1, q, k, v, attention, norm2's input, norm2: sbh each; up and its activation: FFN wide.
    assert work(kernels="eager").saved_bytes == 8 * sbh + 2 * sbh * FFN // HIDDEN + statistics


def test_unfused_attention_keeps_probabilities_instead_of_statistics() -> None:
    flash, unfused = work(), work(attention="unfused")
    probabilities = 2 * HEADS * SEQ * SEQ * 2
    assert unfused.saved_bytes - flash.saved_bytes == probabilities - 2 * HEADS * SEQ * 4
    dropped = work(attention="unfused", dropout=0.1)
    assert dropped.saved_bytes - unfused.saved_bytes == probabilities // 2 * 3, "2 more bytes and a mask"


def test_sequence_parallel_ranks_share_every_saved_byte() -> None:
    assert parallel(4, sequence=True).saved_bytes * 4 == work().saved_bytes


def test_a_gathered_input_stays_whole_where_it_is_not_gathered_again() -> None:
    sbh = 2 * SEQ * HIDDEN * 2
    eager, fused = parallel(4, sequence=True, kernels="eager"), parallel(4, sequence=True)
    assert eager.saved_bytes - fused.saved_bytes == 2 * (sbh - sbh // 4)


def test_what_megatron_gathers_again_runs_beside_the_backward() -> None:
    gathers = [s for s in parallel(4, sequence=True).backward_weight if isinstance(s, Collective)]
    assert [(c.op.value, c.beside) for c in gathers] == [("all_gather", True)] * 2
    eager = parallel(4, sequence=True, kernels="eager")
    assert not [s for s in eager.backward_weight if isinstance(s, Collective)]


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_dtensor_copies_what_it_gathers_and_scatters_along_the_sequence(dtype: str) -> None:
    plain, copying = (
        parallel(4, sequence=True, kernels="eager", dtype=dtype, dtensor=wanted).forward
        for wanted in (False, True)
    )
    whole = 2 * SEQ * HIDDEN * 2  # bf16
    gathered = whole // 2 if dtype == "fp8" else whole
    sizes = {"all_gather": gathered, "reduce_scatter": whole}
    moved = [(c.op.value, c.size_bytes) for c in copying if isinstance(c, Collective)]
    assert moved == [(c.op.value, sizes[c.op.value]) for c in plain if isinstance(c, Collective)]
    copies = [s.bytes_moved for s in copying if isinstance(s, Kernel) and s.kind is OpKind.COPY]
    more = sorted(copies)[-len(moved) :]
    assert sorted(more) == sorted(2 * size for _, size in moved)
    assert len([s for s in copying if not dispatched([s])]) - len(plain) == len(moved)


@pytest.mark.parametrize("sequence", [False, True])
def test_dtensor_dispatches_every_eager_operator_and_change_of_placement(sequence: bool) -> None:
    own = parallel(4, sequence=sequence, kernels="eager", dtensor=True)
    moves = [s for s in own.forward if isinstance(s, Collective)]
    assert dispatched(own.forward) >= len(GRAPH.blocks[1].operators) + PER_MOVE * len(moves)
    kernels = sum(
        isinstance(s, Kernel) for s in parallel(4, sequence=sequence, kernels="eager").backward_weight
    )
    assert dispatched(own.backward_weight) >= kernels
    for other in (
        parallel(4, sequence=sequence, kernels="eager"),
        parallel(4, sequence=sequence, kernels="compiled", dtensor=True),
        work(kernels="eager", dtensor=True),
    ):
        assert not dispatched((*other.forward, *other.backward_input, *other.backward_weight))


def test_a_cpu_dispatches_and_computes_in_turn_and_an_accelerator_s_host_runs_ahead() -> None:
    kernel = Kernel(kind=DTENSOR, dtype="bf16", flops=0, bytes_moved=0, count=10)
    cpu, gpu = load_cluster("cpu-gloo:1x2").device, load_cluster("h100-sxm:1x8").device
    assert device_s(kernel, cpu, "eager") == pytest.approx(10 * cpu.constants["launch_s.dtensor"])
    assert device_s(kernel, gpu, "eager") == 0.0
    assert host_s(kernel, gpu, "eager") == pytest.approx(10 * gpu.constants["launch_s.dtensor"])


@pytest.mark.parametrize("sequence", [False, True])
def test_asynchronous_gradient_sums_are_the_same_collectives_beside_the_products(sequence: bool) -> None:
    plain, beside = (
        [
            s
            for s in parallel(4, sequence=sequence, async_gradients=wanted).backward_input
            if isinstance(s, Collective)
        ]
        for wanted in (False, True)
    )
    assert [replace(c, beside=False) for c in beside] == plain
    op = "reduce_scatter" if sequence else "all_reduce"
    assert [c.op.value for c in beside if c.beside] == [op] * 2, "one before attention, one before the MLP"


def test_full_recomputation_keeps_the_input_and_runs_the_forward_up_to_the_last_saved_value() -> None:
    none, full = work(), work(recompute="full")
    assert full.saved_bytes == 2 * SEQ * HIDDEN * 2
    assert full.saved_bytes + full.recomputed_bytes == none.saved_bytes
    last = [s for s in none.forward if isinstance(s, Kernel)][-1]
    assert full.recompute == none.forward[:-1], f"{last} keeps nothing"


def test_selective_recomputation_runs_attention_again_and_nothing_else() -> None:
    selective = work(recompute="selective", attention="unfused")
    assert [k.kind for k in selective.recompute if isinstance(k, Kernel)] == [OpKind.ATTENTION]
    saved = work(attention="unfused").saved_bytes
    assert selective.saved_bytes + selective.recomputed_bytes == saved
    assert selective.recomputed_bytes == 2 * HEADS * SEQ * SEQ * 2


@pytest.mark.parametrize("kernels", ["eager", "fused", "compiled"])
def test_recomputing_operators_keeps_what_products_return_and_runs_all_else_again(kernels: str) -> None:
    none, operators = work(kernels=kernels), work(kernels=kernels, recompute="operators")
    products = {OpKind.GEMM, OpKind.ATTENTION}
    again = [k for k in none.forward if isinstance(k, Kernel) and k.kind not in products]
    assert set(operators.recompute) <= set(again), "and not the last ones, which keep nothing"
    statistics = 2 * HEADS * SEQ * 4
    # Input, query, key, value, attention's result, the two projections back to the hidden size; the inner one.
    assert operators.saved_bytes == 2 * 2 * SEQ * (7 * HIDDEN + FFN) + statistics
    assert operators.saved_bytes < none.saved_bytes
    assert operators.saved_bytes + operators.recomputed_bytes >= none.saved_bytes


@pytest.mark.parametrize("sequence", [False, True])
def test_recomputing_operators_sums_over_ranks_once_and_gathers_again(sequence: bool) -> None:
    strategy = Strategy(
        batch=Batch(global_=2, micro=2), mesh=Mesh(tp=2), shard=Shard(sequence_parallel=sequence),
        pipeline=Pipeline(stage_blocks=(4,)), execution=Execution(),
    )  # fmt: skip
    found = Expander(GRAPH, load_cluster("h100-sxm:1x8")).work(strategy, 1, "operators")
    collectives = [s.op.value for s in found.recompute if isinstance(s, Collective)]
    assert collectives == (["all_gather"] * 2 if sequence else [])


def test_eight_bit_products_keep_their_inputs_in_eight_bits_and_add_casts() -> None:
    plain, quantised = work(), work(dtype="fp8")
    # The first norm's output (kept by three products) and the second's, and the activation's: one byte less each.
    kept_by_products = SEQ * (2 * HIDDEN + FFN)
    assert plain.saved_bytes - quantised.saved_bytes == 2 * kept_by_products
    assert {k.dtype for k in quantised.forward if isinstance(k, Kernel) and k.product} == {"fp8"}
    assert len(quantised.forward) > len(plain.forward)
    assert flops(quantised.forward) == flops(plain.forward)


def test_wider_tensors_scale_saved_bytes_but_not_statistics() -> None:
    statistics = 2 * HEADS * SEQ * 4
    assert work(dtype="fp32").saved_bytes - statistics == 2 * (work().saved_bytes - statistics)


def test_context_parallel_ranks_share_rows_and_activations() -> None:
    whole, half = work(), work(cp=2)
    assert flops(half.forward) * 2 == flops(whole.forward)
    assert half.saved_bytes * 2 == whole.saved_bytes
    shapes = [k.attention for k in half.forward if isinstance(k, Kernel) and k.attention]
    assert [(s.query_length, s.key_length) for s in shapes] == [(SEQ // 2, SEQ)]


@given(micro=st.integers(1, 8), kernels=st.sampled_from(["eager", "fused", "compiled"]))
def test_larger_micro_batches_keep_proportionally_more(micro: int, kernels: str) -> None:
    one, many = work(micro=1, kernels=kernels), work(micro=micro, kernels=kernels)
    assert many.saved_bytes == micro * one.saved_bytes
    assert many.backward_temp_bytes >= one.backward_temp_bytes
    assert len(many.forward) == len(one.forward)


@given(micro=st.integers(1, 8), kernels=st.sampled_from(["eager", "fused", "compiled"]))
def test_gradients_that_stand_need_at_most_all_of_them_more_and_are_left_with_those_of_the_inputs(
    micro: int, kernels: str
) -> None:
    found = work(micro=micro, kernels=kernels)
    gradients = 2 * found.trainable
    assert found.standing_temp_bytes is not None
    assert found.backward_temp_bytes <= found.standing_temp_bytes <= found.backward_temp_bytes + gradients
    assert found.left_bytes <= found.standing_temp_bytes
    inputs = found.left_bytes + found.saved_bytes - gradients
    assert inputs == 2 * micro * SEQ * HIDDEN


def test_weight_gradients_of_a_split_backward_wait_with_inputs_and_output_gradients_of_products() -> None:
    """Zero Bubble, arXiv:2401.10241, counts 32 s b h bytes a layer: 14 of inputs, 18 of gradients."""
    assert work(micro=1).weight_saved_bytes == 32 * SEQ * HIDDEN


def test_frozen_parameters_have_no_weight_gradients() -> None:
    block = GRAPH.blocks[1]
    frozen = replace(block, parameters=tuple(replace(p, trainable=False) for p in block.parameters))
    index = index_block(frozen, carried=(0,), dropout=False)
    layout = Layout(index=index, plan=replicated_plan(frozen))
    found = localize(passes_of(layout, Setting(graph_dtype=GRAPH.dtype, micro=1)))
    assert found.backward_weight == ()
    assert found.trainable == 0
    assert found.parameters > 0


@pytest.mark.parametrize(
    ("before", "after", "partial", "expected"),
    [
        ("S1", "R", True, {(False, "all_gather"), (True, "reduce_scatter")}),
        ("S1", "R", False, {(False, "all_gather")}),
        ("P", "R", False, {(False, "all_reduce")}),
        ("P", "S1", False, {(False, "reduce_scatter"), (True, "all_gather")}),
        ("R", "S1", False, {(True, "all_gather")}),
        ("R", "R", True, {(True, "all_reduce")}),
        ("R", "R", False, set()),
        ("S1", "S2", False, {(False, "all_to_all"), (True, "all_to_all")}),
    ],
)
def test_a_change_of_layout_costs_its_conjugate_collectives(before, after, partial, expected) -> None:
    assert {(back, op.value) for back, op in conjugates(before, after, partial)} == expected


def test_recomputation_modes_run_the_same_backward() -> None:
    none, full = work(), work(recompute="full")
    assert (none.backward_input, none.backward_weight) == (full.backward_input, full.backward_weight)
