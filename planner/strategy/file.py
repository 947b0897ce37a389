"""Read a strategy file: what is there is a constraint, what is missing is left to the planner.

Constraints are a mapping of dotted keys ("mesh.tp", "batch.global", …) to plain values; sequences are tuples,
and "tensor" is a tuple of `TensorRule`. Writing stands in `strategy_write`.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from autoparallel.errors import UserError
from autoparallel.planner.strategy.access_laws import checked_law
from autoparallel.planner.strategy.errors import explain_validation, nearest
from autoparallel.planner.strategy.schema import SCHEMA, SECTIONS, Section, StrategySchema, keys_of
from autoparallel.planner.strategy.stacks import with_stack
from autoparallel.planner.strategy.types import (
    SAYS_NOTHING,
    Batch,
    EmbeddingAccess,
    EmbeddingRule,
    Execution,
    GradSync,
    Mesh,
    Offload,
    Outer,
    Phase,
    Pipeline,
    Recompute,
    RecoveryRule,
    Servers,
    Shard,
    Strategy,
    TensorRule,
)
from autoparallel.planner.strategy.write import write_strategy

__all__ = [
    "ProblemRecord",
    "StrategyFile",
    "apply_settings",
    "merge_constraints",
    "missing_keys",
    "read_strategy_file",
    "strategy_from_constraints",
    "strategy_to_constraints",
    "write_strategy",
]

Constraints = Mapping[str, object]

# Sections that are part of a plan, with the dataclass each one becomes.
_PARTS: dict[str, type] = {
    "batch": Batch,
    "mesh": Mesh,
    "shard": Shard,
    "pipeline": Pipeline,
    "recompute": Recompute,
    "offload": Offload,
    "execution": Execution,
    "grad_sync": GradSync,
    "embedding_access": EmbeddingAccess,
    "recovery": RecoveryRule,
    "servers": Servers,
    "outer": Outer,
}

# Sections that a phase of training may change.
IN_PHASES = ("batch", "mesh", "shard", "pipeline", "recompute", "offload", "grad_sync", "outer")

# Keys whose absence from a complete file means their default, not a decision left open: `[execution]` and
# batch.global are inputs with defaults, these are marked optional in the file format.
# (nor does a complete file say how to recover where nothing is known of failures)
_DEFAULTED = (
    "batch.seq_len", "mesh.groups", "mesh.placement", "mesh.per_node", "shard.secondary", "recompute.per_stage", "grad_sync.weights",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemRecord:
    """`[problem]`: what a file was planned for; `None` where the file does not say."""

    model: str | None = None
    model_args: Mapping[str, str] = field(default_factory=dict)
    graph_hash: str | None = None
    seq_len: int | None = None
    objective: str | None = None
    allow_lossy: bool | None = None
    lossy_methods: tuple[str, ...] = ()
    cluster: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyFile:
    """A strategy file, read and checked. `predicted` and `search` are as `plan` wrote them."""

    path: str
    constraints: Constraints
    problem: ProblemRecord | None
    predicted: Mapping[str, Any]
    search: Mapping[str, Any]


def read_strategy_file(path: str | Path) -> StrategyFile:
    """Read and check a whole strategy file. Raises UserError."""
    raw = _load_toml(Path(path))
    if not raw.keys() & {*SECTIONS, "tensor", "embedding", "problem"}:
        for key, kind in (("group", "cluster"), ("peak_flops", "device")):
            if key in raw:
                raise UserError(f"{path}: is a {kind} file, not a strategy; --cluster takes it")
    return parse_strategy(raw, name=str(path))


def parse_strategy(raw: Mapping[str, Any], *, name: str) -> StrategyFile:
    """Check the parsed TOML of a strategy file called `name`. Raises UserError."""
    _check_schema(raw.get("schema", SCHEMA), name)
    try:
        parsed = StrategySchema.model_validate(dict(raw))
    except ValidationError as error:
        raise UserError(explain_validation(error, name)) from None
    constraints: dict[str, object] = {}
    for section in SECTIONS:
        constraints.update(_section_constraints(section, getattr(parsed, section)))
    if constraints.get("mesh.placement") == ():  # says no more than leaving it out
        del constraints["mesh.placement"]
    if parsed.tensor is not None:
        constraints["tensor"] = tuple(
            TensorRule(
                module=entry.module,
                params=tuple(entry.params.items()),
                inputs=tuple(entry.inputs.items()),
                outputs=tuple(entry.outputs),
            )
            for entry in parsed.tensor
        )
    if parsed.embedding is not None:
        constraints["embedding"] = tuple(EmbeddingRule(**dict(entry)) for entry in parsed.embedding)
    if parsed.phase is not None:
        constraints["phase"] = _phases(parsed.phase, name)
    _check_values(constraints, name)
    _read_laws(constraints, name)
    record = None
    if parsed.problem is not None:
        given = parsed.problem.model_dump(exclude_unset=True)
        record = ProblemRecord(**{key: value for key, value in given.items() if value is not None})
    for table in ("predicted", "search"):
        _check_finite(getattr(parsed, table), f"{name}: [{table}]")
    return StrategyFile(
        path=name,
        constraints=constraints,
        problem=record,
        predicted=parsed.predicted or {},
        search=parsed.search or {},
    )


def _phases(entries: Sequence[Mapping[str, Any]], name: str) -> tuple[Phase, ...]:
    """`[[phase]]` entries, each of which is a strategy file of its own but for `from_step`."""
    found: list[Phase] = []
    for number, entry in enumerate(entries):
        where, step = f"{name}: [[phase]] {number + 1}", entry.get("from_step")
        if isinstance(step, bool) or not isinstance(step, int) or step < 2:
            raise UserError(
                f"{where}: from_step = {step!r}; give the step from which it holds, at least 2 (steps count from 1)"
            )
        if found and step <= found[-1].from_step:
            raise UserError(
                f"{where}: from_step = {step} is not after the phase before it, from step {found[-1].from_step}; phases go "
                "forward: put them in order"
            )
        others = sorted(entry.keys() - {"from_step", *IN_PHASES})
        if others:
            raise UserError(
                f"{where}: {others[0]} stays what it is all through a run; a phase may change {', '.join(IN_PHASES)}"
            )
        rest = {key: value for key, value in entry.items() if key != "from_step"}
        keys = tuple(parse_strategy(rest, name=where).constraints.items())
        if not keys:
            raise UserError(f"{where}: changes nothing; say what, for example grad_sync.compression")
        found.append(Phase(from_step=step, keys=keys))
    return tuple(found)


def _load_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as handle:
            return tomllib.load(handle)
    except FileNotFoundError:
        raise UserError(f"{path}: no such strategy file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; give the strategy file itself") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file in UTF-8; a strategy file is TOML") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None


def _check_schema(schema: object, name: str) -> None:
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        raise UserError(f"{name}: schema = {schema!r}; it must be {SCHEMA}")
    if schema > SCHEMA:
        raise UserError(
            f"{name}: schema = {schema}, but this version reads up to {SCHEMA}; "
            "update autoparallel, or have the file written again by this version"
        )


def _section_constraints(section: str, parsed: Section | None) -> dict[str, object]:
    if parsed is None:
        return {}
    given = parsed.model_dump(exclude_unset=True, by_alias=True)
    return {f"{section}.{key}": _freeze(value) for key, value in given.items()}


def _freeze(value: Any) -> object:
    if isinstance(value, dict):
        return tuple(value.items())
    return tuple(value) if isinstance(value, list) else value


def _read_laws(constraints: dict[str, object], name: str) -> None:
    """Laws of access are checked, and those in files are read, so that the strategy stands alone."""
    law, tables = constraints.get("embedding_access.law"), constraints.get("embedding_access.tables")
    if isinstance(law, str):
        constraints["embedding_access.law"] = checked_law(law, name)
    if isinstance(tables, tuple):
        laws = tuple((module, checked_law(law, name)) for module, law in tables)
        constraints["embedding_access.tables"] = laws


def _check_values(constraints: Constraints, name: str) -> None:
    """What a type cannot say: `mesh.order` names every axis once."""
    order = constraints.get("mesh.order")
    axes = Mesh().order
    if isinstance(order, tuple) and sorted(order) != sorted(axes):
        raise UserError(
            f"{name}: [mesh] order = {list(order)} must name each of {', '.join(axes)} exactly once, "
            "outermost first"
        )


def _check_finite(value: object, where: str) -> None:
    """Raise UserError for a number that is none: plan writes nan and inf nowhere."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where} = {value}: must be a finite number; plan again")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        _check_finite(inner, f"{where} {key}" if isinstance(key, str) else f"{where} entry {key + 1}")


