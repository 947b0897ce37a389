"""A software stack in a strategy: what it says of `[execution]`, and which schedules and levels of ZeRO it has.

`execution.stack = NAME` stands for the keys that the stack's file states (`profiles/stacks/`); keys that a strategy states itself
go before them. A search leaves out what the stack does not have, unless the user fixes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache

from pydantic import ValidationError

from autoparallel.errors import UserError
from autoparallel.planner.strategy.errors import explain_validation
from autoparallel.planner.strategy.schema import ExecutionSection
from autoparallel.planner.strategy.types import SCHEDULES, Execution, Strategy
from autoparallel.profiles.stacks import PLAIN, Said, Stack, load_stack

STACK = "execution.stack"
OWN_STACK = "autoparallel"  # of `auto_parallelize`
# Flags that describe software alone: a file says them only where they differ from what its stack says.
SOFTWARE_KEYS = tuple(f.name for f in fields(Execution) if f.default is False)
HALF = "half"  # a dtype: that of parameters trained in 16 bits or less
_FULL = ("fp64", "fp32", "tf32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """What a stack has; None where that is not limited. `sequence_parallel`: whether with every tensor parallelism."""

    schedules: tuple[str, ...] | None = None
    zeros: tuple[int, ...] | None = None
    sequence_parallel: bool | None = None

    def lacks(self, strategy: Strategy, given: Mapping[str, object]) -> str | None:
        """What of a strategy the stack does not have, in words; keys that the user has `given` are not judged."""
        schedule, zero, shared = strategy.pipeline.schedule, strategy.shard.zero, strategy.mesh.tp > 1
        if self.schedules and "pipeline.schedule" not in given and schedule not in self.schedules:
            return f"{strategy.execution.stack} has no schedule {schedule}"
        if self.zeros and "shard.zero" not in given and zero not in (0, *self.zeros):
            return f"{strategy.execution.stack} has no ZeRO-{zero}"
        wanted = self.sequence_parallel
        judged = shared and wanted is not None and "shard.sequence_parallel" not in given
        if judged and strategy.shard.sequence_parallel != wanted:
            return f"{strategy.execution.stack} has sequence parallelism with {'every' if wanted else 'no'} tensor parallelism"
        return None


def stack_values(name: str, dtype: str) -> dict[str, object]:
    """What a stack says of `[execution]` where products are computed in `dtype`. Raises UserError."""
    found = {key: _value(said, dtype) for key, said in _stack(name).execution.items()}
    found = {key: value for key, value in found.items() if value is not None}
    try:
        ExecutionSection.model_validate(found)
    except ValidationError as error:
        raise UserError(explain_validation(error, f"stack {name}: [execution]")) from None
    return found


def with_stack(constraints: Mapping[str, object]) -> dict[str, object]:
    """The constraints with what their stack says where they say nothing. Raises UserError."""
    name = constraints.get(STACK, PLAIN)
    assert isinstance(name, str)
    dtype = constraints.get("execution.dtype", Execution().dtype)
    said = {f"execution.{key}": value for key, value in stack_values(name, str(dtype)).items()}
    return {**said, **constraints}


def told(execution: Execution, constraints: Mapping[str, object]) -> Execution:
    """An execution with what constraints say, and their stack where they name one. Raises UserError."""
    said = with_stack(constraints) if STACK in constraints else constraints
    found = {f.name: said[f"execution.{f.name}"] for f in fields(Execution) if f"execution.{f.name}" in said}
    return replace(execution, **found)  # type: ignore[arg-type]


def as_stated(execution: Execution) -> tuple[str, ...]:
    """The flags of software that are as its stack has them, so that a file need not say them; none where the stack is a file
    that may not come along."""
    if execution.stack.endswith(".toml"):
        return ()
    said = stack_values(execution.stack, execution.dtype)
    return tuple(key for key in SOFTWARE_KEYS if getattr(execution, key) == said.get(key, False))


def runs_of(name: str) -> Runs:
    """Which schedules and levels of ZeRO a stack has. Raises UserError."""
    runs = _stack(name).runs
    schedules, zeros = (runs[key].value if key in runs else None for key in ("schedules", "zero"))
    always = runs["sequence_parallel"].value if "sequence_parallel" in runs else None
    if schedules is not None and not (isinstance(schedules, tuple) and set(schedules) <= set(SCHEDULES)):
        raise UserError(f"stack {name}: runs.schedules = {schedules}: names of {', '.join(SCHEDULES)}")
    if zeros is not None and not (isinstance(zeros, tuple) and set(zeros) <= {0, 1, 2, 3}):
        raise UserError(f"stack {name}: runs.zero = {zeros}: levels from 0 to 3")
    if always is not None and not isinstance(always, bool):
        raise UserError(f"stack {name}: runs.sequence_parallel = {always}: true or false")
    return Runs(schedules=schedules, zeros=zeros, sequence_parallel=always)


def _value(said: Said, dtype: str) -> object:
    """The value in a dtype; None where the property does not hold there."""
    if dtype in said.unless_dtype:
        return None
    if said.value == HALF:
        return "fp32" if dtype in _FULL else "fp16" if dtype == "fp16" else "bf16"
    return said.value


@cache
def _shipped(name: str) -> Stack:
    return load_stack(name)


def _stack(name: str) -> Stack:
    """A stack that ships is read once; a user's file may change."""
    return load_stack(name) if name.endswith(".toml") else _shipped(name)
