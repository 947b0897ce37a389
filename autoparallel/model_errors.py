"""Errors of a model's own code, told in its words: what it raises is not a bug of ours."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autoparallel.errors import UserError

_OURS = str(Path(__file__).resolve().parent.parent)
_NOT_THE_MODELS = (  # who calls a model, and whom it calls
    "/torch/", "/autoparallel/", sysconfig.get_paths()["stdlib"] + "/", "<frozen",
)  # fmt: skip


@contextmanager
def in_the_models_words(spec: str) -> Iterator[None]:
    """Turn what the model's own code raises into a UserError with its words and the line that raised it.

    An error is the model's where its traceback ends in code that is neither ours nor only torch's; others stay as they are.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if (where := _line_of_the_model(error)) is None:
            raise
        ended = isinstance(error, SystemExit)
        what = "ended the process by" if ended else "raised"
        raise UserError(f"{spec}: the model's own code {what} {_words(error)} ({where})") from error


def _line_of_the_model(error: BaseException) -> str | None:
    """`file.py:12 in forward`: the last line of the model's code below the last of ours; None where there is none."""
    found = None
    for frame in traceback.extract_tb(error.__traceback__):
        path = str(Path(frame.filename).resolve()) if frame.filename[:1] != "<" else frame.filename
        if _is_ours(path):
            found = None
        elif "/site-packages/" in path or "/dist-packages/" in path:
            if not any(part in path for part in _NOT_THE_MODELS[:2]):
                found = frame
        elif not any(part in path for part in _NOT_THE_MODELS):
            found = frame
    return f"{found.filename}:{found.lineno} in {found.name}" if found else None


def _is_ours(path: str) -> bool:
    here = path.removeprefix(_OURS).lstrip("/").partition("/")[0]
    return path.startswith(_OURS) and here in (
        "autoparallel", "planner", "runtime", "costmodel", "profiles",
    )  # fmt: skip


def _words(error: BaseException) -> str:
    try:
        said = str(error)
    except Exception:
        said = "(which cannot say what it is about)"
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
