"""docs/planner.md names functions: they are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_function_that_the_page_names_is_in_the_planner() -> None:
    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("|") and line.rstrip().endswith("` |")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.rsplit(" | ", 1)[-1])}
    assert len(named) > 12, named
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "planner").rglob("*.py"))
    missing = [name for name in sorted(named) if not re.search(rf"\b(def|class) {name}\b", sources)]
    assert not missing


def test_every_file_that_the_page_names_exists() -> None:
    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    for path in set(re.findall(r"`((?:planner|costmodel)/[\w/.]+)`", page)):
        assert (ROOT / path).exists(), path
