"""The rules that keep the house in order: who may import whom, and how large a file or function may grow."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("profiles", "costmodel", "planner", "runtime", "autoparallel")
MAY_IMPORT = {
    "profiles": {"profiles"},
    "costmodel": {"costmodel", "profiles"},
    "planner": {"planner", "costmodel", "profiles"},
    "runtime": {"runtime", "planner", "costmodel", "profiles"},
    "autoparallel": {"autoparallel", "runtime", "planner", "costmodel", "profiles"},
}
MAY_IMPORT_TORCH = (
    "planner/capture/",
    "runtime/",
    "autoparallel/api.py",
    "autoparallel/trainer.py",
    "autoparallel/trained.py",
    "autoparallel/replicated.py",
    "autoparallel/samples.py",
)
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def source_files() -> list[Path]:
    """Every source file once: the links inside autoparallel/ are not followed."""
    found = []
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder)
            if not (folder == "autoparallel" and inside.parts[0] in MAY_IMPORT):
                found.append(path)
    return found


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def folder_of(module: str) -> str | None:
    """The house folder a dotted import lands in; None for other packages and for autoparallel.errors."""
    parts = module.split(".")
    if parts[0] != "autoparallel" or module.startswith(("autoparallel.errors", "autoparallel.__version__")):
        return None
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "autoparallel"


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_imports_only_what_its_folder_may(path: Path) -> None:
    place = str(path.relative_to(ROOT))
    for module in imports(ast.parse(path.read_text())):
        target = folder_of(module)
        if target is not None:
            assert target in MAY_IMPORT[place.split("/")[0]], f"{place} imports {module}"
        if module.split(".")[0] in ("torch", "transformers"):
            assert place.startswith(MAY_IMPORT_TORCH), f"{place} imports {module}"


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES, path
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{path.name}:{node.lineno} {node.name} has {lines} lines"


def sets_looped_over(tree: ast.AST) -> Iterator[int]:
    """Lines that loop over a set, whose order is another in every process."""
    for node in ast.walk(tree):
        looped = node.iter if isinstance(node, ast.For | ast.comprehension) else None
        made = isinstance(looped, ast.Call) and ast.unparse(looped.func) in ("set", "frozenset")
        if looped is not None and (made or isinstance(looped, ast.Set | ast.SetComp)):
            yield looped.lineno


def test_the_planner_loops_over_nothing_whose_order_a_process_decides() -> None:
    """Equal inputs give equal bytes: also what a solver is given must come in the same order."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in source_files()
        if path.relative_to(ROOT).parts[0] == "planner"
        for line in sets_looped_over(ast.parse(path.read_text()))
    ]
    assert not found, found


MAPPED = ("profiles", "costmodel", "planner", "runtime")  # and the packages inside


def mapped_packages() -> list[Path]:
    inside = (path.parent for folder in MAPPED for path in (ROOT / folder).rglob("__init__.py"))
    return [folder for folder in sorted(inside) if "- `" in (folder / "__init__.py").read_text()]


@pytest.mark.parametrize("folder", mapped_packages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_package_that_lists_its_files_lists_them_all(folder: Path) -> None:
    """The first thing that a newcomer reads of a package stays true."""
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    named = set(re.findall(r"`(\w+(?:\.py|/))`", said))
    there = {p.name for p in folder.glob("*.py")} - {"__init__.py"}
    there |= {f"{p.parent.name}/" for p in folder.glob("*/__init__.py")}
    assert named == there, f"not named: {sorted(there - named)}; not there: {sorted(named - there)}"


# Each imports from those before it; `profiling` from the first two alone.
ROOMS = (
    "fsdp_private",
    "torch_private",
    "own_checkpoints",
    "dtensor_private",
    "collectives_private",
    "ranks",
    "capabilities",
    "tensor",
    "context",
    "experts",
    "gradients",
    "loading",
    "servers",
    "memory",
    "lowering",
    "stages",
    "pipeline",
    "limits",
    "start",
    "check",
    "checkpoints",
    "guards",
    "monitor",
    "elastic",
)


def places_in_runtime(module: str) -> tuple[str, str] | None:
    """The room and, where it is a package, the file in it that a dotted import lands in; None: not in the runtime."""
    parts = module.split(".")
    if parts[:2] != ["autoparallel", "runtime"] or len(parts) < 3:
        return None
    inside = (ROOT / "runtime" / parts[2]).is_dir() and len(parts) > 3
    return parts[2], parts[3] if inside else ""


@pytest.mark.parametrize("room", [*ROOMS, "profiling"])
def test_rooms_of_the_runtime_are_entered_by_their_doors(room: str) -> None:
    """Imports go one way, and to files that the other room's first page says are open."""
    before = ROOMS[: ROOMS.index(room)] if room in ROOMS else [*ROOMS[: ROOMS.index("context")], "gradients"]
    folder = ROOT / "runtime" / room
    for path in sorted(folder.glob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]:
        for module in imports(ast.parse(path.read_text())):
            place = places_in_runtime(module)
            if place is None or place[0] == room:
                continue
            other, file = place
            assert other in before, f"{path}: {module} is not before {room}"
            if file:
                page = (
                    ast.get_docstring(ast.parse((ROOT / "runtime" / other / "__init__.py").read_text())) or ""
                )
                doors = re.findall(r"`(\w+)`", page.split("Open to other rooms:")[1])
                assert file in doors, f"{path}: {module} is not open to other rooms"


def test_every_test_folder_mirrors_a_source_folder() -> None:
    names = {p.name for p in (ROOT / "tests").iterdir() if p.is_dir() and not p.name.startswith("__")}
    expected = {
        "profiles",
        "costmodel",
        "planner",
        "capture",
        "runtime",
        "cli",
        "report",
        "repo",
        "benchmarks",
    }
    assert names <= expected, sorted(names - expected)
