"""CP-SAT over the tensor-parallel problems of blocks that share tied parameters.

Unknowns, all 0 or 1:

    pick[o, k]          operator o runs as its variant k           sum_k pick[o, k] = 1
    state[n, s]         node n is in state s                       sum_s state[n, s] = 1
    place[p, l]         parameter p has placement l                sum_l place[p, l] = 1
    change[e, s, t]     the layout hook at edge e turns s into t

Constraints: an operator's nodes and parameters are as its variant demands (sum over the variants that demand
s of node n equals state[n, s]); at an edge, what leaves the source in state s arrives in s or is changed, and
likewise at the target; what is fixed from outside stays so. For the objective see `solver.solve_blocks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from ortools.sat.python import cp_model

from autoparallel.planner.sharding.blocks import (
    BlockAnswer,
    NoTensorPlan,
    PricedBlock,
    Ties,
    answer_of,
    change_cost,
    most,
    off_stream,
    unsharded,
)
from autoparallel.planner.sharding.costs import Cost
from autoparallel.planner.sharding.problem import BlockProblem

Key = TypeVar("Key", int, str)

# CP-SAT's own deterministic time (about seconds, the same on every machine): a guard, as blocks of a few hundred
# operators take well under one. Kind: formula.
EFFORT = 20.0
# Integers per nanosecond where memory has a price. Kind: formula: a thousandth is near enough.
PRICE_UNITS = 1024
MOST_BITS = 62  # of a sum that CP-SAT adds up. Kind: formula: its integers have 64

_Term = tuple[cp_model.IntVar, int]  # an unknown, and what it adds to the objective


@dataclass(slots=True)
class _Unknowns:
    pick: list[list[cp_model.IntVar]]
    state: list[dict[str, cp_model.IntVar]]
    place: dict[str, dict[str, cp_model.IntVar]]
    change: list[dict[tuple[str, str], cp_model.IntVar]]
    summed: dict[str, cp_model.IntVar]


def solve_by_cp_sat(
    blocks: Sequence[PricedBlock],
    ties: Ties,
    memory_price: float | None = None,
) -> list[BlockAnswer]:
    """As `solver.solve_blocks`."""
    model = cp_model.CpModel()
    unknowns = [_unknowns(model, block) for block in blocks]
    pairs = list(zip(blocks, unknowns, strict=True))
    for block, unknown in pairs:
        _operators_meet_nodes(model, block.problem, unknown)
        _operators_meet_parameters(model, block.problem, unknown)
        _edges_keep_or_change(model, block.problem, unknown)
        _partial_gradients_are_summed(model, block.problem, unknown)
        _what_is_fixed_stays(model, block, unknown)
    _tied_parameters_agree(model, unknowns, ties)
    wishes = [term for block, unknown in pairs for term in _whole(block, unknown)]
    if memory_price is None and wishes:
        model.minimize(sum(wishes))
        solver = _solved(model)
        model.add(sum(wishes) <= round(solver.objective_value))
    if memory_price:
        per_ns, per_kib = _weights(blocks, memory_price)
        terms = [t for b, u in pairs for t in _priced(model, b, u, per_ns, per_kib)]
    else:
        weight = 1 + sum(most(block.costs, "memory_kib") for block in blocks)
        terms = [t for b, u in pairs for t in _objective(b, u, weight)]
    _minimize(model, terms)
    solver = _solved(model)
    return [_extract(solver, block, unknown) for block, unknown in pairs]


def _weights(blocks: Sequence[PricedBlock], memory_price: float) -> tuple[int, int]:
    """What a nanosecond and a kibibyte count."""
    if memory_price == inf:
        return 1, 1 + sum(most(block.costs, "time_ns") for block in blocks)
    return PRICE_UNITS, max(1, round(memory_price * PRICE_UNITS))


def _minimize(model: cp_model.CpModel, terms: Sequence[_Term]) -> None:
    """The least sum; where that may be more than the solver's integers hold (on slow devices), without its last bits."""
    more = max(sum(count for _, count in terms).bit_length() - MOST_BITS, 0)
    model.minimize(sum(var * (count >> more) for var, count in terms))


