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
_MODES = ("__torch_dispatch__", "__torch_function__")


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


@contextmanager
def on_tensors_without_values(name: str) -> Iterator[None]:
    """Turn what torch raises where code reads values of a dry run's tensors, which have none, into a UserError that says where."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        from autoparallel.runtime.torch_private import WITHOUT_VALUES

        if not isinstance(error, WITHOUT_VALUES):
            raise
        line = _line_of_the_model(error, through_modes=True)
        where = f"the model's own code reads them ({line})" if line else f"{_line_of_ours(error)} reads them"
        raise UserError(
            f"{name}: a dry run's tensors have no values, and {where}: {_words(error).splitlines()[0]}; run it under "
            "torchrun instead"
        ) from error


def _line_of_ours(error: BaseException) -> str:
    """`autoparallel's own runtime/file.py:12 in finish`: the last line of ours."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.name not in _MODES]
    ours = [f for f in frames if _is_ours(str(Path(f.filename).resolve()))]
    if not ours:
        return "code of torch"
    path = str(Path(ours[-1].filename).resolve()).removeprefix(_OURS).lstrip("/")
    return f"autoparallel's own {path}:{ours[-1].lineno} in {ours[-1].name}"


def _line_of_the_model(error: BaseException, *, through_modes: bool = False) -> str | None:
    """`file.py:12 in forward`: the last line of the model's code below the last of ours; None where there is none. `through_modes`:
    modes of ours that pass operators on are not seen."""
    found = None
    for frame in traceback.extract_tb(error.__traceback__):
        if through_modes and frame.name in _MODES:
            continue
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
