"""The best tensor-parallel choices for blocks that share tied parameters.

Blocks are chains of operators with few values between them, so that unknown by unknown (`elimination.py`) they are solved in a
few milliseconds: a state for each node, a placement for each parameter, each operator a table of its variants and each edge
one of its layout hooks. CP-SAT (`cp_sat.py`) has what that is no good at: memory with a price, as a storage that several
operators keep is kept once, and blocks whose tables would be too wide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

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
from autoparallel.planner.sharding.elimination import NoAssignment, Table, TooWide, Unknown, least_assignment
from autoparallel.planner.sharding.problem import Variant

Rows = dict[tuple[str, ...], int]


def solve_blocks(
    blocks: Sequence[PricedBlock], ties: Ties, memory_price: float | None = None
) -> list[BlockAnswer]:
    """The best choice for all blocks together; `ties` are groups of (block, parameter) that are one tensor.

    Least nanoseconds plus `memory_price` (ns per KiB) times kibibytes held and kept; 0 has memory break ties, infinity
    time. None is 0 with a wish before it: fewest numbers in matrices (`sizes`) and activations (`stream`) that are not as
    they had better be. Raises NoTensorPlan where nothing is legal.
    """
    if memory_price:
        return _solve_by_cp_sat(blocks, ties, memory_price)
    try:
        return _solve_by_tables(blocks, ties, wished=memory_price is None)
    except NoAssignment:
        raise NoTensorPlan from None
    except TooWide:
        return _solve_by_cp_sat(blocks, ties, memory_price)


def _solve_by_cp_sat(
    blocks: Sequence[PricedBlock], ties: Ties, memory_price: float | None
) -> list[BlockAnswer]:
    from autoparallel.planner.sharding.cp_sat import (
        solve_by_cp_sat,
    )  # seconds of imports, for the few that need it

    return solve_by_cp_sat(blocks, ties, memory_price)


def _solve_by_tables(blocks: Sequence[PricedBlock], ties: Ties, *, wished: bool) -> list[BlockAnswer]:
    names = {place: ties_[0] for ties_ in ties for place in ties_}  # tied parameters are one unknown
    per_ns = 1 + sum(most(block.costs, "memory_kib") for block in blocks)
    per_wish = per_ns * (1 + sum(most(block.costs, "time_ns") for block in blocks)) if wished else 0
    made = [
        _Tables(block=block, number=number, names=names, per_ns=per_ns, per_wish=per_wish)
        for number, block in enumerate(blocks)
    ]
    found = least_assignment(table for one in made for table in one.every())
    return [one.answer(found) for one in made]


class _Tables:
    """A block's choices as tables of what they cost, in kibibytes: a nanosecond is `per_ns` of them, a number that is not
    sharded as it had better be `per_wish`."""

    def __init__(
        self,
        block: PricedBlock,
        number: int,
        names: Mapping[tuple[int, str], tuple[int, str]],
        per_ns: int,
        per_wish: int,
    ) -> None:
        self.block, self.number, self.names = block, number, names
        self.per_ns, self.per_wish = per_ns, per_wish
        # Operators with a variant that leaves a parameter's gradient a partial sum: that of one alone is part of its table.
        self.partial = Counter(
            name
            for row in block.problem.variants
            for name in dict.fromkeys(n for v in row for n in v.partial_params)
        )

    def every(self) -> Iterator[Table]:
        """All tables of the block."""
        problem = self.block.problem
        yield from (self._node(node) for node in range(len(problem.nodes)))
        yield from (self._parameter(name) for name in problem.params)
        yield from (self._edge(edge) for edge in range(len(problem.edges)))
        yield from (self._operator(op) for op in range(len(problem.variants)))
        for name, operators in self.partial.items():
            if operators > 1:
                yield Table((self._summed(name),), {("no",): 0, ("yes",): self._cost(self._sum(name))})

    def answer(self, found: Mapping[Unknown, str]) -> BlockAnswer:
        """What an assignment says of this block."""
        problem = self.block.problem
        picks = []
        for op, row in enumerate(problem.variants):
            legal = [k for k, v in enumerate(row) if self._agrees(v, found)]
            picks.append(min(legal, key=lambda k: self._variant_cost(op, k)))
        states = tuple(found[self._state(node)] for node in range(len(problem.nodes)))
        params = {name: found[self._place(name)] for name in problem.params}
        return answer_of(self.block, tuple(picks), states, params)

    # ---- unknowns

    def _state(self, node: int) -> Unknown:
        return "state", self.number, node

    def _place(self, name: str) -> Unknown:
        return "place", *self.names.get((self.number, name), (self.number, name))

    def _summed(self, name: str) -> Unknown:
        return "summed", self.number, name

    # ---- tables

    def _node(self, node: int) -> Table:
        block = self.block
        allowed = [fixed[node] for fixed in (block.problem.fixed, block.fixed_nodes) if node in fixed]
        states = [s for s in block.problem.nodes[node].states if all(s in some for some in allowed)]
        rows: Rows = {(s,): self.per_wish * off_stream(block, node, s) for s in states}
        return Table((self._state(node),), rows)

    def _parameter(self, name: str) -> Table:
        block, fixed = self.block, self.block.fixed_params.get(name)
        places = [a for a in block.problem.params[name] if fixed in (None, a)]
        costs = block.costs.params[name]
        rows: Rows = {(a,): self._cost(costs[a]) + self.per_wish * unsharded(block, name, a) for a in places}
        return Table((self._place(name),), rows)

    def _edge(self, number: int) -> Table:
        """A state is kept for nothing, or changed by a layout hook."""
        block, edge = self.block, self.block.problem.edges[number]
        source, target = block.problem.nodes[edge.source].states, block.problem.nodes[edge.target].states
        rows: Rows = {change: self._cost(change_cost(block, number, change)) for change in edge.changes}
        return Table(
            (self._state(edge.source), self._state(edge.target)),
            rows | {(s, s): 0 for s in source if s in target},
        )

    def _operator(self, op: int) -> Table:
        row = self.block.problem.variants[op]
        shared = sorted({n for v in row for n in v.partial_params if self.partial[n] > 1})
        scope = dict.fromkeys(key for variant in row for key, _ in self._demands(variant))
        rows: Rows = {}
        for k, variant in enumerate(row):
            demands, cost = list(self._demands(variant)), self._variant_cost(op, k)
            values = dict(demands)
            if len(values) < len(scope) or any(values[key] != value for key, value in demands):
                continue  # a node or a parameter would have no state at all, or two
            own = [tuple(values[key] for key in scope)]
            for name in shared:
                said = ("yes",) if name in variant.partial_params else ("no", "yes")
                own = [(*one, word) for one in own for word in said]
            for one in own:
                rows[one] = min(cost, rows.get(one, cost))
        return Table((*scope, *(self._summed(name) for name in shared)), rows)

    def _demands(self, variant: Variant) -> Iterator[tuple[Unknown, str]]:
        yield from ((self._state(node), s) for node, s in variant.states)
        yield from ((self._place(name), a) for name, a in variant.params)

    def _agrees(self, variant: Variant, found: Mapping[Unknown, str]) -> bool:
        if any(found[key] != value for key, value in self._demands(variant)):
            return False
        return all(self.partial[n] == 1 or found[self._summed(n)] == "yes" for n in variant.partial_params)

    def _variant_cost(self, op: int, k: int) -> int:
        variant = self.block.problem.variants[op][k]
        alone = (self._sum(n) for n in dict.fromkeys(variant.partial_params) if self.partial[n] == 1)
        return self._cost(self.block.costs.variants[op][k]) + sum(map(self._cost, alone))

    def _sum(self, name: str) -> Cost:
        return self.block.costs.partial_params[name]

    def _cost(self, cost: Cost) -> int:
        return cost.time_ns * self.per_ns + cost.memory_kib
