"""ZeRO-3 that fetches each parameter by itself: what it sends, what it costs, and who may ask for it."""

from __future__ import annotations

from dataclasses import replace

from autoparallel.costmodel.kernels import PIECES
from autoparallel.costmodel.program import BlockWork, Collective, CollectiveOp, Kernel, Step
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.expand.one_by_one import WHOLE_BELOW
from autoparallel.planner.score import score
from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Recompute, Shard, Strategy
from autoparallel.profiles.load import load_cluster
from tests.toy_graphs import toy_transformer

CLUSTER = load_cluster("a100-sxm-80gb:8x8")
GRAPH = toy_transformer(layers=4, hidden=1024, heads=8, seq=512)
BASE = Strategy(
    batch=Batch(global_=64, micro=1), mesh=Mesh(dp_shard=64), shard=Shard(zero=3), recompute=Recompute(mode="full")
)  # fmt: skip
ALONE = replace(BASE, execution=Execution(parameter_gathers=True))


def repeated_block(strategy: Strategy) -> BlockWork:
    (stage,) = Expander(GRAPH, CLUSTER).stages(strategy)
    return max(stage.blocks, key=lambda run: run[1])[0]


def collectives(steps: tuple[Step, ...]) -> list[Collective]:
    return [s for s in steps if isinstance(s, Collective)]


def test_each_large_parameter_is_gathered_before_each_pass_and_its_gradient_scattered_once() -> None:
    block, together = repeated_block(ALONE), repeated_block(BASE)
    (position, *_) = GRAPH.repeated_positions
    parameters = GRAPH.blocks[GRAPH.chain[position].block].parameters
    large = [p.numel * 2 for p in parameters if p.numel >= WHOLE_BELOW]
    for steps in (block.forward, block.recompute, block.backward_input):
        gathers = [c for c in collectives(steps) if c.op is CollectiveOp.ALL_GATHER]
        assert [c.size_bytes for c in gathers] == large
    scatters = [c for c in collectives(block.backward_weight) if c.op is CollectiveOp.REDUCE_SCATTER]
    assert [c.size_bytes for c in scatters] == [2 * size for size in large]  # fp32
    assert together.gather is not None
    assert (block.gather, block.reduce) == (None, ())


def test_every_rank_is_a_launch() -> None:
    pieces = [s for s in repeated_block(ALONE).forward if isinstance(s, Kernel) and s.kind == PIECES]
    assert {kernel.count for kernel in pieces} == {64}


def test_in_one_piece_nothing_is_copied_and_a_recomputation_s_parameters_stay_for_the_backward() -> None:
    block = repeated_block(replace(ALONE, execution=replace(ALONE.execution, joined_pieces=True)))
    assert not [s for s in block.forward if isinstance(s, Kernel) and s.kind == PIECES]
    assert collectives(block.forward) == collectives(repeated_block(ALONE).forward)
    assert collectives(block.recompute)
    assert not [c for c in collectives(block.backward_input) if c.op is CollectiveOp.ALL_GATHER]


def test_fetching_one_by_one_costs_more_the_more_ranks_there_are() -> None:
    def lost_s(ranks: int) -> float:
        cluster = load_cluster(f"a100-sxm-80gb:{ranks // 8}x8")
        batch, mesh = Batch(global_=ranks, micro=1), Mesh(dp_shard=ranks)
        alone, together = (
            score(GRAPH, cluster, replace(s, batch=batch, mesh=mesh)).step_time_s for s in (ALONE, BASE)
        )
        return alone - together

    few, more, many = map(lost_s, (8, 64, 512))
    assert 0 < few < more < many


def test_without_shards_nothing_is_fetched() -> None:
    for change in (
        {"shard": Shard(zero=2)},
        {"mesh": Mesh(dp_replicate=64)},
    ):
        with_key, without = (score(GRAPH, CLUSTER, replace(s, **change)) for s in (ALONE, BASE))
        assert with_key.step_time_s == without.step_time_s
