"""Software stacks: what a training framework does of its own accord, as data with sources (`profiles/stacks/*.toml`).

A stack says what the user's software is, where a strategy says how it is used: what overlaps, what waits, what is kept, which
schedules there are. It knows nothing of what the keys mean: `planner/strategy/stacks.py` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from autoparallel.errors import UserError
from autoparallel.profiles.load import SHIPPED, check, is_path, read_toml
from autoparallel.profiles.schema import SCHEMA, Strict, nearest

PLAIN = "plain"  # the stack of who names none


class _Said(Strict):
    """One property: its value, where it was read, and the dtypes of matrix products in which it does not hold."""

    value: Any
    source: str = Field(min_length=1)
    unless_dtype: list[str] = Field(default_factory=list)


class _Runs(Strict):
    """What a stack has of what could be searched for; what is not said is not limited."""

    schedules: _Said | None = None
    zero: _Said | None = None
    sequence_parallel: _Said | None = None


class StackFile(Strict):
    """A stack file; what it does not say comes from the stack that `of` names."""

    schema_: int = Field(alias="schema", default=SCHEMA)
    name: str
    says: str = Field(min_length=1)
    of: str = ""
    execution: dict[str, _Said] = Field(default_factory=dict)
    runs: _Runs = Field(default_factory=_Runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A property of a stack."""

    value: object
    source: str
    unless_dtype: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A software stack. `execution`: keys of a strategy's `[execution]`; `runs`: what it has of "schedules", "zero" (levels)
    and "sequence_parallel" (with every tensor parallelism)."""

    name: str
    says: str
    execution: Mapping[str, Said]
    runs: Mapping[str, Said]


def stack_names() -> tuple[str, ...]:
    """Names of the stacks that ship."""
    return tuple(sorted(_shipped()))


def load_stack(name_or_path: str) -> Stack:
    """A stack by its name, or from a file. Raises UserError."""
    return _load(name_or_path, Path(), ())


def _load(name: str, beside: Path, before: Sequence[str]) -> Stack:
    shipped = _shipped()
    if name not in shipped and not is_path(name):
        raise UserError(
            f"unknown stack `{name}`{nearest(name, shipped)}; known: {', '.join(sorted(shipped))}"
        )
    path = shipped.get(name, beside / name)
    if not path.is_file():
        raise UserError(f"{path}: no such stack file")
    if str(path) in before:
        raise UserError(f"{path}: `of` leads back to it")
    table = check(StackFile, read_toml(path), str(path))
    parent = _load(table.of, path.parent, (*before, str(path))) if table.of else None
    runs = {
        key: said for key in ("schedules", "zero", "sequence_parallel") if (said := getattr(table.runs, key))
    }
    return Stack(
        name=table.name,
        says=table.says,
        execution={**(parent.execution if parent else {}), **_all(table.execution)},
        runs={**(parent.runs if parent else {}), **_all(runs)},
    )


def _all(found: Mapping[str, _Said]) -> dict[str, Said]:
    return {
        key: Said(
            value=tuple(said.value) if isinstance(said.value, list) else said.value,
            source=said.source,
            unless_dtype=tuple(said.unless_dtype),
        )
        for key, said in found.items()
    }


def _shipped() -> dict[str, Path]:
    return {path.stem: path for path in sorted((SHIPPED / "stacks").glob("*.toml"))}
