"""What keeps the cold rows of a model's tables, whoever it is: the questions that a worker asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShape:
    """A table, by the name of its parameter; rows and numbers a row."""

    name: str
    rows: int
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a step ends: the optimizer's class, its options by table, by what gradients are multiplied, and which rows move."""

    kind: type
    options: Mapping[int, Mapping[str, Any]]
    scale: float
    all_rows: bool


class Store(Protocol):
    """Rows by table and number. Calls are collective over the data-parallel ranks where ranks keep the rows."""

    def pull(self, asked: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        """The rows of each table at these places, each named once."""

    def push(self, given: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        """Gradients of rows, for the end of the step."""

    def square(self) -> float:
        """The sum of squares of the gradients that have come, over all ranks and tables."""

    def sums(self, table: int) -> tuple[Tensor, Tensor]:
        """The rows of a table that have gradients, and their sums, over all ranks."""

    def commit(self, ending: Ending) -> None:
        """The end of a step."""

    def forget(self) -> None:
        """Drop this worker's gradients that no step has used."""

    def about(self, table: int) -> tuple[int, tuple[str, ...]]:
        """Steps that a table has behind it, and the parts of the state that its rows have."""

    def read(self, table: int, name: str, rows: Tensor) -> Tensor:
        """Values ("values") or a part of the state of rows; each rank may ask for others."""

    def write(self, table: int, name: str, rows: Tensor, values: Tensor) -> None:
        """The inverse of `read`."""

    def begin_at(self, table: int, steps: int) -> None:
        """So many steps lie behind a table."""

    def counts(self, table: int) -> Tensor:
        """How often each row of a table was asked for, the long past counting less."""

    def close(self) -> None:
        """No further calls."""
