"""The groups that talk most sit where the bandwidth is: blocks of a mesh on the nodes of an irregular network, CP-SAT.

    y[i, c]          block i stands on a node of kind c (nodes on one switch by equal cables are of one kind)
    z[i, j, c, d]    >= y[i, c] + y[j, d] - 1, for every two blocks that talk
    load[a, l]       = sum over (i, j, c, d) of  flows of talk a between i and j * share of link l * z[i, j, c, d]
    t[a]             >= load[a, l] / capacity[l], for every link l

    minimise  sum over talks a of  bytes[a] * t[a]     subject to  sum_c y[i, c] = 1,  sum_i y[i, c] = nodes of kind c

Each talk is what one set of axes says in a step: its flows between blocks (`costmodel.links.flows`) and the bytes
of each flow. What a block sends through its own port is the same wherever it stands, and left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from ortools.sat.python import cp_model

from autoparallel.costmodel.links import MESSAGES, Floats, directed_links, flows, pattern_of, routes_of
from autoparallel.costmodel.program import Axis, Collective, CollectiveOp, Program
from autoparallel.costmodel.topology import ranks_of
from autoparallel.planner.heterogeneous.placements import interchangeable
from autoparallel.profiles.hardware import Network

SCALE = 10**6  # of integers: a millionth of the slowest link's time. Kind: formula
WORK = 4.0  # deterministic seconds of the solver, so that equal inputs give equal placements. Kind: formula
_ROUNDS = {CollectiveOp.ALL_REDUCE: 2.0}  # times that a byte crosses a ring


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """What the groups along some axes exchange: flows between blocks, and bytes of each flow and step."""

    flows: Floats
    bytes: float


def talks(program: Program, network: Network) -> tuple[Talk, ...]:
    """The traffic between nodes of one step, by axes and pattern."""
    total: dict[tuple[tuple[Axis, ...], str], float] = {}
    for one, times in _collectives(program):
        pattern = pattern_of(one)
        members = tuple(
            replace(a, name="", derived=False) for a in program.axes if a.name in one.axes and a.size > 1
        )
        if members:
            ranks = ranks_of(one.axes, program.axes)
            share = 1.0 if pattern in MESSAGES else (ranks - 1) / ranks
            wire = one.size_bytes * share * _ROUNDS.get(one.op, 1.0) * times
            total[members, pattern] = total.get((members, pattern), 0.0) + wire
    found = []
    for (members, pattern), size in total.items():
        demand = flows(members, 1, pattern, network.devices)
        if demand.any():
            found.append(Talk(flows=demand, bytes=size))
    return tuple(found)


def _collectives(program: Program) -> Iterator[tuple[Collective, int]]:
    """Collectives of all stages, and how often a step has each."""
    micro = program.micro_batches
    reduced = micro if program.reduce_every_micro else 1
    for stage in program.stages:
        for block, count in stage.blocks:
            steps = (*block.forward, *block.recompute, *block.backward_input, *block.backward_weight)
            yield from ((s, micro * count) for s in steps if isinstance(s, Collective))
            yield from ((g, micro * count) for g in (*block.gathers, *block.regathers))
            yield from ((r, reduced * count) for r in block.reduce)
        yield from ((s, 2 * micro) for s in (stage.send, stage.received) if s is not None)
        yield from ((s, 1) for s in (*stage.after_step, *stage.tied_reduce))


def traffic_s(network: Network, told: Sequence[Talk], placement: Sequence[int]) -> float:
    """What is minimised: seconds of all talks one after the other, each over its narrowest link."""
    routes, at, total = routes_of(network.fabric), np.array(placement), 0.0
    for talk in told:
        rows, columns = np.nonzero(talk.flows)
        load = talk.flows[rows, columns] @ routes.share[at[rows], at[columns]]
        total += talk.bytes * float((load / routes.capacity).max())
    return total


def assign(network: Network, told: Sequence[Talk]) -> tuple[int, ...]:
    """The placement of the network's blocks that costs the talks least; the one it has where nothing is better."""
    have = dict(zip(network.placement, network.devices, strict=True))
    labels = interchangeable(network.fabric, [have.get(n, 0) for n in range(network.fabric.nodes)])
    kinds: dict[int, list[int]] = {}
    for node in sorted(network.placement):
        kinds.setdefault(labels[node], []).append(node)
    if not told or len(kinds) == 1:
        return network.placement
    found = _solve(network, told, list(kinds.values()))
    if found is None or traffic_s(network, told, found) >= traffic_s(network, told, network.placement):
        return network.placement
    return found


