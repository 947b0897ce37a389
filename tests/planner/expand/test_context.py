"""Context parallelism: a share of the sequence each, keys and values of all, and the same work in sum."""

from __future__ import annotations

import pytest

from autoparallel.costmodel.graph import OpKind
from autoparallel.costmodel.program import BlockWork, Collective, Kernel
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.strategy.legal import strategy_problems
from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Pipeline, Shard, Strategy
from autoparallel.profiles.load import load_cluster
from tests.toy_graphs import toy_mlp, toy_transformer

CLUSTER = load_cluster("h100-sxm:1x8")
SEQ, HIDDEN, ITEM = 64, 128, 2
GRAPH = toy_transformer(layers=2, hidden=HIDDEN, heads=4, seq=SEQ)
EXPANDER = Expander(GRAPH, CLUSTER)


def plan(kernels: str, *, cp: int = 1, tp: int = 1, blocks: int = 2) -> Strategy:
    return Strategy(
        batch=Batch(global_=1, micro=1), mesh=Mesh(cp=cp, tp=tp), shard=Shard(zero=1),
        pipeline=Pipeline(stage_blocks=(blocks,)), execution=Execution(kernels=kernels),
    )  # fmt: skip


def layer(strategy: Strategy) -> BlockWork:
    return EXPANDER.work(strategy, 1, "none")


def messages(steps: tuple[Kernel | Collective, ...]) -> list[tuple[str, int, bool]]:
    return [
        (s.op.value, s.size_bytes, s.beside) for s in steps if isinstance(s, Collective) and s.label == "cp"
    ]


def flops(work: BlockWork) -> int:
    every = (*work.forward, *work.backward_input, *work.backward_weight)
    return sum(s.flops * s.count for s in every if isinstance(s, Kernel))


@pytest.mark.parametrize("tp", [1, 2])
def test_keys_and_values_are_gathered_and_their_gradients_scattered(tp: int) -> None:
    work, size = layer(plan("eager", cp=2, tp=tp)), SEQ * HIDDEN * ITEM // tp
    assert messages(work.forward) == [("all_gather", size, False)] * 2
    assert messages(work.backward_input) == [("reduce_scatter", size, False)] * 2


def test_a_ring_moves_keys_beside_the_kernels_and_again_in_the_backward_pass() -> None:
    work, size = layer(plan("fused", cp=2)), SEQ * HIDDEN * ITEM
    assert messages(work.forward) == [("all_gather", size, True)] * 2
    assert sorted(messages(work.backward_input)) == [
        *[("all_gather", size, True)] * 2,
        *[("reduce_scatter", size, True)] * 2,
    ]


@pytest.mark.parametrize("kernels", ["eager", "fused"])
def test_ranks_share_work_and_activations(kernels: str) -> None:
    whole, part = (layer(plan(kernels, cp=cp)) for cp in (1, 4))
    assert flops(whole) == 4 * flops(part)
    gathered = 2 * SEQ * HIDDEN * ITEM * 3 // 4 if kernels == "eager" else 0
    assert part.saved_bytes == whole.saved_bytes // 4 + gathered
    shape = next(s.attention for s in part.forward if isinstance(s, Kernel) and s.kind is OpKind.ATTENTION)
    assert shape is not None
    assert (shape.query_length, shape.key_length) == (SEQ // 4, SEQ)
    assert shape.last == (kernels == "eager"), "shares in one piece: all wait for the rank with the last"


def test_gradients_are_reduced_over_the_ranks_that_saw_other_tokens() -> None:
    program = EXPANDER.program(plan("eager", cp=4))
    reduced = [c for stage in program.stages for work, _ in stage.blocks for c in work.reduce]
    assert {(c.op.value, c.axes) for c in reduced} == {("reduce_scatter", ("cp",))}


def test_a_sequence_that_cannot_be_shared_is_refused() -> None:
    assert any(
        "mesh.cp = 8" in p
        for p in strategy_problems(toy_transformer(seq=36), CLUSTER, plan("eager", cp=8, blocks=4))
    )
    problems = strategy_problems(toy_mlp(), CLUSTER, plan("eager", cp=2, blocks=4))
    assert any("no attention" in p for p in problems), problems
