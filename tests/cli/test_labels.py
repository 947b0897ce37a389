"""A strategy in words that a newcomer understands."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoparallel.labels import recompute_label, strategy_label
from autoparallel.planner.strategy.types import Batch, Mesh, Pipeline, Recompute, Shard, Strategy, TensorRule

PLAIN = Strategy(
    batch=Batch(global_=8, micro=1), mesh=Mesh(pp=2, dp_shard=4), shard=Shard(zero=1),
    pipeline=Pipeline(schedule="1f1b", stage_blocks=(4, 4)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("recompute", "said"),
    [
        (Recompute(mode="none"), ""),
        (Recompute(mode="selective"), "attention"),
        (Recompute(mode="full"), "every block"),
        (Recompute(mode="none", per_stage=(2, 1)), "3 of 8 blocks"),
        (Recompute(mode="operators", per_stage=(4, 4)), "every block"),
        (Recompute(mode="operators", per_stage=(1, 0)), "cheap operators + 1 of 8 blocks"),
    ],
)
def test_what_is_recomputed_is_said_in_words(recompute: Recompute, said: str) -> None:
    strategy = replace(PLAIN, recompute=recompute)
    assert recompute_label(strategy) == said
    assert strategy_label(strategy) == "pp 2 × dp_shard 4, zero 1, 1f1b, micro 1" + (
        f", recompute {said}" if said else ""
    )


def test_a_label_says_that_some_matrices_are_whole() -> None:
    rules = (TensorRule(module="layers.*.attn.q", params=(("weight", "replicate"),)),)
    strategy = Strategy(batch=Batch(global_=8, micro=1), mesh=Mesh(tp=8), tensor=rules)
    assert strategy_label(strategy) == "tp 8, some matrices whole, micro 1"
    assert strategy_label(replace(strategy, tensor=())) == "tp 8, micro 1"
