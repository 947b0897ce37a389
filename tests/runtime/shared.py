"""What several runtime tests share."""

from __future__ import annotations

from typing import Any


def no_program() -> Any:
    """For tests that never ask a module for its program."""
    raise AssertionError("no test asked for a program")
