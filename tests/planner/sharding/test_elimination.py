"""Unknown by unknown equals trying everything, and CP-SAT on blocks of a model."""

from __future__ import annotations

from itertools import product
from math import inf, prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.sharding import solve
from autoparallel.planner.sharding.blocks import BlockAnswer, PricedBlock, Ties, off_stream, unsharded
from autoparallel.planner.sharding.cp_sat import solve_by_cp_sat
from autoparallel.planner.sharding.elimination import NoAssignment, Table, TooWide, Unknown, least_assignment
from autoparallel.planner.sharding.solve import TensorRequest, solve_tensor_plan
from autoparallel.planner.sharding.solver import solve_blocks
from autoparallel.planner.strategy.types import Execution
from autoparallel.profiles.load import load_cluster
from tests.toy_graphs import toy_mlp, toy_transformer

VALUES = {"a": "xyz", "b": "xy", "c": "xyz", "d": "x", "e": "xy"}


@st.composite
def tables(draw: st.DrawFn) -> list[Table]:
    every = [Table((name,), {(value,): 0 for value in values}) for name, values in VALUES.items()]
    for _ in range(draw(st.integers(1, 6))):
        scope = tuple(draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=3, unique=True)))
        legal = draw(st.sets(st.sampled_from(list(product(*(VALUES[n] for n in scope)))), min_size=1))
        every.append(Table(scope, {row: draw(st.integers(0, 9)) for row in sorted(legal)}))
    return every


def cost_of(every: list[Table], values: dict[Unknown, str]) -> int | None:
    rows = [table.rows.get(tuple(values[name] for name in table.scope)) for table in every]
    return None if None in rows else sum(cost for cost in rows if cost is not None)


@given(tables())
@settings(deadline=None)
def test_the_least_assignment_is_that_of_all(every: list[Table]) -> None:
    assert prod(map(len, VALUES.values())) == 36
    tried = [cost_of(every, dict(zip(VALUES, values, strict=True))) for values in product(*VALUES.values())]
    costs = [cost for cost in tried if cost is not None]
    if not costs:
        with pytest.raises(NoAssignment):
            least_assignment(every)
        return
    found = least_assignment(every)
    assert cost_of(every, found) == min(costs)


def test_a_join_that_is_too_wide_says_so() -> None:
    values = "abcdefghij"
    every = [Table(("hub", n), {(x, y): 0 for x in "x" for y in values}) for n in range(5)]
    every += [Table(tuple(range(5)), {(x,) * 5: 0 for x in values})]
    assert least_assignment(every)["hub"] == "x"
    pairs = [(a, b) for a in range(8) for b in range(a)]
    with pytest.raises(TooWide):
        least_assignment(Table(pair, dict.fromkeys(product(values, values), 0)) for pair in pairs)


def worth(blocks: list[PricedBlock], answers: list[BlockAnswer]) -> tuple[int, int, int]:
    pairs = list(zip(blocks, answers, strict=True))
    wished = sum(unsharded(b, name, place) for b, one in pairs for name, place in one.params.items())
    wished += sum(off_stream(b, node, state) for b, one in pairs for node, state in enumerate(one.states))
    return wished, sum(one.cost.time_ns for one in answers), sum(one.cost.memory_kib for one in answers)


@pytest.mark.parametrize("sequence", [False, True])
def test_both_ways_of_solving_find_the_same_cost(sequence: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def both(blocks: list[PricedBlock], ties: Ties, memory_price: float | None = None) -> list[BlockAnswer]:
        found, other = solve_blocks(blocks, ties, memory_price), solve_by_cp_sat(blocks, ties, memory_price)
        compared.append((worth(blocks, found), worth(blocks, other)))
        return found

    monkeypatch.setattr(solve, "solve_blocks", both)
    cluster = load_cluster("h100-sxm:1x8")
    for graph in (toy_transformer(), toy_mlp()):
        works = Expander(graph=graph, cluster=cluster).works
        indices = [works.index(block, dropout=False) for block in range(len(graph.blocks))]
        request = TensorRequest(
            tp=4, stride=1, sequence_parallel=sequence, execution=Execution(kernels="eager")
        )
        solve_tensor_plan(graph, indices, cluster, request)
    assert len(compared) > 3
    assert all(found == other for found, other in compared)


def test_where_memory_comes_first_a_slow_device_holds_as_little_as_a_fast_one() -> None:
    """Days in nanoseconds times kibibytes are more than 64 bits."""
    graph, held = toy_transformer(hidden=32768, seq=1 << 20), []
    for name in ("h100-sxm:1x8", "cpu-gloo:1x8"):
        works = Expander(graph=graph, cluster=(cluster := load_cluster(name))).works
        indices = [works.index(block, dropout=False) for block in range(len(graph.blocks))]
        request = TensorRequest(
            tp=4, stride=1, sequence_parallel=True, execution=Execution(kernels="eager"), memory_price=inf
        )
        plan = solve_tensor_plan(graph, indices, cluster, request)
        held.append([(cost.held_kib, cost.kept_kib) for cost in plan.costs])
    assert held[0] == held[1]
