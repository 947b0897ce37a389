"""The measuring stick itself: draws are the same for a seed, the enumerator is legal, and the laws see what is wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice
from random import Random

import pytest

from autoparallel.errors import UserError
from autoparallel.planner.problem import Problem
from autoparallel.planner.score import score
from autoparallel.planner.search.bounds.outer import bound_variants
from autoparallel.planner.search.bounds.variants import Bounds
from autoparallel.planner.strategy.legal import strategy_problems
from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Shard, Strategy
from autoparallel.profiles.load import load_cluster
from benchmarks.random_problems import bounded
from benchmarks.random_problems.answers import Answer, isolated
from benchmarks.random_problems.cases import draw_case
from benchmarks.random_problems.choices import Choices, legal
from benchmarks.random_problems.draw import draw_strategy
from benchmarks.random_problems.enumerate import best_of_all, every_strategy
from benchmarks.random_problems.families import FAMILIES
from benchmarks.random_problems.laws import Effort, against_strategies, claims
from benchmarks.random_problems.moves import neighbours
from benchmarks.random_problems.verdicts import Grade, grade_of
from benchmarks.random_problems.weak import least_bounds
from tests.toy_graphs import toy_mlp, toy_transformer

FP16 = Execution(dtype="fp16")  # every device computes in it
TINY = Choices(algorithms=("auto", "tree"), buckets_mib=(25.0,), orders=False, shares=(0.0, 0.5))


def small(*, batch: int = 8, layers: int = 3, cluster: str = "h100-sxm:1x2", **more: object) -> Problem:
    graph = toy_transformer(layers=layers)
    return Problem(graph=graph, cluster=load_cluster(cluster), global_batch=batch, **more)  # type: ignore[arg-type]


def test_a_seed_draws_the_same_cases_again() -> None:
    first, again = ([draw_case(3, n) for n in range(10)] for _ in range(2))
    assert first == again
    assert first != [draw_case(4, n) for n in range(10)]


def test_draws_reach_every_family_and_every_kind_of_cluster() -> None:
    cases = [draw_case(5, n) for n in range(60)]
    assert len({case.model.family for case in cases}) >= len(FAMILIES) - 1
    assert {case.cluster.kind for case in cases} == {
        "box",
        "network",
        "racks",
        "shipped",
        "switches",
        "short",
        "mixed",
    }
    none = sum(not case.constraints for case in cases)
    assert 30 < none < 55, none


def test_every_enumerated_strategy_is_legal_meets_the_constraints_and_comes_once() -> None:
    problem = small(layers=2, batch=2, constraints={"shard.sequence_parallel": False})
    found = list(every_strategy(problem, replace(TINY, overlaps=(True,))))
    assert len(found) == len(set(found)) > 100
    assert not any(strategy_problems(problem.graph, problem.cluster, one) for one in found)
    assert not any(one.shard.sequence_parallel for one in found)
    schedules = {one.pipeline.schedule for one in found}
    assert schedules == {"none", "gpipe", "1f1b", "interleaved-1f1b", "zb1p", "zbv"}, schedules
    assert {one.offload.activations for one in found} == {0.0, 0.5}
    assert any(len(set(one.pipeline.stage_blocks)) > 1 for one in found)
    assert any(one.recompute.per_stage for one in found)


def test_lossy_compression_is_enumerated_only_where_it_is_allowed() -> None:
    for allowed in (False, True):
        problem = small(
            layers=2, batch=2, allow_lossy=allowed, constraints={"mesh.pp": 1, "mesh.tp": 1, "mesh.cp": 1}
        )
        found = every_strategy(problem, replace(TINY, shares=(0.0,), modes=("none",), partly=False))
        assert any(one.grad_sync.compression for one in found) == allowed


@pytest.mark.parametrize("cluster", ["h100-sxm:1x4", "short-node", "two-racks", "a100-v100"])
def test_score_takes_a_drawn_strategy_or_says_what_is_wrong(cluster: str) -> None:
    graphs = (toy_transformer(layers=5, ffns=(256, 512)), toy_mlp(layers=6))
    for graph in graphs:
        problem = Problem(
            graph=graph, cluster=load_cluster(cluster), global_batch=96, allow_lossy=True, execution=FP16
        )
        rng, priced = Random(7), 0
        for _ in range(8):
            strategy = draw_strategy(problem, rng)
            if strategy is None:
                continue
            for one in (strategy, *(beside for _, beside in islice(neighbours(problem, strategy, rng), 2))):
                assert legal(problem, one)
                try:
                    priced += score(problem.graph, problem.cluster, one).step_time_s > 0
                except UserError:
                    continue
        assert priced > 6


def test_neighbours_keep_what_the_user_fixed_and_change_something() -> None:
    problem = small(layers=4, batch=16, cluster="h100-sxm:1x4", constraints={"shard.zero": 3})
    start = draw_strategy(problem, Random(1))
    assert start is not None
    changed = list(islice(neighbours(problem, start, Random(2)), 60))
    assert len({told for told, _ in changed}) > 8
    assert all(one != start and one.shard.zero == 3 for _, one in changed)


def _answer(problem: Problem, strategy: Strategy, status: str, bound: float = 0.5) -> Answer:
    found = score(problem.graph, problem.cluster, strategy)
    return Answer(
        status=status, strategy=strategy, step_time_s=found.step_time_s, devices=found.devices,
        lower_bound_s=found.step_time_s * (1.0 if status == "optimal" else bound),
    )  # fmt: skip


def test_a_bad_plan_that_is_called_optimal_breaks_the_laws() -> None:
    problem = small(batch=64)
    poor = Strategy(batch=Batch(global_=64, micro=1), mesh=Mesh(dp_shard=2), shard=Shard(zero=3))
    for status, grade in (("optimal", Grade.BROKEN), ("feasible", Grade.COUNTED)):
        given = _answer(problem, poor, status, bound=1e-3)
        assert not list(claims(problem, given))
        tried = Counter[str]()
        found = list(against_strategies(problem, given, Random(1), Effort(draws=10, moves=30), tried))
        assert grade in {one.grade for one in found}, (status, found)
        assert tried["strategies"] == 40


def test_the_best_of_all_enumerated_strategies_keeps_the_laws() -> None:
    problem = small(batch=4, layers=2, constraints={"mesh.pp": 1})
    everything = replace(TINY, algorithms=("auto",), shares=(0.0,), partly=False)
    _, best, count = best_of_all(problem, every_strategy(problem, everything))
    assert best is not None
    assert count > 100
    given = _answer(problem, best, "optimal")
    tried = Counter[str]()
    found = against_strategies(problem, given, Random(3), Effort(draws=15, moves=40), tried, everything)
    assert not [one for one in found if one.grade is Grade.BROKEN]


def test_a_bound_above_what_its_variant_takes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, tried = small(layers=4, cluster="h100-sxm:1x4"), Counter[str]()
    assert not list(bounded.against_bounds(problem, Random(3), 30, 60.0, tried))
    assert tried["bounded variants"] == 30

    def doubled(*args: object) -> Bounds:
        found = bound_variants(*args)  # type: ignore[arg-type]
        return replace(found, time_s=2 * found.time_s)

    monkeypatch.setattr(bounded, "bound_variants", doubled)
    (told,) = bounded.against_bounds(problem, Random(3), 30, 60.0, tried)
    assert told.grade is Grade.BROKEN
    assert told.better > 0.2


def test_strategies_of_the_least_bounds_are_told_with_what_they_take() -> None:
    found = least_bounds(small(layers=4, cluster="h100-sxm:1x4"))
    assert len(found) == 6
    assert all(one.times >= 1 - 1e-9 for one in found), found
    assert [one.bound_s for one in found] == sorted(one.bound_s for one in found)
    assert (
        len(
            {
                (one.candidate.size, one.candidate.schedule, one.candidate.zero, one.candidate.mode)
                for one in found
            }
        )
        == 6
    )
    assert f"{found[0].times:.2f} x" in found[0].told()


def test_a_key_that_is_left_out_is_not_varied() -> None:
    problem = small(batch=64)
    start = Strategy(batch=Batch(global_=64, micro=1), mesh=Mesh(dp_shard=2), shard=Shard(zero=3))
    effort = Effort(draws=20, moves=40, left_out=("grad_sync", "embedding", "offload.optimizer"))
    tried = Counter[str]()
    found = list(against_strategies(problem, _answer(problem, start, "optimal"), Random(2), effort, tried))
    assert tried["left out"] > 10
    assert found
    assert not any(
        key in one.told for one in found for key in ("bucket_mib=", "embedding=", "offload.optimizer=")
    )


def test_grades_tell_a_false_proof_from_a_wide_gap() -> None:
    def given(status: str, bound: float) -> Answer:
        return Answer(status=status, step_time_s=1.0, lower_bound_s=bound, devices=8)

    assert grade_of(given("optimal", 1.0), 0.999, 8) is Grade.BROKEN
    assert grade_of(given("optimal", 1.0), 1.0 - 1e-7, 8) is Grade.KEPT
    assert grade_of(given("feasible", 0.9), 0.89, 8) is Grade.OUTSIDE
    assert grade_of(given("feasible", 0.9), 0.95, 8) is Grade.COUNTED
    assert grade_of(given("feasible", 0.9), 0.995, 8) is Grade.SLIGHT
    assert grade_of(given("optimal", 1.0), 0.5, 4) is Grade.FEWER
    assert grade_of(Answer(status="infeasible"), 3.0, 8) is Grade.BROKEN


def test_work_that_hangs_is_cut_and_work_that_dies_is_none() -> None:
    def hang() -> int:
        while True:
            pass

    assert isolated(lambda: 3, 20.0)[0] == 3
    result, cpu_s, cut = isolated(hang, 0.3)
    assert result is None
    assert cut
    assert cpu_s > 0.0
