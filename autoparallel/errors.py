"""Errors that a user can act on. Anything else that escapes is a bug of ours."""

from __future__ import annotations


class UserError(ValueError):
    """The input is wrong: says what, where, and what to try. Exit status 2."""

    passes = False  # whether the same start, made again, may do without it: others are at fault
