"""Brute force over `score`: every strategy of a small problem, one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np

from autoparallel.costmodel.prediction import Held
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.problem import Objective, Problem, objective_value
from autoparallel.planner.score import score
from autoparallel.planner.search.bounds.outer import outer_of
from autoparallel.planner.search.driver import Search
from autoparallel.planner.search.partition.problem import Partition
from autoparallel.planner.search.space.build import build_space, variants
from autoparallel.planner.search.space.candidates import candidate, strategy_of
from autoparallel.planner.search.space.meshes import Ints
from autoparallel.planner.search.tensor_plans import asked_plans, search_tensor_plans
from autoparallel.planner.strategy.legal import strategy_problems
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles.hardware import Cluster


def with_memory(cluster: Cluster, capacity_bytes: float) -> Cluster:
    """The cluster with devices of so many usable bytes."""
    groups = tuple(
        replace(g, device=replace(g.device, memory_bytes=capacity_bytes, reserve_bytes=0.0))
        for g in cluster.groups
    )
    return replace(cluster, groups=groups)


def with_hosts(cluster: Cluster, memory_bytes: float) -> Cluster:
    """The cluster with hosts of so many usable bytes; 0: nobody knows, and nothing is offloaded unasked."""

    def having(constants: Mapping[str, float]) -> dict[str, float]:
        return {**constants, "host.memory_bytes": memory_bytes, "host.usable": 1.0}

    groups = tuple(
        replace(g, device=replace(g.device, constants=having(g.device.constants))) for g in cluster.groups
    )
    return replace(cluster, groups=groups)


def smallest(problem: Problem) -> Held:
    """The least memory of the devices that any strategy needs, by the search alone: nobody asks why others lost.

    Raises ValueError where no strategy is legal."""
    outer = outer_of(replace(problem, objective=Objective.MEMORY))
    if outer is None:
        raise ValueError("no legal strategy")
    search = Search(outer=outer, check=lambda _: None)
    search.run()
    search_tensor_plans(search, lambda _: None)
    if search.incumbent is None:
        raise ValueError("no strategy fits on the hosts")
    return search.incumbent


def partitions(problem: Problem, chunks: int, mode: str) -> Iterator[Partition]:
    """Every way to divide the repeated blocks to chunks, with every number of recomputed ones."""
    n = len(problem.graph.repeated_positions)
    for cuts in combinations(range(n + chunks - 1), chunks - 1):
        edges = (-1, *cuts, n + chunks - 1)
        blocks = tuple(b - a - 1 for a, b in pairwise(edges))
        for recomputed in product(*(range(b + 1) for b in blocks)) if mode != "full" else [(0,) * chunks]:
            yield Partition(blocks=blocks, recomputed=recomputed)


def every_strategy(problem: Problem, rows: Ints | None = None) -> Iterator[Strategy]:
    """Brute force: each variant of the space (or of some of its shapes) with each partition, as far as `strategy_problems` admits
    it."""
    space = build_space(problem)
    every = variants(space, np.arange(len(space.shapes)) if rows is None else rows)
    for row in range(len(every)):
        chosen = candidate(space, every, row)
        for partition in partitions(problem, chosen.chunks, chosen.mode):
            strategy = strategy_of(problem, chosen, partition)
            if not strategy_problems(problem.graph, problem.cluster, strategy):
                yield strategy


def points_asked(problem: Problem) -> list[tuple[Problem, Ints]]:
    """The further plans of the tensor plans that belong to the space: the problem with the entries of each, and the
    shapes that ask for it."""
    outer = outer_of(problem)
    if outer is None:
        return []
    search = Search(outer=outer, check=lambda _: None)
    search.run()
    return [
        (replace(problem, constraints={**problem.constraints, "tensor": rules}), rows)
        for rows, rules in asked_plans(search)
    ]


def best_by_force(
    problem: Problem, expander: Expander, *, points: bool = False
) -> tuple[tuple[float, float], int]:
    """The best objective of any strategy, with further `points` of the tensor plans if asked for, and how many there
    are."""
    best, count = (float("inf"), float("inf")), 0
    spaces: list[tuple[Problem, Ints | None]] = [(problem, None)]
    for one, rows in [*spaces, *(points_asked(problem) if points else [])]:
        for strategy in every_strategy(one, rows):
            prediction = score(problem.graph, problem.cluster, strategy, expander)
            count += 1
            if prediction.feasible:
                best = min(best, objective_value(problem, prediction))
    return best, count
