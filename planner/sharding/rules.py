"""`[[tensor]]` entries: what they fix in the solve, and the entries that say what a plan does."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from autoparallel.costmodel.graph import Block, ModelGraph, parts_of, sharded_dim, strided
from autoparallel.errors import UserError
from autoparallel.planner.sharding.blocks import NoTensorPlan, PricedBlock
from autoparallel.planner.sharding.plan import BlockPlan, TensorPlan
from autoparallel.planner.sharding.problem import OUTSIDE, BlockProblem, layout
from autoparallel.planner.sharding.solver import solve_blocks
from autoparallel.planner.strategy.types import TensorRule

_Key = TypeVar("_Key", str, int)
_Value = TypeVar("_Value", str, tuple[str, ...])
_SHARD = re.compile(r"shard\((-?\d+)(?:, strided (\d+))?\)")
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


class NotShardable(UserError):
    """A model that has no tensor-parallel plan, whatever the entries say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """What the entries fix in one block; `source` says which entry fixed a parameter or node.

    `hooks` are the edges that entries name: where two plans cost the same, the one with these layout hooks is meant.
    """

    params: Mapping[str, str]
    nodes: Mapping[int, tuple[str, ...]]
    hooks: frozenset[int]
    source: Mapping[str | int, str]


# ---- entries -> constraints


def fixed_by_rules(
    graph: ModelGraph, problems: Sequence[BlockProblem], rules: Sequence[TensorRule]
) -> list[Fixed]:
    """What the entries fix in each distinct block. Raises UserError naming the entry that cannot hold."""
    found = [Fixed(params={}, nodes={}, hooks=frozenset(), source={}) for _ in problems]
    names = [_names(graph, block) for block in range(len(problems) if rules else 0)]
    alike: dict[object, list[re.Pattern[str]]] = {}  # the names of entries that say the same
    for rule in rules:
        alike.setdefault(_said(rule), []).append(_pattern(rule.module))
    for rule in rules:
        # A module of the glue may stand in several blocks: each key of its entry must hold in one of them.
        absent: dict[str, str] = {}
        held: set[str] = set()
        matched = False
        for b, problem in enumerate(problems):
            for module in _matches(names[b], rule, alike[_said(rule)]):
                matched = True
                missing = _missing(problem, module, rule)
                held |= {key for key in _keys(rule) if key not in missing}
                absent |= missing
                found[b] = _fix(found[b], problem, module, _without(rule, missing))
        if not matched:
            raise UserError(
                f"{_entry(rule)}: no module of {graph.name} has this name; `*` stands for one component"
            )
        for key in (key for key in absent if key not in held):
            raise UserError(f"{_entry(rule)}: {absent[key]}")
    return found


def _keys(rule: TensorRule) -> list[str]:
    outputs = ["outputs"] if rule.outputs else []
    return [*(f"params.{n}" for n, _ in rule.params), *(f"inputs.{n}" for n, _ in rule.inputs), *outputs]


def _missing(problem: BlockProblem, module: str, rule: TensorRule) -> dict[str, str]:
    """Keys of the entry that mean nothing at this module, and why."""
    found: dict[str, str] = {}
    shapes = {p.name for p in problem.index.block.parameters}
    for name, _ in rule.params:
        if _joined(module, name) not in shapes:
            own = [n.rpartition(".")[2] for n in shapes if n.rpartition(".")[0] == module]
            found[f"params.{name}"] = f"no parameter {name}; it has {', '.join(sorted(own)) or 'none'}"
    for name, _ in rule.inputs:
        if not _argument_values(problem, module, name):
            names = ", ".join(n for n, _ in arguments(problem, module)) or "none"
            found[f"inputs.{name}"] = f"no tensor argument {name}; it has {names}"
    made = results(problem, module)
    if len(rule.outputs) > len(made):
        found["outputs"] = f"{len(rule.outputs)} outputs, but the module returns {len(made)} tensors"
    return found


def _without(rule: TensorRule, missing: Mapping[str, str]) -> TensorRule:
    return replace(
        rule,
        params=tuple((n, t) for n, t in rule.params if f"params.{n}" not in missing),
        inputs=tuple((n, t) for n, t in rule.inputs if f"inputs.{n}" not in missing),
        outputs=() if "outputs" in missing else rule.outputs,
    )


