"""Units of FSDP2 where they stand: what bounds take of a block is no more than it has in any stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from autoparallel.planner.expand.chain import even_stages, find_ties, stage_ranges
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.expand.places import least_unit, stage_places
from autoparallel.planner.expand.schedules import rank_of_stage
from autoparallel.planner.score import completed, program_of
from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Pipeline, Shard, Strategy
from autoparallel.profiles.load import load_cluster
from tests.capture.models import captured
from tests.toy_graphs import toy_transformer

TOY = toy_transformer(layers=4, hidden=256, heads=4, seq=256, vocab=1024)
DTYPES = (
    Execution(fsdp2=True, kernels="eager", grad_dtype="bf16"),
    Execution(fsdp2=True, kernels="eager", param_dtype="fp32", master_weights=False),
)


def strategies(ep: int) -> Iterator[Strategy]:
    for pp, zero, micro_batches, execution in product((1, 2), (1, 2, 3), (1, 2, 3), DTYPES):
        yield Strategy(
            batch=Batch(global_=4 * micro_batches, micro=1), mesh=Mesh(dp_shard=4, pp=pp, ep=ep), shard=Shard(zero=zero),
            pipeline=Pipeline(schedule="1f1b" if pp > 1 else "none"), execution=execution,
        )  # fmt: skip


@pytest.mark.parametrize(("name", "ep"), [("toy", 1), ("mixtral", 1), ("mixtral", 2), ("gpt2", 1)])
def test_the_least_of_all_places_is_no_more_than_a_block_has_in_any(name: str, ep: int) -> None:
    graph = TOY if name == "toy" else captured(name)[2]
    for strategy in strategies(ep):
        expander = Expander(graph, load_cluster(f"h100-sxm:1x{strategy.mesh.devices}"))
        pp = strategy.mesh.pp
        ranges = stage_ranges(graph, even_stages(len(graph.repeated_positions), pp))
        ties = find_ties(graph, ranges, rank_of_stage(strategy.pipeline.schedule, pp, 1), copies=True)
        for stage, positions in zip(expander.stages(strategy), ranges, strict=True):
            links = [block for block, count in stage.blocks for _ in range(count)]
            places = stage_places(graph, positions, ties, strategy)
            for position, link, place in zip(positions, links, places, strict=True):
                block = graph.chain[position].block
                work = replace(
                    expander.work(strategy, block, "none"), gather=link.gather, expert_gather=link.expert_gather,
                    parameters=link.parameters, trainable=link.trainable,
                )  # fmt: skip
                least = least_unit(expander.works, strategy, work, block, link.reduce, place.dropped)
                shown = f"{strategy}\n{position} {place}"
                assert least.backward_temp_bytes <= link.backward_temp_bytes, shown
                assert least.forward_temp_bytes <= link.forward_temp_bytes, shown


def test_a_strategy_with_its_partition_left_open_is_priced_as_the_one_with_all_said() -> None:
    for strategy in strategies(1):
        expander = Expander(captured("gpt2")[2], load_cluster(f"h100-sxm:1x{strategy.mesh.devices}"))
        whole = completed(expander, strategy)
        assert whole.pipeline.stage_blocks
        assert not strategy.pipeline.stage_blocks
        assert program_of(expander, strategy) == program_of(expander, whole)