def apply_settings(constraints: Constraints, settings: Sequence[str], *, name: str = "--set") -> Constraints:
    """Add `KEY=VALUE` settings ("mesh.tp=8"); one that contradicts `constraints` is a UserError.

    VALUE is read as TOML, and as a plain string where it is none (`pipeline.schedule=1f1b`).
    """
    result: dict[str, object] = dict(constraints)
    for setting in settings:
        key, equals, text = setting.partition("=")
        key, text = key.strip(), text.strip()
        if not equals or not text:
            raise UserError(f"{name} {setting}: write KEY=VALUE, for example mesh.tp=8")
        result = dict(merge_constraints(result, _parse_setting(key, text, name), name=name))
    return result


def merge_constraints(constraints: Constraints, extra: Constraints, *, name: str) -> Constraints:
    """Both together; a key with two different values is a UserError that names both."""
    for key, value in extra.items():
        if key in constraints and constraints[key] != value:
            raise UserError(
                f"{name} {key}={_plain(value)} contradicts {key} = {_plain(constraints[key])} of the strategy "
                "file or of another option; change one of them"
            )
    return {**constraints, **extra}


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _parse_setting(key: str, text: str, name: str) -> Constraints:
    section, _, leaf = key.partition(".")
    known = [f"{s}.{k}" for s, model in SECTIONS.items() for k in keys_of(model)]
    if section in ("problem", "predicted", "search"):
        raise UserError(f"{name} {key}: [{section}] is written by plan and cannot be set")
    if key not in known:
        raise UserError(f"{name} {key}: no such strategy key; {nearest(key, known)}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    return parse_strategy({section: {leaf: value}}, name=name).constraints


def missing_keys(constraints: Constraints) -> tuple[str, ...]:
    """Keys that a complete strategy has and `constraints` leave to the planner."""
    inputs = ("execution", "embedding_access", "recovery", "servers", "outer")
    optional = {*_DEFAULTED, *(f"{s}.{k}" for s in inputs for k in keys_of(SECTIONS[s]))}
    wanted = [f"{s}.{k}" for s, model in SECTIONS.items() for k in keys_of(model)]
    missing = [key for key in wanted if key not in constraints and key not in optional]
    tp = constraints.get("mesh.tp", 1)
    if "tensor" not in constraints and tp != 1:
        missing.append("tensor")
    rules: Any = constraints.get("embedding", ())
    if any(rule.tier is None or (rule.hot_rows is None and rule.tier != "device") for rule in rules):
        missing.append("embedding")
    return tuple(missing)


def strategy_from_constraints(constraints: Constraints, *, name: str = "strategy") -> Strategy:
    """The strategy that complete constraints spell out. Raises UserError naming the keys that are missing."""
    missing = missing_keys(constraints)
    if missing:
        raise UserError(
            f"{name}: not a complete strategy, {', '.join(missing)} missing; have `autoparallel plan "
            "--strategy` fill it in"
        )
    constraints = with_stack(constraints)
    parts: dict[str, Any] = {}
    for section, kind in _PARTS.items():
        given = {
            f.name: constraints[f"{section}.{f.name.rstrip('_')}"]
            for f in fields(kind)
            if f"{section}.{f.name.rstrip('_')}" in constraints
        }
        parts[section] = kind(**given)
    rules: Any = constraints.get("tensor", ())
    tables: Any = constraints.get("embedding", ())
    if all(rule.tier == "device" for rule in tables):  # as without rules
        tables = ()
    phases: Any = constraints.get("phase", ())
    return Strategy(**parts, tensor=tuple(rules), embedding=tuple(tables), phases=tuple(phases))


def strategy_to_constraints(strategy: Strategy) -> Constraints:
    """Every decision of a strategy by dotted key: the inverse of `strategy_from_constraints`."""
    result: dict[str, object] = {}
    for section, kind in _PARTS.items():
        part = getattr(strategy, section)
        if part in SAYS_NOTHING:
            continue
        result.update({f"{section}.{f.name.rstrip('_')}": getattr(part, f.name) for f in fields(kind)})
    if not strategy.batch.seq_len:  # which is no length
        del result["batch.seq_len"]
    result["tensor"] = strategy.tensor
    if strategy.embedding:
        result["embedding"] = strategy.embedding
    if strategy.phases:
        result["phase"] = strategy.phases
    return result