def _entry(rule: TensorRule) -> str:
    return f'[[tensor]] module = "{rule.module}"'


def modules_of(block: Block) -> tuple[str, ...]:
    """Modules of a block that entries may name: callers of operators, owners of parameters, called modules."""
    found = {op.module: None for op in block.operators}
    found |= {p.name.rpartition(".")[0]: None for p in block.parameters}
    found |= {call.module: None for call in block.calls}
    return tuple(found)


def _joined(path: str, module: str) -> str:
    return ".".join(part for part in (path, module) if part)


def _names(graph: ModelGraph, block: int) -> dict[str, list[str]]:
    """By module of a distinct block, its names in all of the block's instances."""
    paths = [link.path for link in graph.chain if link.block == block]
    return {module: [_joined(path, module) for path in paths] for module in modules_of(graph.blocks[block])}


def _said(rule: TensorRule) -> object:
    return rule.params, rule.inputs, rule.outputs


def _matches(
    names_of: Mapping[str, Sequence[str]], rule: TensorRule, alike: Sequence[re.Pattern[str]]
) -> Iterator[str]:
    """Modules of a distinct block that the entry names. It must name them in all of its instances, alone or
    together with entries that say the same of the others."""
    own, last = _pattern(rule.module), rule.module.rpartition(".")[2]
    depth = rule.module.count(".")
    for module, names in names_of.items():
        # As `*` stands for one component, and equal blocks' modules end alike, most need no closer look.
        other = names[0].rpartition(".")[2]
        if module and "*" not in last and other != last:
            continue
        if not any(name.count(".") == depth and own.fullmatch(name) for name in names):
            continue
        covered = [name for name in names if any(pattern.fullmatch(name) for pattern in alike)]
        if len(covered) < len(names):
            path = names[0].removesuffix(module).rstrip(".")
            raise UserError(
                f"{_entry(rule)}: names {len(covered)} of {len(names)} equal blocks, which are planned alike; "
                f'write "{_joined(_starred(path), module)}"'
            )
        yield module


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"[^.]+"))


def _fix(fixed: Fixed, problem: BlockProblem, module: str, rule: TensorRule) -> Fixed:
    params, nodes, hooks, source = dict(fixed.params), dict(fixed.nodes), set(fixed.hooks), dict(fixed.source)
    shapes = {p.name: p.shape for p in problem.index.block.parameters}
    for name, text in rule.params:
        full = _joined(module, name)
        placement = _placement(text, len(shapes[full]), f"{_entry(rule)}, params.{name}")
        if placement not in problem.params[full]:
            legal = ", ".join(describe(p) for p in problem.params[full])
            raise UserError(f'{_entry(rule)}: {name} = "{text}" is not legal here; legal: {legal}')
        _once(params, full, placement, source, rule)
    for value, scope, text, where in _hooks(problem, module, rule):
        node = next((n for n, k in enumerate(problem.nodes) if (k.value, k.scope) == (value, scope)), None)
        if node is None:
            continue  # nobody reads the value there
        placement = _placement(text, len(problem.index.specs[value].shape), f"{_entry(rule)}, {where}")
        allowed = tuple(s for s in problem.nodes[node].states if layout(s) == placement)
        if not allowed:
            legal = ", ".join(dict.fromkeys(describe(layout(s)) for s in problem.nodes[node].states))
            raise UserError(f'{_entry(rule)}: {where} = "{text}" is not legal here; legal: {legal}')
        _once(nodes, node, allowed, source, rule)
        hooks |= {n for n, e in enumerate(problem.edges) if e.module == module and e.target == node}
    return Fixed(params=params, nodes=nodes, hooks=frozenset(hooks), source=source)


def _once(
    fixed: dict[_Key, _Value], key: _Key, value: _Value, source: dict[str | int, str], rule: TensorRule
) -> None:
    if fixed.get(key, value) != value:
        raise UserError(f"{_entry(rule)} contradicts {source[key]}: they fix the same thing differently")
    fixed[key] = value
    source[key] = _entry(rule)


