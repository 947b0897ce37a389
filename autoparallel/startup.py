"""What a command's own process does to be ready sooner. None of it is done to a process that is the caller's."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType

from autoparallel.costmodel.collecting import without_collection
from autoparallel.costmodel.graph import ModelGraph
from autoparallel.errors import UserError
from autoparallel.inputs import Checked, load_graph
from autoparallel.planner.side_by_side import Elsewhere, usable_processes

# What planning imports, and the capture of a model does not.
PLANNER = ("autoparallel.answer", "autoparallel.cli_words", "autoparallel.planner.plan")
SOLVER = "ortools.sat.python.cp_model"


@without_collection()
def import_planner() -> None:
    """Import all that a plan needs once there is a graph."""
    _import_solver()
    for name in PLANNER:
        import_module(name)


def _import_solver() -> None:
    """OR-tools without pandas: it types its series of variables with pandas' classes and needs nothing else of them,
    and pandas takes a quarter of a second to import."""
    if SOLVER in sys.modules or "pandas" in sys.modules:
        return
    stand_in = ModuleType("pandas")
    for name in ("DataFrame", "Index", "Series"):
        setattr(stand_in, name, type(name, (), {}))
    sys.modules["pandas"] = stand_in
    try:
        import_module(SOLVER)
    except (AttributeError, ImportError):  # another version of OR-tools asks for more: then with pandas
        sys.modules.pop(SOLVER, None)
    finally:
        del sys.modules["pandas"]


_BOARD_BYTES = 512


@dataclass(frozen=True, slots=True)
class Begun:
    """A capture that has begun: `wait` for it, which raises what it raises; what it is `doing` just now."""

    wait: Callable[[], ModelGraph]
    doing: Callable[[], str]


@contextmanager
def begun_capture(checked: Checked) -> Iterator[Begun]:
    """Begin to read or capture a model.

    A capture imports torch and all of the model: where there are two processors it has a process of its own, so that this
    one can import the planner meanwhile. Once torch is here it may have threads, and this process is not forked.
    """
    board = mmap.mmap(-1, _BOARD_BYTES)  # which a process that is forked shares

    def say(text: str) -> None:
        board[:] = text.encode()[:_BOARD_BYTES].ljust(_BOARD_BYTES)

    def doing() -> str:
        return bytes(board).strip(b"\0 ").decode(errors="ignore")

    say("importing its code")
    if checked.is_saved_graph or "torch" in sys.modules or usable_processes() == 1:
        yield Begun(partial(load_graph, checked, say), doing)
        return
    with Elsewhere([partial(_graph_or_error, checked, say)]) as elsewhere:

        def wait() -> ModelGraph:
            found = elsewhere.results()
            if found is None:  # done again where its error can be seen
                return load_graph(checked, say)
            if isinstance(found[0], UserError):
                raise found[0]
            return found[0]

        yield Begun(wait, doing)


def _graph_or_error(checked: Checked, say: Callable[[str], None]) -> ModelGraph | UserError:
    """Its error as a plain one: the class it has may be torch's neighbour, which the first process has not imported."""
    try:
        return load_graph(checked, say)
    except UserError as error:
        return UserError(str(error))
