"""Embedding tables in tiers, chosen with the mesh: never beaten by brute force, and bounded from below by truth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product

import pytest

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.errors import UserError
from autoparallel.planner.embedding.choose import choose
from autoparallel.planner.embedding.options import Option, assigned, classes_of, rules_of, tiers_matter
from autoparallel.planner.embedding.search import PlacementSearch, alike, families, strategies
from autoparallel.planner.embedding.terms import Catalogue
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.plan import InfeasiblePlan, PlanResult
from autoparallel.planner.problem import Objective, Problem, objective_value
from autoparallel.planner.score import score
from autoparallel.planner.search.driver import WorkDone
from autoparallel.planner.strategy.types import EmbeddingRule, Execution, Strategy
from autoparallel.profiles.hardware import Cluster
from autoparallel.profiles.load import load_cluster
from tests.planned import plan
from tests.toy_graphs import toy_transformer
from tests.toy_tables import toy_recommender

SGD, ADAM = Execution(optimizer="sgd"), Execution()


def small(devices: str, *, memory_gb: float = 80.0, host_gb: float = 2000.0) -> Cluster:
    cluster = load_cluster(f"a100-sxm-80gb:{devices}")
    (group,) = cluster.groups
    constants = {**group.device.constants, "host.memory_bytes": host_gb * 1e9}
    device = replace(group.device, memory_bytes=memory_gb * 1e9, reserve_bytes=0.0, constants=constants)
    return replace(cluster, groups=(replace(group, device=device),))


def placements(problem: Problem) -> Iterator[dict[str, Option]]:
    """Every placement of the space: tables of a class have as many hot rows where they share a tier."""
    classes = classes_of(problem)
    each = []
    for one in classes:
        counts = (
            c
            for c in product(range(len(one.tables) + 1), repeat=len(one.options))
            if sum(c) == len(one.tables)
        )
        each.append(
            [
                c for c in counts
                if all(
                    sum(n > 0 for n, o in zip(c, one.options, strict=True) if o.tier == tier) <= 1
                    for tier in ("sharded", "parameter-server")
                )
            ]
        )  # fmt: skip
    for counts in product(*each):
        yield assigned(classes, counts)


def best_by_hand(problem: Problem) -> tuple[float, float]:
    expander = Expander(problem.graph, problem.cluster)
    best = (float("inf"), float("inf"))
    for strategy, chosen in product(list(strategies(problem)), list(placements(problem))):
        whole = replace(strategy, embedding=rules_of(problem.graph, chosen))
        found = score(problem.graph, problem.cluster, whole, expander)
        if found.feasible:
            best = min(best, objective_value(problem, found))
    return best


CASES = (
    Problem(
        graph=toy_recommender(5000, 2_000_000), cluster=small("1x2"), global_batch=4096, execution=ADAM,
        constraints={"batch.micro": 2048, "embedding_access.law": "zipf:1.1"},
    ),
    Problem(  # one table fits on the devices, two do not
        graph=toy_recommender(3_000_000, 3_000_000), cluster=small("1x2", memory_gb=4.0), global_batch=512,
        execution=SGD,
        constraints={"batch.micro": 64, "embedding_access.law": "zipf:0.9", "recompute.mode": "none", "shard.zero": 2},
    ),
    Problem(
        graph=toy_recommender(3_000_000, 40_000), cluster=small("2x2", memory_gb=1.5, host_gb=1.6),
        global_batch=4096, execution=ADAM, objective=Objective.COST,
        constraints={
            "shard.zero": 0, "mesh.dp_replicate": 4, "mesh.dp_shard": 1, "batch.micro": 1024,
            "embedding_access.update": "touched",
        },
    ),
    Problem(
        graph=toy_recommender(100_000, 20_000), cluster=small("1x2"), global_batch=64, execution=ADAM,
        objective=Objective.MEMORY, constraints={"batch.micro": 32},
    ),
    Problem(
        graph=toy_recommender(2_000_000, 300_000), cluster=small("1x1"), global_batch=4096, execution=ADAM,
        constraints={"batch.micro": 2048, "embedding_access.update": "touched"},
    ),
)  # fmt: skip


@pytest.mark.parametrize("case", range(len(CASES)))
def test_brute_force_over_score_finds_nothing_better(case: int) -> None:
    problem = CASES[case]
    best = plan(problem)
    by_hand = best_by_hand(problem)
    value = objective_value(problem, best.prediction)
    assert value[0] <= by_hand[0] * (1 + 2e-6), (best.strategy, by_hand)
    assert best.status == "optimal", best.gap


def searched(problem: Problem) -> PlacementSearch:
    expander, classes = Expander(problem.graph, problem.cluster), classes_of(problem)
    search = PlacementSearch(
        problem=problem, expander=expander, classes=classes, catalogue=Catalogue.of(problem, expander, classes),
        check=lambda _: None,
    )  # fmt: skip
    with suppress(WorkDone):
        search.run()
    return search


@pytest.mark.parametrize(
    ("cluster", "update", "zero"), [("1x8", "all", 3), ("2x8", "touched", 1), ("1x8", "touched", 2)]
)
def test_no_simulated_step_falls_below_the_bound_of_its_tables(cluster: str, update: str, zero: int) -> None:
    constraints = {
        "embedding_access.law": "zipf:1.05",
        "embedding_access.update": update,
        "batch.micro": 512,
        "shard.zero": zero,
        "recompute.mode": "none",
    }
    problem = Problem(
        graph=toy_recommender(500_000, 70_000, 500_000), cluster=small(cluster), global_batch=32_768,
        constraints=constraints,
    )  # fmt: skip
    seen = searched(problem).seen
    assert seen
    for one in seen:
        assert one.value[0] >= one.bound[0] * (1 - 1e-9), one


def place_of(result: PlanResult, module: str) -> EmbeddingRule | None:
    rules = result.strategy.embedding
    return next((r for r in rules if r.module in (module, "tables.*")), None)


def test_what_the_user_places_stays_there_and_the_rest_is_chosen() -> None:
    rules = (
        EmbeddingRule(module="tables.0", tier="parameter-server"),
        EmbeddingRule(module="tables.1", tier="sharded", hot_rows=5),
    )
    problem = replace(CASES[0], constraints={**CASES[0].constraints, "embedding": rules})
    found = plan(problem)
    first, second = place_of(found, "tables.0"), place_of(found, "tables.1")
    assert first is not None
    assert second is not None
    assert first.tier == "parameter-server"
    assert (second.tier, second.hot_rows) == ("sharded", 5)


def test_tables_kept_on_the_devices_are_planned_as_ever() -> None:
    fixed = (EmbeddingRule(module="*", tier="device"),)
    problem = replace(CASES[0], constraints={**CASES[0].constraints, "embedding": fixed})
    assert not tiers_matter(problem)
    assert plan(problem).strategy.embedding == ()


def test_tables_larger_than_all_devices_go_to_the_hosts() -> None:
    problem = replace(
        CASES[0],
        graph=toy_recommender(30_000_000, 30_000_000),
        cluster=small("1x2", memory_gb=8.0),
        constraints={"batch.micro": 2048},
    )
    found = plan(problem)
    assert {rule.tier for rule in found.strategy.embedding} == {"parameter-server"}
    assert found.prediction.host_bytes > 40e9


def test_tables_larger_than_the_hosts_fit_nowhere() -> None:
    rules = (EmbeddingRule(module="*", tier="parameter-server"),)
    problem = replace(
        CASES[0], cluster=small("1x2", host_gb=0.5), constraints={"embedding": rules},
    )  # fmt: skip
    with pytest.raises(InfeasiblePlan, match="each host"):
        plan(problem)


def test_tiers_and_tensor_parallelism_exclude_each_other_in_words() -> None:
    rules = (EmbeddingRule(module="*", tier="sharded"),)
    problem = replace(CASES[0], constraints={"embedding": rules, "mesh.tp": 2})
    with pytest.raises(UserError, match=r"mesh\.tp = 2"):
        plan(problem)


@pytest.mark.parametrize(
    ("graph", "matter"),
    [(toy_recommender(100_000), True), (toy_transformer(), False), (toy_recommender(50), False)],
)
def test_only_models_that_are_mostly_tables_are_searched_for_tiers(graph: ModelGraph, matter: bool) -> None:
    problem = Problem(graph=graph, cluster=small("1x2"), global_batch=8)
    assert tiers_matter(problem) == matter


def test_the_plan_says_what_the_other_tiers_would_take() -> None:
    found = plan(CASES[0], rivals=True)
    kinds = {other.kind for other in found.alternatives}
    assert any("embedding tables" in kind for kind in kinds), kinds
    assert all(isinstance(other.strategy, Strategy) for other in found.alternatives)


def test_gradients_go_through_parameter_servers_where_the_user_asks_for_it() -> None:
    constraints = {"mesh.dp_replicate": 2, "shard.zero": 0, "recompute.mode": "none"}
    problem = Problem(
        graph=toy_transformer(layers=2), cluster=small("2x1"), global_batch=8, constraints=constraints
    )
    served = replace(problem, constraints={**constraints, "grad_sync.algorithm": "parameter-server"})
    found, free = plan(served), plan(problem)
    assert found.status == "optimal"
    assert found.strategy.grad_sync.algorithm == "parameter-server"
    assert found.prediction.step_time_s >= free.prediction.step_time_s


def test_many_meshes_and_lossy_methods_hide_no_simple_plan() -> None:
    """More strategies than can be opened: the first one is still there, and nobody is told that nothing fits."""
    rules = (EmbeddingRule(module="*", tier="sharded"),)
    problem = Problem(
        graph=toy_recommender(*(12_000_000,) * 8), cluster=load_cluster("a100-sxm-80gb:12x8"), global_batch=131_072,
        constraints={"embedding": rules}, allow_lossy=True,
    )  # fmt: skip
    first = next(s for s in strategies(problem) if s.batch.micro == 1024)
    simple = replace(first, embedding=(EmbeddingRule(module="*", tier="sharded", hot_rows=0),))
    by_hand = score(problem.graph, problem.cluster, simple)
    assert by_hand.feasible
    found = plan(problem)
    assert found.prediction.step_time_s <= by_hand.step_time_s * (1 + 1e-9)
    assert len(list(strategies(problem))) > 1000


def test_strategies_that_only_shard_and_reduce_in_other_ways_have_a_bound_together() -> None:
    problem = Problem(
        graph=toy_recommender(400_000, 30_000), cluster=load_cluster("a100-sxm-80gb:2x4"), global_batch=4096,
        constraints={"embedding_access.law": "zipf:1.05"}, allow_lossy=True,
    )  # fmt: skip
    search, classes = searched(problem), classes_of(problem)
    groups = list(alike(families(strategies(problem))))
    chosen = [(g, s) for g in groups[::10] for first, lossy in g[::5] for s in (first, *lossy[-1:])]
    assert len(chosen) > 10
    for together, strategy in chosen:
        answer = choose(search.together(together))
        assert answer is not None
        for option in range(len(classes[0].options)):
            counts = tuple(
                tuple(len(c.tables) * (o == option) for o in range(len(c.options))) for c in classes
            )
            if any(sum(row) == 0 for row in counts):
                continue
            placed = replace(strategy, embedding=rules_of(problem.graph, assigned(classes, counts)))
            found = score(problem.graph, problem.cluster, placed, search.expander)
            assert found.step_time_s >= answer.bound_s * (1 - 1e-9), placed
