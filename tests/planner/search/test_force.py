"""Brute force where several things meet: context parallelism, unlike devices, irregular networks, short nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.planner.check import plan_problems
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.heterogeneous.irregular import every_part, has_parts
from autoparallel.planner.money import rate_per_s
from autoparallel.planner.outcome import PlanResult
from autoparallel.planner.problem import Objective, Problem
from autoparallel.planner.strategy.types import Execution
from autoparallel.profiles import load_cluster
from autoparallel.profiles.parts import placed
from tests.clusters import ring
from tests.planned import plan
from tests.planner.search.force import best_by_force, with_memory
from tests.planner.search.test_mixed import mixed
from tests.toy_graphs import toy_mlp, toy_transformer

LONG = (  # sequences long enough for context parallelism
    toy_transformer(layers=2, hidden=64, heads=2, seq=2048, vocab=256),
    toy_transformer(layers=1, hidden=256, heads=4, seq=4096, vocab=256),
)
WIDE = (
    toy_transformer(layers=2, hidden=1024, heads=2, seq=512, vocab=4096),
    toy_transformer(layers=2, hidden=512, heads=4, seq=128, vocab=512, tied=True),
    toy_mlp(layers=2, width=2048),
)
OBJECTIVES = st.sampled_from(list(Objective))
AMPLE = 100.0  # devices hold these small models many times
ROOM = st.sampled_from([1.0, 1.02, 1.3, AMPLE])  # times the least memory that any strategy needs
FEW: dict[str, object] = {"recompute.mode": "none", "batch.micro": 1}


def every_cluster(problem: Problem) -> Iterator[Problem]:
    """Each part of the cluster, on every order of its nodes."""
    for part in every_part(problem):
        cluster = part.problem.cluster
        if cluster.network is None:
            yield part.problem
            continue
        for nodes in permutations(cluster.network.placement):
            yield replace(part.problem, cluster=placed(cluster, nodes))
        return  # any part has them all


def value_of(problem: Problem, found: PlanResult) -> float:
    """What was minimised first; the devices of a mixed cluster have prices of their own."""
    time_s, mesh = found.prediction.step_time_s, found.strategy.mesh
    match problem.objective:
        case Objective.MEMORY:
            return float(found.prediction.peak_bytes)
        case Objective.COST:
            return time_s * rate_per_s(problem.cluster, mesh.devices, mesh.groups)
        case _:
            return time_s


def check(problem: Problem, room: float) -> None:
    """The plan of the problem, with so much memory, against all strategies."""
    tight = problem
    if room < AMPLE:
        least = plan(replace(problem, objective=Objective.MEMORY)).prediction.peak_bytes
        tight = replace(problem, cluster=with_memory(problem.cluster, least * room))
    found = plan(tight)
    assert not plan_problems(tight, found.strategy, found.prediction)
    each = [
        best_by_force(one, Expander(graph=one.graph, cluster=one.cluster), points=not has_parts(tight))
        for one in every_cluster(tight)
    ]
    best, count = min(value for (value, _), _ in each), sum(number for _, number in each)
    value, shown = value_of(tight, found), f"{found.strategy} of {count}, best {best}"
    if found.status == "optimal":
        assert value <= best * (1 + 2e-6), shown
    if problem.objective == Objective.TIME:
        assert found.lower_bound_s <= best * (1 + 1e-9), shown


@settings(max_examples=2)
@given(
    graph=st.sampled_from(LONG), nodes=st.sampled_from(["h100-sxm:1x2", "a100-pcie-80gb:2x1"]),
    batch=st.sampled_from([1, 2]), objective=OBJECTIVES, room=ROOM,
    constraint=st.sampled_from([FEW, {**FEW, "mesh.cp": 2}, {"batch.micro": 1, "shard.zero": 3}]),
)  # fmt: skip
def test_brute_force_never_beats_a_plan_with_context_parallelism(
    graph: ModelGraph,
    nodes: str,
    batch: int,
    objective: Objective,
    room: float,
    constraint: dict[str, object],
) -> None:
    check(
        Problem(
            graph=graph, cluster=load_cluster(nodes), global_batch=batch, objective=objective,
            constraints=constraint,
        ),
        room,
    )  # fmt: skip


@settings(max_examples=2)
@given(
    graph=st.sampled_from(WIDE), counts=st.sampled_from([(1, 1), (2, 1)]), objective=OBJECTIVES, room=ROOM,
    prices=st.sampled_from([None, (2.0, 1.0)]),
)  # fmt: skip
def test_brute_force_never_beats_a_plan_of_unlike_devices(
    graph: ModelGraph,
    counts: tuple[int, int],
    objective: Objective,
    room: float,
    prices: tuple[float, float] | None,
) -> None:
    execution = Execution(dtype="fp16", param_dtype="fp16")
    check(
        Problem(
            graph=graph, cluster=mixed(*counts, prices=prices), global_batch=4, objective=objective,
            constraints={**FEW, "mesh.cp": 1}, execution=execution,
        ),
        room,
    )  # fmt: skip


@settings(max_examples=2)
@given(
    graph=st.sampled_from(WIDE), rates=st.lists(st.sampled_from([3e8, 1e9, 4e9]), min_size=3, max_size=3),
    objective=OBJECTIVES, room=ROOM,
)  # fmt: skip
def test_brute_force_never_beats_a_plan_on_an_irregular_network(
    graph: ModelGraph, rates: list[float], objective: Objective, room: float
) -> None:
    check(
        Problem(
            graph=graph, cluster=ring(rates, per_node=1), global_batch=6, objective=objective,
            constraints={**FEW, "mesh.cp": 1},
        ),
        room,
    )  # fmt: skip


def test_shapes_that_cannot_fit_do_not_stop_the_alternatives() -> None:
    """Where memory is least, most kinds have nothing that fits."""
    problem = Problem(
        graph=LONG[0], cluster=load_cluster("h100-sxm:1x2"), global_batch=4, objective=Objective.COST,
        constraints={"recompute.mode": "none"}, execution=Execution(kernels="eager"),
    )  # fmt: skip
    least = plan(replace(problem, objective=Objective.MEMORY)).prediction.peak_bytes
    assert plan(replace(problem, cluster=with_memory(problem.cluster, least))).prediction.feasible
