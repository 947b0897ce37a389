"""What a row of the table is, and how one is written: a key, its values, what else must hold, why, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoparallel.planner.strategy.file import strategy_to_constraints
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles.stacks import PLAIN

GLOO = "gloo"  # the backend on which our own messages make rings and trees
# Sizes of the mesh, or values of other keys, that must hold together; of several such sets one must.
Needs = tuple[Mapping[str, tuple[object, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A complete strategy, and where it is to run. `level_sizes` are devices below one port of each network level, innermost
    first, none where the cluster is not known (None: it will be); `shares_experts`: whether tokens can be sent to all of the
    model's experts; `numbers`: those of its parameters (None: not known)."""

    strategy: Strategy
    level_sizes: Sequence[int] | None = None
    backend: str = GLOO
    shares_experts: bool = True
    numbers: int | None = None

    @cached_property
    def decided(self) -> Mapping[str, object]:
        """The strategy by dotted key."""
        return strategy_to_constraints(self.strategy)


def nothing(_: object) -> bool:
    """No value is asked for: what is refused depends on the whole case."""
    return False


def in_tiers(value: object) -> bool:
    """Whether `[[embedding]]` has tables that stand elsewhere than on every device."""
    return isinstance(value, tuple) and any(rule.tier not in ("device", None) for rule in value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. `found` says what of a case is refused, key, value and remedy; `needs` what a search is given."""

    key: str
    values: str
    holds: str  # what else must hold, in words
    why: str
    found: Callable[[Case], Iterator[str]]
    asked: Callable[[object], bool] = nothing
    needs: Needs = ()
    instead: str = ""
    said: bool = False


def only_with(
    key: str, values: tuple[object, ...] | Callable[[object], bool], needs: Needs, *, holds: str, why: str, instead: str,
    words: str = "", said: bool = False,
) -> Row:  # fmt: skip
    """A row of values that run where one of `needs` holds (none: nowhere)."""
    asked = values if callable(values) else lambda value: value in values

    def found(case: Case) -> Iterator[str]:
        decided = case.decided
        if not asked(decided.get(key)) or any(holds_in(need, decided) for need in needs):
            return
        beside = [
            shown(k, decided[k])
            for k, allowed in (needs[0] if needs else {}).items()
            if decided[k] not in allowed
        ]
        also = f" with {' and '.join(beside)}" if beside else ""
        yield f"{shown(key, decided[key])}{_of_stack(key, case.strategy)}{also}: {why}; {instead}"

    named = words or (", ".join(_value(value) for value in values) if not callable(values) else "")
    return Row(
        key=key,
        values=named,
        holds=holds,
        why=why,
        found=found,
        asked=asked,
        needs=needs,
        instead=instead,
        said=said,
    )


def holds_in(need: Mapping[str, tuple[object, ...]], decided: Mapping[str, object]) -> bool:
    """Whether every key of one set of needs has a value that it allows."""
    return all(decided.get(key) in allowed for key, allowed in need.items())


def _of_stack(key: str, strategy: Strategy) -> str:
    """Which software a flag of `[execution]` comes from, where a file names one."""
    stack = strategy.execution.stack
    return f' (stack = "{stack}")' if key.startswith("execution.") and stack != PLAIN else ""


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(list(value) if isinstance(value, tuple) else value)


def shown(key: str, value: object) -> str:
    """`key = value` as a strategy file has it; a table in tiers by its module."""
    if key == "embedding" and isinstance(value, tuple):
        rule = next(rule for rule in value if in_tiers((rule,)))
        return f'[[embedding]] module = "{rule.module}", tier = "{rule.tier}"'
    return f"{key} = {_value(value)}"
