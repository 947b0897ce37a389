"""How a command ends: exit statuses and messages, never a traceback for what a user can act on."""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

from autoparallel.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")

USER_ERROR, NOTHING_FITS, TIMED_OUT = 2, 3, 4
DIFFERS = 4  # a dry run that is not what was priced
# What is wrong with a path that no check of ours foresaw: too long, a circle of links, not permitted, a full disk.
UNUSABLE = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC)
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def exits(command: Callable[P, R]) -> Callable[P, R]:
    """Turn what a command raises into its message on standard error and its exit status."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except UserError as error:
            raise _end(f"error: {error}", USER_ERROR) from None
        except KeyboardInterrupt:
            raise _end("interrupted; nothing was written", INTERRUPTED) from None
        except BrokenPipeError:  # the reader of standard output went away
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except Exception as error:
            if _was_interrupted(error):
                raise _end("interrupted; nothing was written", INTERRUPTED) from None
            if isinstance(error, OSError) and error.filename and error.errno in UNUSABLE:
                raise _end(
                    f"error: {error.filename}: {error.strerror}; give another path", USER_ERROR
                ) from None
            if not isinstance(error, ValueError | TimeoutError):
                raise
            raise _search_end(error) from None

    return wrapped


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind it: a compiled module interrupted while it is imported says "initialization failed"."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _search_end(error: Exception) -> BaseException:
    """The end of a search without a plan; anything else is a bug of ours and keeps its traceback."""
    from autoparallel.planner.search.answer.outcome import InfeasiblePlan, SearchTimeout

    if isinstance(error, InfeasiblePlan):
        return _end(str(error), NOTHING_FITS)
    if isinstance(error, SearchTimeout):
        return _end(f"{error}", TIMED_OUT)
    return error


def _end(message: str, status: int) -> typer.Exit:
    print(message, file=sys.stderr)
    return typer.Exit(status)
