"""The choices for a model's embedding tables: tiers and hot rows, for each class of tables that are alike."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoparallel.costmodel.access import AccessLaw
from autoparallel.costmodel.graph import ModelGraph
from autoparallel.errors import UserError
from autoparallel.planner.expand.tables import Table, TablePlace, find_tables, law_of, rule_of
from autoparallel.planner.problem import Problem
from autoparallel.planner.search.space.candidates import access_of
from autoparallel.planner.strategy.embedding import unknown_tables
from autoparallel.planner.strategy.types import TIERS, EmbeddingRule

# Hot rows that are tried: none, and a geometric grid, as what they save follows the logarithm of their number under
# any law of access that is nearly a power. Kind: formula.
FIRST_HOT, HOT_GROWTH = 1024, 4
# Tables are worth a search of their own where they hold most of the model. Kind: formula.
MOST_OF_MODEL = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Option:
    """Where the rows of a table may stand; the device tier has all of them hot."""

    tier: str
    hot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableClass:
    """Tables that cost alike wherever they stand, in the model's order, and their common choices."""

    tables: tuple[Table, ...]
    law: AccessLaw
    options: tuple[Option, ...]

    def place(self, table: Table, option: Option) -> TablePlace | None:
        """The table with that choice; None where all of it is on every device."""
        if option.tier == "device" or option.hot >= table.rows:
            return None
        return TablePlace(table=table, tier=option.tier, hot=option.hot, law=self.law)


Fixed = tuple[str | None, int | None]  # tier and hot rows that a rule fixes
Counts = tuple[tuple[int, ...], ...]  # by class and option, how many of its tables have it


def given_rules(problem: Problem) -> tuple[EmbeddingRule, ...]:
    """The user's `[[embedding]]` entries."""
    rules = problem.constraints.get("embedding", ())
    assert isinstance(rules, tuple)
    return rules


def without_tables(problem: Problem) -> Problem:
    """The problem with every table on the devices, as it is where no rule says otherwise."""
    if "embedding" not in problem.constraints:
        return problem
    kept = {key: value for key, value in problem.constraints.items() if key != "embedding"}
    return replace(problem, constraints=kept)


def tiers_matter(problem: Problem, *, alike: bool = True) -> bool:
    """Whether tables have choices worth a search: the user speaks of tiers, or tables are most of the model. Only where
    devices and network are `alike` everywhere. Raises UserError where the user asks for tiers elsewhere, or for tables
    that are not there."""
    if "embedding" in problem.constraints:
        if unknown := list(unknown_tables(problem.graph, given_rules(problem))):
            raise UserError("\n".join(unknown))
        asked = any(rule.tier != "device" for rule in given_rules(problem))
        if asked and not alike:
            raise UserError(
                f"[[embedding]]: tables in tiers need devices and a network that are alike everywhere, and those of "
                f'{problem.cluster.name} are not; set tier = "device"'
            )
        return asked
    if not alike:
        return False
    if any(problem.constraints.get(key, 1) != 1 for key in ("mesh.pp", "mesh.tp", "mesh.cp", "mesh.ep")):
        return False
    most = problem.graph.parameter_count * MOST_OF_MODEL
    largest = max((p.numel for block in problem.graph.blocks for p in block.parameters), default=0)
    if largest * len(problem.graph.chain) < most:  # cannot be: spares other models the look at every operator
        return False
    return sum(table.numel for table in find_tables(problem.graph)) > most


def classes_of(problem: Problem) -> tuple[TableClass, ...]:
    """The model's tables by class; each with the choices that the user's rules leave."""
    access, rules = access_of(problem), given_rules(problem)
    served = problem.cluster.device.constants["host.memory_bytes"] > 0
    found: dict[tuple[int, int, AccessLaw, Fixed], list[Table]] = {}
    for table in find_tables(problem.graph):
        block = problem.graph.chain[table.position].block
        law, rule = law_of(access, table.module), rule_of(rules, table.module)
        found.setdefault((block, table.operator, law, _open(rule)), []).append(table)
    return tuple(
        TableClass(tables=tuple(tables), law=law, options=_options(tables[0].rows, fixed, served=served))
        for (_, _, law, fixed), tables in found.items()
    )


def _open(rule: EmbeddingRule | None) -> Fixed:
    """The tier and hot rows that a rule fixes."""
    return (None, None) if rule is None else (rule.tier, rule.hot_rows)


def _options(rows: int, fixed: Fixed, *, served: bool) -> tuple[Option, ...]:
    tier, hot = fixed
    if fixed == (None, None) and rows <= FIRST_HOT:  # all of them hot
        return (Option(tier="device", hot=rows),)
    grid = [0]
    while (step := FIRST_HOT * HOT_GROWTH ** (len(grid) - 1)) < rows:
        grid.append(step)
    hots = grid if hot is None else [min(hot, rows)]
    tiers = [t for t in TIERS if tier in (None, t) and (t != "parameter-server" or served or tier == t)]
    return tuple(
        Option(tier=t, hot=h)
        for t in tiers
        for h in ([rows] if t == "device" else hots)
        if t == "device" or h < rows or tier is not None
    )


def assigned(classes: Sequence[TableClass], counts: Counts) -> dict[str, Option]:
    """The choice of every table, by module: of tables that are alike, the first in the model take the first choices."""
    chosen: dict[str, Option] = {}
    for one, numbers in zip(classes, counts, strict=True):
        each = [option for option, n in zip(one.options, numbers, strict=True) for _ in range(n)]
        chosen |= {table.module: option for table, option in zip(one.tables, each, strict=True)}
    return chosen


def rules_of(graph: ModelGraph, chosen: Mapping[str, Option]) -> tuple[EmbeddingRule, ...]:
    """The choices as a strategy has them: one rule where all tables whose names differ in numbers alone are alike;
    none where every table is on the devices."""
    if all(option.tier == "device" for option in chosen.values()):
        return ()
    alike: dict[str, list[str]] = {}
    for table in find_tables(graph):
        alike.setdefault(_pattern(table.module), []).append(table.module)
    rules = list[EmbeddingRule]()
    for pattern, modules in alike.items():
        same = len({chosen[module] for module in modules}) == 1 and len(modules) > 1
        rules += [_rule(pattern if same else m, chosen[m]) for m in (modules[:1] if same else modules)]
    return tuple(sorted(rules, key=lambda rule: rule.module.count("*")))  # single tables are asked for first


def _pattern(module: str) -> str:
    return re.sub(r"\d+", "*", module)


def _rule(module: str, option: Option) -> EmbeddingRule:
    hot = None if option.tier == "device" else option.hot
    return EmbeddingRule(module=module, tier=option.tier, hot_rows=hot)
