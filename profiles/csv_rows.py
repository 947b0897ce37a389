"""Rows of a user's CSV with named columns: measured steps, tables of kernels."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from autoparallel.errors import UserError


def read_csv_rows(
    path: Path, known: Sequence[str], needed: Sequence[str], says: str
) -> tuple[tuple[str, dict[str, str]], ...]:
    """Each row by its columns, and where it stands (`FILE: row N`, the header being row 1).

    `says` completes "FILE: needs …" where a needed column or every row is missing. Raises UserError, naming column or row.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows, columns = list(reader), reader.fieldnames or ()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not rows or not set(needed) <= set(columns):
        raise UserError(f"{path}: needs {says}")
    if unknown := [name for name in columns if name not in known]:
        raise UserError(f"{path}: unknown column `{unknown[0]}`; known: {', '.join(known)}")
    found = []
    for number, row in enumerate(rows, start=2):
        # csv keeps cells without a column under None, and fills columns without a cell with None.
        if None in row or None in row.values():
            raise UserError(
                f"{path}: row {number}: needs a cell for each of the {len(columns)} columns, no more"
            )
        found.append((f"{path}: row {number}", row))
    return tuple(found)
