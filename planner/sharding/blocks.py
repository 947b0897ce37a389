"""A block's tensor-parallel problem with its prices, and an answer to it with what that costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoparallel.planner.sharding.costs import BlockCosts, Cost, total
from autoparallel.planner.sharding.problem import BlockProblem, layout

Ties = Sequence[Sequence[tuple[int, str]]]  # groups of (block, parameter) that are one tensor

MOST_TIES = 3  # of `change_cost`


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockAnswer:
    """The variant of each operator, the state of each node, the placement of each parameter, and the cost. Kibibytes held
    are those of parameters; `kept_kib` counts what several operators keep once."""

    picks: tuple[int, ...]
    states: tuple[str, ...]
    params: Mapping[str, str]
    cost: Cost
    held_kib: int
    kept_kib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedBlock:
    """A block's problem with its costs, and what users' rules fix in it."""

    problem: BlockProblem
    costs: BlockCosts
    fixed_params: Mapping[str, str]
    fixed_nodes: Mapping[int, tuple[str, ...]]
    hooks: frozenset[int]  # edges that rules name: free of the tie-break against layout hooks
    sizes: Mapping[str, int]  # numbers in each matrix that is better sharded, whatever it costs
    stream: Mapping[int, str]  # the layout that a node of the residual stream had better have


class NoTensorPlan(Exception):
    """The rules given leave no legal choice."""


def unsharded(block: PricedBlock, name: str, placement: str) -> int:
    """Numbers of a matrix that stay whole under a placement, where it could be sharded."""
    could = name in block.sizes and len(block.problem.params[name]) > 1
    return block.sizes[name] if could and placement == "R" else 0


def off_stream(block: PricedBlock, node: int, state: str) -> int:
    """Numbers of the residual stream that are not laid out in a state as they had better be."""
    if node not in block.stream or layout(state) == block.stream[node]:
        return 0
    return block.problem.index.specs[block.problem.nodes[node].value].numel(1)


def change_cost(block: PricedBlock, edge: int, change: tuple[str, str]) -> Cost:
    """Cost of a layout hook. Of equally good plans the one with fewer layout hooks, with those that rules ask for, and at
    modules without modules inside: what those take and return is plain tensors."""
    cost, where = block.costs.changes[edge][change], block.problem.edges[edge]
    if edge in block.hooks:
        return cost
    container = where.module in block.problem.index.containers
    ties = 1 + container + (container and where.side == "output")
    return Cost(time_ns=cost.time_ns, memory_kib=cost.memory_kib + ties)


def most(costs: BlockCosts, name: str) -> int:
    """An upper bound on a block's kibibytes or nanoseconds, so that no saving of them pays for one of the others."""
    choices: list[Mapping[str, Cost] | Mapping[tuple[str, str], Cost]] = [
        *costs.changes,
        *costs.params.values(),
    ]
    rows = [*costs.variants, *(tuple(choice.values()) for choice in choices)]
    rows += [(cost,) for cost in costs.partial_params.values()]
    return sum(max((int(getattr(c, name)) for c in row), default=0) + MOST_TIES for row in rows)


def answer_of(
    block: PricedBlock, picks: tuple[int, ...], states: tuple[str, ...], params: Mapping[str, str]
) -> BlockAnswer:
    """The answer that chooses these, with its cost."""
    held_kib = sum(block.costs.params[name][placement].memory_kib for name, placement in params.items())
    return BlockAnswer(
        picks=picks, states=states, params=params, cost=answer_cost(block, picks, states, params),
        held_kib=held_kib, kept_kib=kept_kib(block, picks),
    )  # fmt: skip


def kept_kib(block: PricedBlock, picks: Sequence[int]) -> int:
    """Kibibytes kept for the backward pass: a storage once, and once more where shares of it are kept beside the whole."""
    kept = dict.fromkeys(key for row, k in zip(block.costs.keeps, picks, strict=True) for key in row[k])
    return sum(kib for _, kib in kept)


def answer_cost(
    block: PricedBlock, picks: Sequence[int], states: Sequence[str], params: Mapping[str, str]
) -> Cost:
    """Cost of an answer, checked without the solver: asserts that every constraint holds."""
    problem, costs = block.problem, block.costs
    found: list[Cost] = []
    summed: set[str] = set()
    for o, k in enumerate(picks):
        variant = problem.variants[o][k]
        assert all(states[n] == s for n, s in variant.states), problem.index.block.operators[o].name
        assert all(params[n] == a for n, a in variant.params), problem.index.block.operators[o].name
        found.append(costs.variants[o][k])
        summed.update(variant.partial_params)
    for e, (edge, changes) in enumerate(zip(problem.edges, costs.changes, strict=True)):
        before, after = states[edge.source], states[edge.target]
        if before != after:
            assert (before, after) in changes, (problem.nodes[edge.source], before, after)
            found.append(change_cost(block, e, (before, after)))
    for node, allowed in [*problem.fixed.items(), *block.fixed_nodes.items()]:
        assert states[node] in allowed, problem.nodes[node]
    found += [costs.params[name][placement] for name, placement in params.items()]
    found += [costs.partial_params[name] for name in summed]
    return total(found)
