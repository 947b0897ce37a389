"""Clusters of unlike devices: which device groups take which part of the pipeline.

A plan for such a cluster is one of

    one group       only its devices, a cluster of their own
    in proportion   every pipeline rank has devices of one group (`mesh.groups`), as many as every other rank; its
                    stages are priced and held by them
    all alike       all devices, at the pace and with the memory of the weakest

Each is a search of its own, which begins with the best value of those before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, permutations

from autoparallel.planner.problem import Problem
from autoparallel.planner.search.space.meshes import Bools, most_chunks
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles.hardware import Cluster
from autoparallel.profiles.parts import only_group

# More assignments than this are not searched: those with the fewest pipeline ranks are. Kind: formula: seconds each.
MOST_ASSIGNMENTS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One way to use a mixed cluster: the problem to search, and the group of each pipeline rank of its answer."""

    name: str
    problem: Problem
    group: int | None = None  # the only one in use
    nodes: tuple[int, ...] = ()  # in rank order; empty: all, as they are
    per_node: int = 0  # devices used of each; 0: all that it has
    worth: Bools | None = None  # meshes and orders to look at; all if None
    loose: bool = False  # no strategy runs as it is priced here: a bound for placements too many to look at

    def whole(self, strategy: Strategy) -> Strategy:
        """The part's strategy as one of the whole cluster."""
        mesh = strategy.mesh
        if self.group is not None:
            mesh = replace(mesh, groups=(self.group,) * mesh.pp)
        if self.nodes or self.per_node:
            mesh = replace(mesh, placement=self.nodes, per_node=self.per_node)
        return strategy if mesh is strategy.mesh else replace(strategy, mesh=mesh)


def is_mixed(problem: Problem) -> bool:
    """Whether the search has to choose device groups: several kinds of device, and the user names none."""
    devices = {group.device.name for group in problem.cluster.groups}
    return len(devices) > 1 and not problem.fixed.groups


def parts(problem: Problem) -> tuple[Part, ...]:
    """Every way to use the cluster: single groups first, which are searched fastest."""
    cluster = problem.cluster
    empty = {k: v for k, v in problem.constraints.items() if k != "mesh.groups"}  # an empty list says nothing
    free = replace(problem, constraints=empty)
    found = [
        Part(name=_only(cluster, g), problem=replace(free, cluster=only_group(cluster, g)), group=g)
        for g in range(len(cluster.groups))
    ]
    for groups in _assignments(free):
        named = replace(free, constraints={**empty, "mesh.groups": groups})
        found.append(Part(name="stages in proportion to their devices", problem=named))
    found.append(Part(name="all devices as slow as the slowest", problem=free))
    return tuple(found)


def _only(cluster: Cluster, index: int) -> str:
    group = cluster.groups[index]
    return f"only the {group.devices} {group.device.name}"


def _assignments(problem: Problem) -> Iterator[tuple[int, ...]]:
    """The group of each pipeline rank: sets of groups in every order, each with as many ranks as its devices make.

    `size` devices per rank: the divisors of the smallest group of the set. The fewest ranks come first.
    """
    groups = problem.cluster.groups
    fixed, most = problem.fixed.pp, most_chunks(problem.graph)
    found: dict[tuple[int, ...], None] = {}
    sets = [s for n in range(2, len(groups) + 1) for s in combinations(range(len(groups)), n)]
    for chosen in sets:
        least = min(groups[g].devices for g in chosen)
        for size in (d for d in range(least, 0, -1) if least % d == 0):
            ranks = {g: groups[g].devices // size for g in chosen}
            pp = sum(ranks.values())
            if pp > most or fixed not in (None, pp):
                continue
            for order in permutations(chosen):
                found.setdefault(tuple(g for g in order for _ in range(ranks[g])))
    yield from sorted(found, key=lambda groups: (len(groups), groups))[:MOST_ASSIGNMENTS]
