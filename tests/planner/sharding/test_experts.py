"""Expert layers: found by structure, sharded over tp like an MLP, and over ep with an all-to-all each way."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from autoparallel.costmodel.graph import OpKind
from autoparallel.costmodel.program import BlockWork, Collective, Kernel, Program
from autoparallel.costmodel.simulate import devices_of
from autoparallel.errors import UserError
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.score import score
from autoparallel.planner.sharding.experts import expert_layers
from autoparallel.planner.strategy.legal import strategy_problems
from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Pipeline, Shard, Strategy
from autoparallel.profiles.load import load_cluster
from tests.capture.models import captured

CLUSTER = load_cluster("h100-sxm:2x4")
NAMES = ("mixtral", "deepseek")
EXPERTS, HIDDEN, CHOSEN, TOKENS = 4, 32, 2, 16
ITEM = 4


def plan(*, zero: int = 1, sequence: bool = False, **mesh: int) -> Strategy:
    return Strategy(
        batch=Batch(global_=16, micro=1), mesh=Mesh(**mesh),
        shard=Shard(zero=zero, sequence_parallel=sequence), pipeline=Pipeline(stage_blocks=(2,)),
        execution=Execution(kernels="eager", dtype="fp32", param_dtype="fp32"),
    )  # fmt: skip


def expander(name: str) -> Expander:
    return Expander(graph=captured(name)[2], cluster=CLUSTER)


def expert_link(found: Program) -> BlockWork:
    """The last layer: in both models it has experts."""
    return [w for stage in found.stages for w, _ in stage.blocks if "DecoderLayer" in w.name][-1]


def messages(steps: tuple[Kernel | Collective, ...], label: str) -> list[tuple[str, int]]:
    return [(s.op.value, s.size_bytes) for s in steps if isinstance(s, Collective) and s.label == label]


def products(work: BlockWork) -> list[Kernel]:
    return [s for s in work.forward if isinstance(s, Kernel) and s.kind is OpKind.GROUPED_GEMM]


@pytest.mark.parametrize("name", NAMES)
def test_merged_dispatch_sends_the_copies_of_a_token_for_its_experts_as_one(name: str) -> None:
    def copies(merged: bool) -> set[int]:
        strategy = plan(dp_shard=4, ep=4)
        execution = replace(strategy.execution, merged_dispatch=merged)
        work = expert_link(expander(name).program(replace(strategy, execution=execution)))
        sent = [s for s in work.forward if isinstance(s, Collective) and s.label == "ep"]
        return {s.copies for s in sent if s.size_bytes > EXPERTS * 8}

    assert (copies(False), copies(True)) == ({1}, {CHOSEN})


@pytest.mark.parametrize("name", NAMES)
def test_hidden_dispatch_puts_the_rows_of_tokens_beside_the_kernels_and_nothing_else(name: str) -> None:
    def exchanged(hidden: bool) -> list[Collective]:
        strategy = plan(dp_shard=4, ep=4)
        execution = replace(strategy.execution, hidden_dispatch=hidden)
        work = expert_link(expander(name).program(replace(strategy, execution=execution)))
        steps = (*work.forward, *work.backward_input, *work.backward_weight)
        return [
            s for s in steps if isinstance(s, Collective) and s.label == "ep" and s.size_bytes > EXPERTS * 8
        ]

    plain, hidden = exchanged(False), exchanged(True)
    assert [replace(s, beside=True) for s in plain] == hidden
    assert {s.beside for s in plain} == {False}, plain


@pytest.mark.parametrize("name", NAMES)
def test_layers_of_experts_are_found_without_names(name: str) -> None:
    made = expander(name)
    layers = [
        layer
        for b in range(len(made.graph.blocks))
        for layer in expert_layers(made.works.index(b, dropout=True))
    ]
    assert [(layer.experts, len(layer.products), len(layer.params)) for layer in layers] == [(EXPERTS, 2, 2)]
    assert not expert_layers(expander("llama").works.index(1, dropout=True))


@pytest.mark.parametrize("name", NAMES)
def test_products_of_all_experts_cost_the_models_flops(name: str) -> None:
    made = expander(name)
    found = expert_link(made.program(plan(dp_shard=8)))
    for kernel in products(found):
        assert kernel.product is not None
        batch, m, n, k = kernel.product
        assert kernel.flops == 2 * batch * m * n * k, kernel
        assert (batch, m) == (EXPERTS, TOKENS * CHOSEN // EXPERTS), kernel


@pytest.mark.parametrize("name", NAMES)
def test_expert_parallel_ranks_hold_their_experts_and_exchange_rows_twice_each_way(name: str) -> None:
    made = expander(name)
    whole, found = (expert_link(made.program(plan(dp_shard=8, ep=ep))) for ep in (1, 4))
    held = sum(
        p.numel for block in made.graph.blocks for p in block.parameters if len(p.shape) == 3
    )  # those of experts
    assert whole.parameters - found.parameters == held * 3 // 4
    assert found.expert_parameters == held // 4
    rows = TOKENS * CHOSEN * HIDDEN * ITEM
    told = ("all_to_all", EXPERTS * 8)
    assert messages(found.forward, "ep") == [told, ("all_to_all", rows), ("all_to_all", rows)]
    assert messages(found.backward_input, "ep") == [("all_to_all", rows)] * 2
    assert [k.product[:2] for k in products(found) if k.product] == [(1, TOKENS * CHOSEN)] * 2
    assert sum(k.flops for k in products(found)) == sum(k.flops for k in products(whole))


def test_experts_are_synchronised_over_the_ranks_that_hold_the_same_ones() -> None:
    found = expander("mixtral").program(plan(dp_replicate=2, dp_shard=2, tp=2, ep=2, zero=1))
    work = expert_link(found)
    dense, experts = work.parameters - work.expert_parameters, work.expert_parameters
    reductions = [(c.op.value, c.axes, c.size_bytes) for c in work.reduce if c.label == "dp"]
    assert reductions == [
        ("reduce_scatter", ("dp_shard",), dense * ITEM),
        ("all_reduce", ("dp_replicate",), dense * ITEM // 2),
        ("reduce_scatter", ("expert_shard",), experts * ITEM),
        ("all_reduce", ("dp_replicate",), experts * ITEM // 2),
    ]
    assert {a.name: (a.size, a.stride) for a in found.axes if a.derived} == {
        "ep": (2, 1),
        "expert_shard": (2, 2),
    }
    assert devices_of(found) == 8


def test_zero_shards_each_kind_over_its_own_ranks() -> None:
    made = expander("mixtral")
    work = expert_link(made.program(plan(dp_shard=8, ep=4, zero=3)))
    assert work.gather is not None
    assert work.expert_gather is not None
    assert (work.gather.axes, work.expert_gather.axes) == (("dp_shard",), ("expert_shard",))
    assert work.expert_gather.size_bytes == work.expert_parameters * ITEM
    stages = [made.program(plan(dp_shard=8, ep=ep, zero=3)).stages[0] for ep in (1, 2, 4)]
    assert len({stage.parameter_bytes for stage in stages}) == 1, (
        "however experts are placed, 8 ranks hold an 8th each"
    )


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_tensor_parallel_experts_run_column_then_row(name: str, *, sequence: bool) -> None:
    made = expander(name)
    strategy = plan(tp=2, dp_shard=4, sequence=sequence)
    found = expert_link(made.program(strategy))
    assert [k.product[2:] for k in products(found) if k.product] == [
        (k.product[2] // a, k.product[3] // b)
        for k, (a, b) in zip(
            products(expert_link(made.program(plan(dp_shard=8)))), ((2, 1), (1, 2)), strict=True
        )
        if k.product
    ]
    placed = {
        place
        for plan in made.tensor_plan(strategy).blocks
        for name, place in plan.params
        if "experts." in name
    }
    assert {"S1/2", "S2"} <= placed, "gate and up are sharded each, then what they are multiplied into"
    wanted = {"all_gather": 2, "reduce_scatter": 2} if sequence else {"all_reduce": 2}
    counted = Counter(op for op, _ in messages(found.forward, "tp"))
    if name == "mixtral":  # DeepSeek's attention has low-rank projections that are gathered, too
        assert counted == wanted
    assert all(counted[op] >= n for op, n in wanted.items())


@pytest.mark.parametrize("sequence", [False, True])
def test_under_both_axes_each_tensor_rank_sends_its_share_of_the_tokens(*, sequence: bool) -> None:
    found = expert_link(expander("mixtral").program(plan(tp=2, dp_shard=4, ep=4, sequence=sequence)))
    rows = TOKENS * CHOSEN * HIDDEN * ITEM // 2
    assert messages(found.forward, "ep")[1:] == [("all_to_all", rows)] * 2
    assert [k.product[:2] for k in products(found) if k.product] == [(1, TOKENS)] * 2


@pytest.mark.parametrize(
    ("mesh", "words"),
    [({"dp_shard": 8, "ep": 8}, "4 experts"), ({"dp_shard": 8, "ep": 3}, "does not divide dp_shard")],
)
def test_experts_that_cannot_be_dealt_are_refused(mesh: dict[str, int], words: str) -> None:
    graph = captured("mixtral")[2]
    problems = strategy_problems(graph, CLUSTER, plan(**mesh))
    assert any(words in problem for problem in problems), problems
    with pytest.raises(UserError, match="no layer of experts"):
        score(captured("llama")[2], CLUSTER, plan(dp_shard=8, ep=2))


def test_more_experts_per_rank_take_more_memory_and_less_communication() -> None:
    graph = captured("mixtral")[2]
    scores = [score(graph, CLUSTER, replace(plan(dp_shard=8, ep=ep))) for ep in (1, 2, 4)]
    peaks = [s.peak_bytes for s in scores]
    exchanged = [dict(s.breakdown_s)["ep_comm"] for s in scores]
    assert peaks == sorted(peaks, reverse=True)
    assert exchanged == sorted(exchanged)
    assert exchanged[0] == 0
