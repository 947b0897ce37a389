"""What "optimal" speaks of: every key of the strategy file is named, with what was done about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoparallel.planner.explain.choice import complexity
from autoparallel.planner.plan import plan
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.space.certificate import every_key, space_of
from autoparallel.planner.strategy.schema import SECTIONS, StrategySchema, keys_of
from autoparallel.profiles.load import load_cluster
from tests.toy_graphs import toy_transformer

PROBLEM = Problem(
    graph=toy_transformer(layers=6, hidden=1024, heads=8, seq=512, vocab=4096),
    cluster=load_cluster("a100-pcie-80gb:2x4"),
    global_batch=32,
)


def test_every_key_of_the_file_is_named_once() -> None:
    named = [one.key for one in space_of(PROBLEM)]
    assert len(named) == len(set(named))
    sections = set(StrategySchema.model_fields) - {"schema_", "problem", "predicted", "search"}
    assert {key.partition(".")[0] for key in named} == sections
    for section, model in SECTIONS.items():
        assert {key for key in named if key.startswith(f"{section}.")} == {
            f"{section}.{key}" for key in keys_of(model)
        }


def test_each_key_says_what_was_done_about_it() -> None:
    fixed = replace(PROBLEM, constraints={"mesh.tp": 2, "pipeline.schedule": "zbv"})
    free, held = ({one.key: one for one in space_of(problem)} for problem in (PROBLEM, fixed))
    for one in free.values():
        assert one.how in ("searched", "stated") or one.how.startswith("left-out: "), one
    assert {key for key in every_key() if held[key].how == "fixed"} == {"mesh.tp", "pipeline.schedule"}
    assert all(one.how == "stated" for key, one in free.items() if key.startswith("execution."))
    assert free["pipeline.schedule"].how == "searched"
    lossy = {one.key: one for one in space_of(replace(PROBLEM, allow_lossy=True))}
    assert free["grad_sync.compression"].how.startswith("left-out")
    assert lossy["grad_sync.compression"].how == "searched"


@pytest.mark.parametrize("batch", [8, 32])
def test_what_is_chosen_within_a_share_of_the_optimum_is_no_less_simple(batch: int) -> None:
    problem = replace(PROBLEM, global_batch=batch)
    optimum, chosen = plan(problem), plan(problem, within=0.05)
    assert optimum.optimum is None
    assert not optimum.broken
    assert chosen.optimum_s == pytest.approx(optimum.prediction.step_time_s)
    assert chosen.prediction.step_time_s <= optimum.prediction.step_time_s * 1.05 * (1 + 1e-6)
    assert complexity(chosen.strategy, chosen.prediction) <= complexity(optimum.strategy, optimum.prediction)
    assert (chosen.optimum is None) == (chosen.strategy == optimum.strategy)
    assert bool(chosen.instead) == (chosen.optimum is not None)
    assert chosen.lower_bound_s <= chosen.optimum_s
