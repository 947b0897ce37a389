"""Takes values out of a file's figures, checks their range and keeps their provenance."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from autoparallel.errors import UserError
from autoparallel.profiles.hardware import Provenance, ValueKind
from autoparallel.profiles.schema import FigureTable, ProvenanceTable


class Figures:
    """The figures of one file, called `where` in error messages."""

    def __init__(self, where: str, listed: Sequence[ProvenanceTable] = ()) -> None:
        self.where = where
        self.provenance: dict[str, Provenance] = {}
        self.listed = {key: Provenance(kind=e.kind, source=e.source) for e in listed for key in e.keys}

    def take(self, key: str, figure: FigureTable, *, least: float = 0.0, above: bool = True) -> float:
        """The number under `key`, which is above (or at) `least`."""
        value = figure.value
        if value < least or (above and value == least) or not isfinite(value):
            bound = "more than" if above else "at least"
            raise UserError(f"{self.where}: `{key}` = {value:g} must be {bound} {least:g}")
        known = Provenance(kind=figure.kind, source=figure.source or self.where)
        self.provenance[key] = self.listed.get(key, known) if figure.kind is ValueKind.USER else known
        return value

    def rate(self, key: str, figure: FigureTable) -> float:
        """The number under `key`, of which there is at least one a second: less is a unit mistaken."""
        return self.take(key, figure, least=1.0, above=False)

    def whole(self, key: str, figure: FigureTable, *, above: bool = True) -> int:
        """The whole number under `key`."""
        value = self.take(key, figure, above=above)
        if value != int(value):
            raise UserError(f"{self.where}: `{key}` = {value:g} must be a whole number")
        return int(value)
