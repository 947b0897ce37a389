"""The glossary of docs/architecture.md, held to: what it has another word for names nothing in the planner."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLANNER = ("search", "heterogeneous", "embedding", "explain", "sharding", "expand", "strategy")
UNITS_OF_MEASUREMENT = ("small_numbers.py", "relaxation.py", "solve.py", "meshes.py", "prices.py")
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def replaced_words() -> dict[str, str]:
    """From each word that the glossary replaces to the one that it has instead."""
    text = (ROOT / "docs/architecture.md").read_text()
    rows = [
        line.strip("|").split("|") for line in text.split("## Words")[1].splitlines() if line.startswith("| ")
    ]
    found = {}
    for word, _, instead in rows[1:]:
        for other in re.sub(r"\(.*\)", "", instead).split(","):
            if other.strip():
                found[other.strip()] = word.strip()
    return found


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Everything that a file names, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield node.lineno, name
            case _:
                pass


def test_the_planner_speaks_as_the_glossary_does() -> None:
    replaced = replaced_words()
    assert {"deal", "wires", "pin"} <= replaced.keys()
    wrong = []
    for folder in PLANNER:
        for path in sorted((ROOT / "planner" / folder).rglob("*.py")):
            for line, name in names(ast.parse(path.read_text())):
                for word in WORD.findall(name):
                    if word.lower() in replaced and not allowed(path, word.lower()):
                        wrong.append(f"{path.relative_to(ROOT)}:{line} {name}: say {replaced[word.lower()]}")
    assert not wrong, "\n".join(wrong)


def allowed(path: Path, word: str) -> bool:
    """Units of fused kernels, of FSDP2 and of measurement."""
    return word == "unit" and (
        "search" not in path.relative_to(ROOT).parts or path.name in UNITS_OF_MEASUREMENT
    )