def _solve(network: Network, told: Sequence[Talk], kinds: list[list[int]]) -> tuple[int, ...] | None:
    blocks, model = range(len(network.devices)), cp_model.CpModel()
    y = [[model.new_bool_var(f"y{i},{c}") for c in range(len(kinds))] for i in blocks]
    for row in y:
        model.add_exactly_one(row)
    for c, nodes in enumerate(kinds):
        model.add(sum(row[c] for row in y) == len(nodes))
    have = dict(zip(network.placement, network.devices, strict=True))
    for i, c in product(blocks, range(len(kinds))):
        if have[kinds[c][0]] != network.devices[i]:
            model.add(y[i][c] == 0)
    for at, node in enumerate(network.placement):
        model.add_hint(y[at][next(c for c, nodes in enumerate(kinds) if node in nodes)], 1)
    z = _pairs(model, y, told)
    worst = max(traffic_s(network, [talk], network.placement) for talk in told) or 1.0
    times = [_time(model, network, talk, kinds, z, worst) for talk in told]
    model.minimize(sum(times))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = WORK
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    left = [iter(nodes) for nodes in kinds]
    return tuple(next(left[c]) for i in blocks for c in range(len(kinds)) if solver.boolean_value(y[i][c]))


def _pairs(
    model: cp_model.CpModel, y: list[list[cp_model.IntVar]], told: Sequence[Talk]
) -> dict[tuple[int, int], list[list[cp_model.IntVar]]]:
    """z of every two blocks that talk: its rows sum to y[i], its columns to y[j]."""
    together = sum((talk.flows + talk.flows.T for talk in told), np.zeros_like(told[0].flows))
    found = {}
    for i, j in np.argwhere(np.triu(together, 1) > 0.0).tolist():
        z = [[model.new_bool_var(f"z{i},{j},{c},{d}") for d in range(len(y[j]))] for c in range(len(y[i]))]
        for c, row in enumerate(z):
            model.add(sum(row) == y[i][c])
        for d, column in enumerate(zip(*z, strict=True)):
            model.add(sum(column) == y[j][d])
        found[i, j] = z
    return found


def _time(
    model: cp_model.CpModel,
    network: Network,
    talk: Talk,
    kinds: list[list[int]],
    z: dict[tuple[int, int], list[list[cp_model.IntVar]]],
    worst_s: float,
) -> cp_model.IntVar:
    """t of one talk times its bytes, in parts of the worst talk's seconds."""
    routes = routes_of(network.fabric)
    time = model.new_int_var(0, 1000 * SCALE, "t")
    terms: dict[int, list[cp_model.LinearExprT]] = {}
    for i, j in np.argwhere(talk.flows > 0.0).tolist():
        pair = z[min(i, j), max(i, j)]
        for c, d in product(range(len(kinds)), repeat=2):
            if c == d and len(kinds[c]) == 1:
                continue
            here, there = kinds[c][0], kinds[d][1 if c == d else 0]
            chosen = pair[c][d] if i < j else pair[d][c]
            seconds = talk.flows[i, j] * talk.bytes * routes.share[here, there] / routes.capacity
            for link in np.flatnonzero(seconds).tolist():
                if not _own_port(network, kinds, link):
                    terms.setdefault(link, []).append(round(seconds[link] / worst_s * SCALE) * chosen)
    for load in terms.values():
        model.add(time >= sum(load))
    return time


def _own_port(network: Network, kinds: list[list[int]], directed: int) -> bool:
    """Whether a direction of a link is the port of one of several nodes of a kind."""
    ends = directed_links(network.fabric)[directed]
    return any(end in nodes for nodes in kinds if len(nodes) > 1 for end in ends)