def _placement(text: str, dims: int, where: str) -> str:
    if text == "replicate":
        return "R"
    if text == "partial":
        return "P"
    match = _SHARD.fullmatch(text)
    if match is None:
        raise UserError(
            f'{where}: unknown layout "{text}"; write "replicate", "shard(DIM)", "shard(DIM, strided PARTS)" or '
            '"partial"'
        )
    if not -dims <= int(match[1]) < dims:
        raise UserError(f'{where} = "{text}": the tensor has {dims} dims')
    return strided(int(match[1]) % dims, int(match[2] or 1))


def describe(placement: str) -> str:
    """A placement in the strategy file's words."""
    if placement.startswith("S"):
        parts = parts_of(placement)
        return f"shard({sharded_dim(placement)}{f', strided {parts}' if parts > 1 else ''})"
    return "partial" if placement == "P" else "replicate"


def arguments(problem: BlockProblem, module: str) -> tuple[tuple[str, str], ...]:
    """(argument, value) of a module: its signature's names where capture knows them, else positions in the
    order in which the module first uses what comes from outside."""
    for call in problem.index.block.calls:
        if call.module == module:
            return call.inputs
    return tuple((str(n), value) for n, value in enumerate(_crossing(problem, module, "input")))


def results(problem: BlockProblem, module: str) -> tuple[str, ...]:
    """Values that a module returns."""
    for call in problem.index.block.calls:
        if call.module == module:
            return call.outputs
    return tuple(_crossing(problem, module, "output"))


def _crossing(problem: BlockProblem, module: str, side: str) -> list[str]:
    edges = [e for e in problem.edges if e.module == module and e.side == side]
    edges.sort(key=lambda e: e.position)
    return list(dict.fromkeys(problem.nodes[e.source].value for e in edges))


def _outer(module: str) -> str:
    """The scope around a module."""
    return module.rpartition(".")[0] if module else OUTSIDE


def _argument_values(problem: BlockProblem, module: str, name: str) -> list[str]:
    """Values that an entry's argument (a name or a position) stands for."""
    known = arguments(problem, module)
    hits = [v for n, v in known if n == name or n.startswith(f"{name}.")]
    if name.isdigit() and not hits and int(name) < len(known):
        return [known[int(name)][1]]
    if not hits and len(known) == 1 and not problem.index.block.calls:
        return [known[0][1]]  # the only argument, under a name that capture does not know
    return hits


def _hooks(problem: BlockProblem, module: str, rule: TensorRule) -> Iterator[tuple[str, str, str, str]]:
    """(value, scope, layout, where in the entry) of each layout hook of an entry."""
    for name, text in rule.inputs:
        for value in _argument_values(problem, module, name):
            yield value, module, text, f"inputs.{name}"
    for value, text in zip(results(problem, module), rule.outputs, strict=False):
        yield value, _outer(module), text, "outputs"


def contradiction(
    graph: ModelGraph, blocks: Sequence[PricedBlock], ties: Sequence[Sequence[tuple[int, str]]],
    given: Sequence[Fixed], tp: int, sequence_parallel: bool,
) -> UserError:  # fmt: skip
    """The error for rules that leave no choice: names the first entry that cannot hold with those before it."""
    entries = list(dict.fromkeys(entry for fixed in given for entry in fixed.source.values()))
    for count in range(len(entries) + 1):
        kept = set(entries[:count])
        trial = [_only(block, fixed, kept) for block, fixed in zip(blocks, given, strict=True)]
        try:
            solve_blocks(trial, ties)
        except NoTensorPlan:
            if count == 0:
                also, instead = "", ""
                if sequence_parallel:
                    also, instead = (
                        " and shard.sequence_parallel = true",
                        "shard.sequence_parallel = false or ",
                    )
                return NotShardable(
                    f"mesh.tp = {tp}{also}: {graph.name} has no legal tensor-parallel plan; use {instead}mesh.tp = 1"
                )
            before = f" with {', '.join(entries[: count - 1])}" if count > 1 else ""
            return UserError(
                f"{entries[count - 1]} cannot hold{before}: no sharding of the operators allows it"
            )
    raise AssertionError("the rules hold after all")


def _only(block: PricedBlock, fixed: Fixed, entries: set[str]) -> PricedBlock:
    return replace(
        block,
        fixed_params={
            n: v for n, v in block.fixed_params.items() if fixed.source.get(n, "") in {"", *entries}
        },
        fixed_nodes={n: v for n, v in block.fixed_nodes.items() if fixed.source.get(n, "") in {"", *entries}},
    )