def _solved(model: cp_model.CpModel) -> cp_model.CpSolver:
    """One worker, so that equal inputs give equal answers."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # Ctrl-C stays Python's, during the solve and after
    solver.parameters.cp_model_probing_level = 0  # a third of the time, and finds nothing here
    solver.parameters.symmetry_level = 0
    solver.parameters.cp_model_use_sat_presolve = False  # likewise a tenth
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = EFFORT
    status = solver.solve(model)
    assert status != cp_model.MODEL_INVALID, model.validate()
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise NoTensorPlan
    return solver


def _whole(block: PricedBlock, unknown: _Unknowns) -> list[cp_model.LinearExpr]:
    """Numbers that stay whole: of matrices that could be sharded, and of the residual stream."""
    matrices = [(unknown.place[name], name, unsharded) for name in block.sizes if name in unknown.place]
    stream = [(unknown.state[node], node, off_stream) for node in block.stream]
    return [
        *(var * n for xs, name, of in matrices for a, var in xs.items() if (n := of(block, name, a))),
        *(var * n for xs, node, of in stream for s, var in xs.items() if (n := of(block, node, s))),
    ]


def _unknowns(model: cp_model.CpModel, block: PricedBlock) -> _Unknowns:
    p = block.problem
    return _Unknowns(
        pick=[[model.new_bool_var(f"pick {o} {k}") for k in range(len(row))] for o, row in enumerate(p.variants)],
        state=[{s: model.new_bool_var(f"state {n} {s}") for s in node.states} for n, node in enumerate(p.nodes)],
        place={n: {a: model.new_bool_var(f"place {n} {a}") for a in known} for n, known in p.params.items()},
        change=[{c: model.new_bool_var(f"change {e} {c}") for c in edge.changes} for e, edge in enumerate(p.edges)],
        summed={n: model.new_bool_var(f"summed {n}") for n in p.params},
    )  # fmt: skip


def _operators_meet_nodes(model: cp_model.CpModel, problem: BlockProblem, unknown: _Unknowns) -> None:
    for state in unknown.state:
        model.add_exactly_one(state.values())
    for row, picks in zip(problem.variants, unknown.pick, strict=True):
        model.add_exactly_one(picks)
        demands = _demands((variant.states for variant in row), picks)
        for node in dict.fromkeys(n for n, _ in demands):
            for s, var in unknown.state[node].items():
                model.add(sum(demands.get((node, s), ())) == var)


def _operators_meet_parameters(model: cp_model.CpModel, problem: BlockProblem, unknown: _Unknowns) -> None:
    for placements in unknown.place.values():
        model.add_exactly_one(placements.values())
    for row, picks in zip(problem.variants, unknown.pick, strict=True):
        demands = _demands((variant.params for variant in row), picks)
        for name in dict.fromkeys(n for n, _ in demands):
            for placement, var in unknown.place[name].items():
                model.add(sum(demands.get((name, placement), ())) == var)


def _demands(
    rows: Iterable[Iterable[tuple[Key, str]]], picks: Sequence[cp_model.IntVar]
) -> dict[tuple[Key, str], list[cp_model.IntVar]]:
    """By what variants demand, the picks of those that do."""
    found: dict[tuple[Key, str], list[cp_model.IntVar]] = {}
    for demanded, pick in zip(rows, picks, strict=True):
        for one in demanded:
            found.setdefault(one, []).append(pick)
    return found


def _edges_keep_or_change(model: cp_model.CpModel, problem: BlockProblem, unknown: _Unknowns) -> None:
    for edge, change in zip(problem.edges, unknown.change, strict=True):
        source, target = unknown.state[edge.source], unknown.state[edge.target]
        for s in dict.fromkeys((*source, *target)):  # in an order that is the same in every process
            leaving = [x for (before, _), x in change.items() if before == s]
            arriving = [x for (_, after), x in change.items() if after == s]
            # Kept = source - leaving = target - arriving, and never negative.
            kept = source.get(s, 0) - sum(leaving)
            model.add(kept == target.get(s, 0) - sum(arriving))
            if leaving:
                model.add(kept >= 0)


def _partial_gradients_are_summed(model: cp_model.CpModel, problem: BlockProblem, unknown: _Unknowns) -> None:
    for row, picks in zip(problem.variants, unknown.pick, strict=True):
        for variant, pick in zip(row, picks, strict=True):
            for name in variant.partial_params:
                model.add_implication(pick, unknown.summed[name])


def _what_is_fixed_stays(model: cp_model.CpModel, block: PricedBlock, unknown: _Unknowns) -> None:
    for node, allowed in [*block.problem.fixed.items(), *block.fixed_nodes.items()]:
        model.add(sum(x for s, x in unknown.state[node].items() if s in allowed) == 1)
    for name, placement in block.fixed_params.items():
        model.add(sum(x for a, x in unknown.place[name].items() if a == placement) == 1)


def _tied_parameters_agree(model: cp_model.CpModel, unknowns: Sequence[_Unknowns], ties: Ties) -> None:
    for (block, name), *others in ties:
        first = unknowns[block].place[name]
        for other, alias in others:
            second = unknowns[other].place[alias]
            for placement in dict.fromkeys((*first, *second)):
                model.add(first.get(placement, 0) == second.get(placement, 0))


def _objective(block: PricedBlock, unknown: _Unknowns, weight: int) -> list[_Term]:
    return [(var, cost.time_ns * weight + cost.memory_kib) for var, cost in _terms(block, unknown)]


def _priced(
    model: cp_model.CpModel, block: PricedBlock, unknown: _Unknowns, per_ns: int, per_kib: int
) -> list[_Term]:
    """Time and memory where memory has a price: what is kept is kept once by all operators that keep it."""
    costs = block.costs
    every = dict.fromkeys(key for row in costs.keeps for keys in row for key in keys)
    kept = {key: model.new_bool_var(f"kept {key}") for key in every}
    for picks, row in zip(unknown.pick, costs.keeps, strict=True):
        for key in dict.fromkeys(key for keys in row for key in keys):
            model.add(sum(x for x, keys in zip(picks, row, strict=True) if key in keys) <= kept[key])
    return [
        *((var, cost.time_ns * per_ns) for var, cost in _terms(block, unknown)),
        *(
            (x, change_cost(block, e, c).memory_kib)
            for e, xs in enumerate(unknown.change)
            for c, x in xs.items()
        ),
        *(
            (x, costs.params[name][a].memory_kib * per_kib)
            for name, xs in unknown.place.items()
            for a, x in xs.items()
        ),
        *((var, kib * per_kib) for (_, kib), var in kept.items()),
    ]


def _terms(block: PricedBlock, unknown: _Unknowns) -> Iterator[tuple[cp_model.IntVar, Cost]]:
    """Every unknown that costs something."""
    costs = block.costs
    for picks, row in zip(unknown.pick, costs.variants, strict=True):
        yield from zip(picks, row, strict=True)
    for edge, changes in enumerate(unknown.change):
        yield from ((x, change_cost(block, edge, change)) for change, x in changes.items())
    for name, placements in unknown.place.items():
        yield from ((x, costs.params[name][a]) for a, x in placements.items())
    yield from ((x, costs.partial_params[name]) for name, x in unknown.summed.items())


def _extract(solver: cp_model.CpSolver, block: PricedBlock, unknown: _Unknowns) -> BlockAnswer:
    def chosen(row: Mapping[str, cp_model.IntVar]) -> str:
        return next(key for key, var in row.items() if solver.value(var))

    picks = tuple(next(k for k, x in enumerate(xs) if solver.value(x)) for xs in unknown.pick)
    states = tuple(chosen(row) for row in unknown.state)
    return answer_of(block, picks, states, {name: chosen(row) for name, row in unknown.place.items()})