# ---- plan -> entries


def rules_of(
    graph: ModelGraph,
    problems: Sequence[BlockProblem],
    plan: TensorPlan,
    whole: Sequence[Collection[str]],
) -> tuple[TensorRule, ...]:
    """The entries that make the runtime do what the plan says: sharded parameters, by block those `whole` ones that
    would be sharded otherwise, and layout hooks where a layout changes. A module of a repeated block is written with
    `*` unless a block of another kind has a module of that name which does something else."""
    made = [
        {rule.module: rule for rule in _block_rules(problem, block, said)}
        for problem, block, said in zip(problems, plan.blocks, whole, strict=True)
    ]
    modules = [modules_of(block) for block in graph.blocks]
    by_path: dict[str, TensorRule | None] = {}
    starred: dict[str, str] = {}
    for link in graph.chain:
        star = _starred(link.path)
        for module in modules[link.block]:
            path, rule = _joined(link.path, module), made[link.block].get(module)
            if star or path not in starred:  # code outside of a block may use its modules, too
                starred[path] = _joined(star, module)
            if rule is not None or path not in by_path:
                by_path[path] = _merged(by_path.get(path), rule)
    kinds: dict[str, set[object]] = {}
    for path, rule in by_path.items():
        kinds.setdefault(starred[path], set()).add(rule and (rule.params, rule.inputs, rule.outputs))
    alone = {name for name in kinds if len(_kinds_named(name, kinds)) == 1}
    found: dict[str, TensorRule] = {}
    for path, rule in by_path.items():
        if rule is not None:
            name = starred[path] if starred[path] in alone else path
            if name not in found:
                found[name] = replace(rule, module=name)
    return tuple(found.values())


def _kinds_named(name: str, kinds: Mapping[str, set[object]]) -> set[object]:
    """What is said of all modules that a name stands for; one with `*` may stand for some of the glue, too."""
    if "*" not in name:
        return kinds[name]
    pattern = _pattern(name)
    return set().union(*(said for other, said in kinds.items() if pattern.fullmatch(other)))


def _merged(first: TensorRule | None, second: TensorRule | None) -> TensorRule | None:
    """One entry for a module of the glue that stands in two blocks."""
    if first is None or second is None:
        return first or second
    return replace(
        first,
        params=tuple(dict([*first.params, *second.params]).items()),
        inputs=tuple(dict([*first.inputs, *second.inputs]).items()),
        outputs=first.outputs or second.outputs,
    )


def _starred(path: str) -> str:
    """A repeated block's path with `*` for its indices."""
    return _INDEX.sub("*", path)


def _block_rules(problem: BlockProblem, plan: BlockPlan, whole: Collection[str]) -> Iterator[TensorRule]:
    placed: dict[str, list[tuple[str, str]]] = {}
    for name, placement in plan.params:
        if placement[0] not in "RE" or name in whole:  # that experts are sharded over ep is said by mesh.ep
            module, _, own = name.rpartition(".")
            placed.setdefault(module, []).append((own, describe(placement)))
    hooked: dict[str, dict[str, str]] = {}
    changed: dict[str, dict[str, str]] = {}
    for reshard in plan.reshards:
        target = hooked if reshard.side == "input" else changed
        target.setdefault(reshard.module, {})[reshard.value] = describe(reshard.after)
    for module in dict.fromkeys([*placed, *hooked, *changed]):
        inputs = {}
        for argument, value in arguments(problem, module):
            if value in hooked.get(module, {}):
                inputs[argument.partition(".")[0]] = hooked[module][value]
        yield TensorRule(
            module=module, params=tuple(placed.get(module, ())), inputs=tuple(inputs.items()),
            outputs=_outputs(problem, plan, module, changed.get(module, {})),
        )  # fmt: skip


def _outputs(
    problem: BlockProblem, plan: BlockPlan, module: str, changed: Mapping[str, str]
) -> tuple[str, ...]:
    """Layouts of the module's results up to the last that changes; those that do not are hooked as they are."""
    made = results(problem, module)
    last = max((n for n, value in enumerate(made) if value in changed), default=-1)
    outside = {value: layout for value, scope, layout in plan.layouts if scope == _outer(module)}
    return tuple(changed.get(value, describe(outside.get(value, "R"))) for value in made[: last + 1])
